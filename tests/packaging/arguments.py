"""Writes `docs/reference/arguments.md`, and says what nothing explains: `python -m tests.packaging.arguments`.

A docstring says what the signature cannot. An argument that means the same everywhere is explained once, here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.packaging.names import public_definitions
from tests.packaging.settings import table

PAGE = Path(__file__).parents[2] / "docs/reference/arguments.md"
COMMON: dict[str, str] = {
    "agent": "the agent: a `LitAgent`, or a function that becomes one",
    "agent_match": "pattern for names of agents and roles whose calls count; None is all",
    "algorithm": "name of the algorithm of a run",
    "annotation": "attributes by name; nested values are flattened with dots",
    "attempt_id": "id of the attempt; None or `latest` is the latest one, where that is allowed",
    "attributes": "attributes of a span by name: strings, numbers, booleans, or lists of one of these",
    "by": "the field whose values make the groups",
    "collection": "of the older system, refused: give each store a `partition_id`",
    "config": "the `RolloutConfig` of a rollout; None is the default one. Of a run: its settings, as JSON",
    "content_encoding": "how a body is packed: `gzip`, `identity`, or empty",
    "dataset": "the tasks: a sequence, or what `Trainer.fit` takes",
    "dedup_llm_call": "take a call once that two spans tell of",
    "description": "a text beside a status",
    "ei": "what `sys.exc_info` gives",
    "end_time": "Unix seconds; None is now",
    "ending": "how the run ended: a `RunEnding`",
    "error": "what went wrong: an exception, or an `AttemptError`",
    "exception": "the exception to record",
    "exclude_llm_call_in_reward": "leave out calls that were made to compute a reward",
    "filter_logic": "`and`: all conditions hold; `or`: at least one does",
    "filters": "conditions by field: a `FilterOptions`",
    "fn": "the function to wrap",
    "form": "how a body is written: the content type of protobuf or of JSON",
    "func": "the function to wrap or to call",
    "group_level": "how many labels, from the first, a backend that groups keeps; None is all",
    "heartbeat": "whether the run is alive at this moment",
    "heartbeat_stats": "what a worker tells of its machine: numbers by name",
    "hold": "counts unpacked bytes against the budget of the server",
    "hooks": "a `Hook` or several; called around every rollout",
    "input": "the task, any JSON value",
    "interested_span_match": "pattern for names of spans that are filled in a picture",
    "kind": "class of the message that a body holds",
    "kind_in": "kinds of records; None is every kind",
    "label_names": "names of the labels that a metric has",
    "labels": "the value of each label of a metric",
    "last_heartbeat_time": "Unix seconds",
    "lease_seconds": "a worker that is silent for so long loses the rollouts that it has claimed",
    "level": "level of logging, as a word or a number",
    "limit": "how many to return at most; -1 is all",
    "llm_call_match": "pattern for names of a tracer's spans that are model calls",
    "llm_proxy": "the gateway of the run; None is none",
    "max_iterations": "iterations at most, in the measure of the algorithm: versions of a prompt, steps, passes",
    "message": "the text",
    "metadata": "of the user, any JSON object; a change replaces the whole of it",
    "mode": "`train`, `val` or `test`; None is none",
    "name": "of what is meant: a span, a logger, a record, a dimension of the reward",
    "name_contains": "a part of the name",
    "object": "the value; JSON must be able to hold it",
    "offset": "how many to leave out at the start",
    "options": "order and page: a `SortOptions`",
    "outcome": "how an attempt ended: an `Outcome`",
    "outcome_reason": "a word that refines the outcome, such as `timeout`",
    "output": "what the operation returned",
    "parent_id": "id of the parent span",
    "parent_id_contains": "a part of the parent's id",
    "path": "a file",
    "polling_interval": "of the older system, without effect: nothing is polled",
    "prefix": "what a version of a prompt is called in the log",
    "purpose": "under which word a call is on the bill",
    "readable_span": "a span of OpenTelemetry's SDK",
    "reason": "a word for the log and for who looks later",
    "record": "a `RunRecord`",
    "rejections": "takes what of a request was malformed, for the answer",
    "request": "an export request of OTLP",
    "request_cls": "class of the request's message",
    "resource_id": "id of a set of resources, in the protocol of v0.1",
    "resource_name": "name of the resource within its set",
    "resources": "resources by name; see `NamedResources`",
    "resources_id": "id of a set of resources",
    "resources_id_contains": "a part of the id",
    "response_cls": "class of the answer's message",
    "retention": "what is kept of ended rollouts: a `RetentionPolicy`; None is everything",
    "reward_match": "which model call earns a reward: a `RewardMatchPolicy`",
    "rollout": "the rollout, with its attempt where one is running",
    "rollout_attempt_ids": "pairs of a rollout's id and an attempt's",
    "rollout_func": "the user's function",
    "rollout_id": "id of the rollout",
    "rollout_id_contains": "a part of the id",
    "rollout_id_in": "ids of rollouts; None is any",
    "rollout_ids": "ids of rollouts",
    "rollouts": "one `EnqueueRolloutRequest` per rollout",
    "rules": "what is asked for; None is the default",
    "run_id": "name of the run; None is no run, or every run where it filters",
    "run_id_contains": "a part of the name of the run",
    "run_ids": "names of runs",
    "run_log": "what the algorithm writes its records to",
    "sampling_parameters": "settings of every call of the model, such as `temperature`",
    "scan_debounce_seconds": "shortest time between two looks for attempts that have run out of time",
    "seed": "of all that is drawn at random; the same seed gives the same result",
    "sequence_id": "number of a span within its attempt",
    "settings": "arguments by name: those of the settings class of the same name, such as `GRPOSettings` for `GRPO`",
    "signal": "traces, metrics or logs, for the errors",
    "signal_name": "the same",
    "sort_by": "field to sort by",
    "sort_order": "`asc` or `desc`",
    "source": "what is read: spans, or what an adapter before has made of them",
    "span": "the span",
    "span_id": "id of the span: 16 hexadecimal digits",
    "span_id_contains": "a part of the span's id",
    "spans": "spans of one attempt, in the order of their numbers",
    "spec": "a text or a value that says what to make; the errors list the forms",
    "src": "the same value in OpenTelemetry's SDK",
    "start_time": "Unix seconds; None is now",
    "state_in": "states of runs; None is any",
    "status": "`TraceStatus`, or that of a rollout, attempt or worker",
    "status_code": "`OK`, `ERROR` or `UNSET`",
    "status_in": "statuses; None is any",
    "step_from": "first step, which is included",
    "step_to": "last step, which is included",
    "store": "the store of the run",
    "strip_proxy": "give the function a plain `LLM` with this attempt's address and key instead of a `ProxyLLM`",
    "tags": "texts by which the span can be found",
    "task": "the task of this rollout, as it was enqueued",
    "thread_safe": "of the older system; anything but the default is refused, since every store is safe in threads",
    "timeout": "seconds; None waits without end, 0 does not wait",
    "token_ids": "ids of tokens",
    "tokens": "text of each token, in the order of the ids",
    "trace_id": "id of the trace: 32 hexadecimal digits",
    "trace_id_contains": "a part of the trace's id",
    "tracer": "the tracer of the runner",
    "tracker": "a `MetricsBackend` that counts and times the operations; None counts nothing",
    "train_dataset": "tasks to learn from; None is none",
    "train_split": "of the older system, without effect: give `train_dataset` and `val_dataset`",
    "trained_agents": "a pattern for names of agents: only their calls are trained; None is all",
    "trainer": "the trainer that runs it",
    "val_dataset": "tasks to measure on, never trained; None is none",
    "value": "the number to record",
    "versions": "versions of the packages of a run, by name",
    "vocabulary_id": "id of the vocabulary: the digest of its tokens",
    "worker_id": "id of a worker at the store; of a runner its number, from 0",
}
"""Arguments that mean the same wherever they are."""
OWN = re.compile(r"self|cls|args|kwargs|_.*")


def public_objects() -> dict[str, Any]:
    """Return every public class and function of ours by the path of its definition."""
    objects: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names say so when they are imported
        for place, importable in public_definitions().items():
            module, _, name = min(importable).rpartition(".")
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects[place] = value
    return objects


def explained_calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield path, function and all that is said of it: its docstring, those that it overrides, its class's."""
    for place, value in public_objects().items():
        if not inspect.isclass(value):
            yield place, value, inspect.getdoc(value) or ""
            continue
        docstring = inspect.getdoc(value) or ""
        is_value = issubclass(value, (BaseModel, BaseException)) or dataclasses.is_dataclass(value)
        if "__init__" in vars(value) and not is_value:
            yield place, value.__init__, f"{docstring} {value.__init__.__doc__ or ''}"
        for name, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != value.__module__:
                continue
            bases = [base for base in value.__mro__ if name in vars(base)]
            others = [f"{base.__doc__} {inspect.getdoc(getattr(base, name)) or ''}" for base in bases]
            yield f"{place}.{name}", function, " ".join([docstring, *others])


def without_meaning() -> dict[str, list[str]]:
    """Return the arguments that no docstring names and that are not in `COMMON`, by the path of their function."""
    missing: dict[str, list[str]] = {}
    for place, function, docstring in explained_calls():
        names = [name for name in inspect.signature(function).parameters if not OWN.fullmatch(name)]
        undocumented = [name for name in names if name not in COMMON and not re.search(rf"\b{name}\b", docstring)]
        if undocumented:
            missing[place] = undocumented
    return missing


def page() -> str:
    """Return the whole page."""
    head = """# Arguments

Arguments that mean the same wherever they are. What an argument means in one place alone is in the docstring there:
`help(agl.Trainer)`, or the site that `make docs` builds. This page is written by `python -m tests.packaging.arguments`.
"""
    return head + "\n" + table(("argument", "what it says"), ((f"`{name}`", text) for name, text in COMMON.items()))


if __name__ == "__main__":
    PAGE.write_text(page())
    print("\n".join(f"{place}: {', '.join(names)}" for place, names in without_meaning().items()))
