"""The values that travel through the store: their fields and defaults, what they refuse, what they say."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import pickle
import re
import typing
from datetime import UTC, datetime
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning import semconv
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import UNSET, Unset, is_finished, is_queuing, is_running
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Attributes,
    EnqueueRolloutRequest,
    Event,
    GenericResponse,
    Hook,
    Link,
    NamedResources,
    OtelResource,
    Outcome,
    PaginatedResult,
    ParallelWorkerBase,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutLegacy,
    RolloutMode,
    RolloutStatus,
    Span,
    SpanAttributeNames,
    SpanContext,
    SpanCoreFields,
    SpanNames,
    StatusCode,
    Task,
    TaskIfAny,
    TraceStatus,
    Triplet,
    Worker,
    WorkerStatus,
)
from agentlightning.utils.id import generate_id

NEEDED: Any = object()
"""Stands for "no default"."""

FIELDS: dict[type[BaseModel], dict[str, Any]] = {
    RolloutConfig: {
        **{"timeout_seconds": None, "unresponsive_seconds": None, "max_attempts": 1, "retry_condition": []},
        **{"infrastructure_retries": 3, "retry_delay_seconds": 0.0, "retry_backoff": 2.0},
        "retry_delay_max_seconds": 300.0,
    },
    Rollout: {
        **{"rollout_id": NEEDED, "input": NEEDED, "start_time": NEEDED, "end_time": None, "mode": None},
        **{"resources_id": None, "status": "queuing", "config": RolloutConfig(), "metadata": None, "run_id": None},
        **{"resources_version": None, "priority": 0, "not_before": None},
    },
    Attempt: {
        **{"rollout_id": NEEDED, "attempt_id": NEEDED, "sequence_id": NEEDED, "start_time": NEEDED, "end_time": None},
        **{"status": "preparing", "worker_id": None, "last_heartbeat_time": None, "metadata": None},
        **{"outcome": None, "outcome_reason": None, "error": None},
    },
    EnqueueRolloutRequest: {
        **{"input": NEEDED, "mode": None, "resources_id": None, "config": None, "metadata": None},
        **{"run_id": None, "priority": 0, "not_before": None},
    },
    Worker: {
        **{"worker_id": NEEDED, "status": "unknown", "heartbeat_stats": None, "last_heartbeat_time": None},
        **{"last_dequeue_time": None, "last_busy_time": None, "last_idle_time": None, "current_rollout_id": None},
        **{"current_attempt_id": None, "run_id": None},
    },
    Triplet: {"prompt": NEEDED, "response": NEEDED, "reward": None, "metadata": {}},
    Task: {
        **{"rollout_id": NEEDED, "input": NEEDED, "mode": None, "resources_id": None, "create_time": None},
        **{"last_claim_time": None, "num_claims": None, "metadata": {}},
    },
    TaskIfAny: {"is_available": NEEDED, "task": None},
    RolloutLegacy: {
        **{"rollout_id": NEEDED, "task": None, "final_reward": None, "triplets": None, "trace": None, "logs": None},
        "metadata": {},
    },
    GenericResponse: {"status": "success", "message": None, "data": None},
    LLM: {"resource_type": "llm", "endpoint": NEEDED, "model": NEEDED, "api_key": None, "sampling_parameters": {}},
    ProxyLLM: {
        **{"resource_type": "proxy_llm", "endpoint": NEEDED, "model": NEEDED, "api_key": None},
        "sampling_parameters": {},
    },
    PromptTemplate: {"resource_type": "prompt_template", "template": NEEDED, "engine": NEEDED},
    Resource: {"resource_type": None},
    ResourcesUpdate: {
        **{"resources_id": NEEDED, "create_time": NEEDED, "update_time": NEEDED, "version": NEEDED},
        **{"resources": NEEDED, "run_id": None},
    },
    SpanContext: {"trace_id": NEEDED, "span_id": NEEDED, "is_remote": NEEDED, "trace_state": NEEDED},
    TraceStatus: {"status_code": NEEDED, "description": None},
    Event: {"name": NEEDED, "attributes": NEEDED, "timestamp": None},
    Link: {"context": NEEDED, "attributes": None},
    OtelResource: {"attributes": NEEDED, "schema_url": ""},
    SpanCoreFields: {
        **{"name": NEEDED, "status": NEEDED, "attributes": NEEDED, "start_time": NEEDED, "end_time": NEEDED}
    },
    Span: {
        **{"rollout_id": NEEDED, "attempt_id": NEEDED, "sequence_id": NEEDED, "trace_id": NEEDED, "span_id": NEEDED},
        **{"parent_id": NEEDED, "name": NEEDED, "status": NEEDED, "attributes": NEEDED, "events": NEEDED},
        **{"links": NEEDED, "start_time": NEEDED, "end_time": NEEDED, "context": NEEDED, "parent": NEEDED},
        **{"resource": NEEDED, "kind": None, "scope": None, "dropped": None, "flags": None},
    },
}


@pytest.mark.parametrize("model", FIELDS, ids=lambda model: model.__name__)
def test_a_value_has_its_fields_in_order_with_their_defaults(model: type[BaseModel]) -> None:
    def default(name: str) -> Any:
        field = model.model_fields[name]
        return NEEDED if field.is_required() else field.get_default(call_default_factory=True)

    written = FIELDS[model]
    assert list(model.model_fields)[: len(written)] == list(written)
    assert {name: default(name) for name in written} == written
    added = [name for name in model.model_fields if name not in written and model.model_fields[name].is_required()]
    assert added == [], "a field that is added has a default, or programs that make the value break"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RolloutStatus, "queuing preparing running failed succeeded cancelled requeuing"),
        (AttemptStatus, "preparing running failed succeeded unresponsive timeout"),
        (RolloutMode, "train val test"),
        (WorkerStatus, "idle busy unknown"),
        (StatusCode, "UNSET OK ERROR"),
        (Outcome, "scored policy_fault infrastructure_fault cancelled unscored"),
    ],
)
def test_statuses_are_plain_words(kind: Any, words: str) -> None:
    assert typing.get_args(kind) == tuple(words.split())


def rollout(**fields: Any) -> Rollout:
    return Rollout(**{"rollout_id": "ro-1", "input": None, "start_time": 1.0, **fields})


def attempt(**fields: Any) -> Attempt:
    return Attempt(**{"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1, "start_time": 1.0, **fields})


@pytest.mark.parametrize("status", typing.get_args(RolloutStatus))
def test_a_rollout_waits_runs_or_has_ended(status: Any) -> None:
    waiting_or_not = rollout(status=status)
    assert is_queuing(waiting_or_not) == (status in ("queuing", "requeuing"))
    assert is_running(waiting_or_not) == (status in ("preparing", "running"))
    assert is_finished(waiting_or_not) == (status in ("failed", "succeeded", "cancelled"))


def test_what_is_known_of_the_attempt_is_read_from_its_rollout_too() -> None:
    both = AttemptedRollout(**dict(rollout()), attempt=attempt(worker_id="w", reward=0.5))
    assert (both.worker_id, both.reward, both.attempts) == ("w", 0.5, [both.attempt])
    assert "worker_id" not in both.model_dump()
    again = AttemptedRollout(**dict(rollout()), attempt=attempt(sequence_id=2))
    with pytest.raises(AttributeError, match=r"has no 'attempts': read them with store\.query_attempts"):
        again.attempts  # noqa: B018 -- asked for


def test_a_rollout_and_its_attempt_belong_together() -> None:
    both = AttemptedRollout(**dict(rollout()), attempt=attempt())
    assert isinstance(both, Rollout)
    assert (both.id, both.rollout.rollout_id) == ("ro-1", "ro-1")
    assert not hasattr(rollout(), "attempt")
    with pytest.raises(ValidationError, match="Inconsistent rollout_id between Rollout and Attempt"):
        AttemptedRollout(**dict(rollout()), attempt=attempt(rollout_id="ro-2"))


@pytest.mark.parametrize(
    ("value", "name", "way"),
    [
        (rollout(), "attempts", "query_attempts"),
        (rollout(), "attempt", "get_latest_attempt"),
        (rollout(), "worker_id", "get_latest_attempt"),
        (attempt(), "spans", "query_spans"),
        (rollout(), "reward", "get_latest_attempt"),
        (InMemoryLightningStore(), "collections", "Backend"),
        (InMemoryLightningStore(), "cancel_rollout", "status='cancelled'"),
    ],
)
def test_what_is_kept_elsewhere_says_where(value: Any, name: str, way: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}'.*{way}"):
        getattr(value, name)


def test_values_survive_copies_and_pickles() -> None:
    for value in (rollout(metadata={"a": [1]}), attempt(), AttemptedRollout(**dict(rollout()), attempt=attempt())):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value.model_copy() == value


@pytest.mark.parametrize(
    ("model", "fields", "name"),
    [
        (RolloutConfig, {"max_attempts": 0}, "max_attempts"),
        (RolloutConfig, {"mode": "training"}, "mode"),
        (RolloutConfig, {"retry_condition": ["lost"]}, "retry_condition"),
        (RolloutConfig, {"retry_backoff": 0.5}, "retry_backoff"),
        (EnqueueRolloutRequest, {"input": 1, "user_id": "x"}, "user_id"),
        (EnqueueRolloutRequest, {"mode": "train"}, "input"),
        (EnqueueRolloutRequest, {"input": 1, "mode": "training"}, "'train', 'val' or 'test'"),
        (EnqueueRolloutRequest, {"input": 1, "not_before": math.inf}, "not_before"),
        (PromptTemplate, {"template": "x", "engine": "mustache"}, "engine"),
        (PromptTemplate, {"template": "x"}, "engine"),
    ],
)
def test_a_wrong_field_is_refused_by_name(model: type[BaseModel], fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        model(**fields)


def test_ids_have_the_form_that_programs_know() -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", generate_id(12))
    assert len({generate_id(8) for _ in range(100)}) == 100
    with pytest.raises(ValueError, match="length must be a positive integer"):
        generate_id(0)


def test_a_page_is_the_sequence_of_its_items() -> None:
    page = PaginatedResult[str](items=["a", "b", "c"], limit=3, offset=0, total=5)
    assert (len(page), page[0], page[1:], list(page)) == (3, "a", ["b", "c"], ["a", "b", "c"])
    assert "b" in page
    assert "z" not in page
    assert not PaginatedResult[str](items=[], limit=3, offset=9, total=5)


@pytest.mark.parametrize(
    ("items", "limit", "shown"),
    [
        (["a", "b"], 2, "<PaginatedResult (1:3 of 5) ['a', ...]>"),
        (["a", "b"], -1, "<PaginatedResult (1: of 5) ['a', ...]>"),
        (["a"], 1, "<PaginatedResult (1:2 of 5) 'a'>"),
        ([], 0, "<PaginatedResult (1:1 of 5) empty>"),
    ],
)
def test_a_page_shows_where_it_lies(items: list[str], limit: int, shown: str) -> None:
    assert repr(PaginatedResult[str](items=items, limit=limit, offset=1, total=5)) == shown


def test_unset_is_one_object_wherever_it_goes() -> None:
    assert repr(UNSET) == "UNSET"
    assert UNSET
    assert Unset() is UNSET
    assert copy.copy(UNSET) is copy.deepcopy({"x": UNSET})["x"] is pickle.loads(pickle.dumps(UNSET)) is UNSET


def test_the_old_names_of_spans_and_keys_are_the_current_ones() -> None:
    for name, value in {
        "REWARD": semconv.AGL_REWARD,
        "MESSAGE": semconv.AGL_MESSAGE,
        "VIRTUAL": semconv.AGL_VIRTUAL,
    }.items():
        assert SpanNames[name].value == value == f"agentlightning.{name.lower()}"
    keys = semconv.LightningResourceAttributes
    for name in ("ROLLOUT_ID", "ATTEMPT_ID", "SPAN_SEQUENCE_ID"):
        assert SpanNames[name].value == keys[name].value == f"agentlightning.{name.lower()}"
    assert (SpanAttributeNames.MESSAGE.value, SpanAttributeNames.OBJECT.value) == ("message", "object")


KEYS: dict[type[Enum], str] = {
    semconv.LightningResourceAttributes: "rollout_id attempt_id span_sequence_id tracer.name",
    semconv.LightningSpanAttributes: (
        "reward link tag message.body object.type object.literal object.json"
        " operation.name operation.input operation.output"
    ),
}


@pytest.mark.parametrize("group", KEYS, ids=lambda group: group.__name__)
def test_the_keys_that_programs_write_are_there(group: type[Enum]) -> None:
    values = {member.name: member.value for member in group}
    for word in KEYS[group].split():
        assert values[word.replace(".", "_").upper()] == f"agentlightning.{word}"
    assert [(m.name, m.value) for m in semconv.RewardAttributes] == [("REWARD_NAME", "name"), ("REWARD_VALUE", "value")]
    assert [m.value for m in semconv.LinkAttributes] == ["key_match", "value_match"]


# --- parts that run in several workers ---------------------------------------------------------------------------


def test_a_part_knows_its_worker_once_it_was_told() -> None:
    part = ParallelWorkerBase()
    assert part.worker_id is None
    part.init(1, anything=2)
    part.init_worker(3, "more")
    assert (part.worker_id, part.run()) == (3, None)
    part.teardown_worker(3)
    part.teardown()


@pytest.mark.parametrize(
    ("callback", "keywords"),
    [
        ("on_trace_start", ["agent", "runner", "tracer", "rollout"]),
        ("on_trace_end", ["agent", "runner", "tracer", "rollout"]),
        ("on_rollout_start", ["agent", "runner", "rollout"]),
        ("on_rollout_end", ["agent", "runner", "rollout", "spans"]),
    ],
)
async def test_a_hook_does_nothing_and_takes_its_arguments_by_name(callback: str, keywords: list[str]) -> None:
    method = getattr(Hook(), callback)
    parameters = inspect.signature(method).parameters.values()
    assert [(p.name, p.kind) for p in parameters] == [(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
    assert await method(**dict.fromkeys(keywords)) is None


# --- resources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://h:1", "http://h:1/rollout/R/attempt/A"),
        ("http://h:1/", "http://h:1/rollout/R/attempt/A"),
        ("http://h:1/v1", "http://h:1/rollout/R/attempt/A/v1"),
        ("http://h:1/v1/", "http://h:1/rollout/R/attempt/A/v1"),
        ("http://h:1/p/v1", "http://h:1/p/rollout/R/attempt/A/v1"),
        ("http://h:1//", "http://h:1//rollout/R/attempt/A"),
    ],
)
def test_an_attempt_has_a_url_of_its_own(endpoint: str, url: str) -> None:
    llm = ProxyLLM(endpoint=endpoint, model="m", api_key="k", sampling_parameters={"temperature": 0.5})
    assert llm.get_base_url("R", "A") == url
    assert llm.get_base_url(None, None) == llm.get_base_url() == endpoint
    both = AttemptedRollout(**dict(rollout(rollout_id="R")), attempt=attempt(rollout_id="R", attempt_id="A"))
    plain = llm.with_attempted_rollout(both)
    assert type(plain) is LLM
    assert (plain.endpoint, plain.model, plain.api_key) == (url, "m", "k")
    assert plain.sampling_parameters == {"temperature": 0.5}
    assert plain.get_base_url("ignored", anything=1) == url


def test_ids_are_escaped_in_the_url_of_an_attempt() -> None:
    assert ProxyLLM(endpoint="http://h", model="m").get_base_url("a/b", "?c") == "http://h/rollout/a%2Fb/attempt/%3Fc"


@pytest.mark.parametrize("ids", [("R", None), (None, "A"), (1, 2), ("", "A"), ("", "")])
def test_ids_that_make_no_url_are_refused(ids: Any) -> None:
    with pytest.raises(ValueError, match="rollout_id and attempt_id must be strings or all be empty"):
        ProxyLLM(endpoint="http://h", model="m").get_base_url(*ids)


def test_reading_the_endpoint_past_the_attempt_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    llm = ProxyLLM(endpoint="http://h", model="m")
    with caplog.at_level(logging.WARNING, "agentlightning"):
        llm.get_base_url("R", "A")
        llm.model_dump_json()
        assert caplog.records == []
        assert llm.endpoint == "http://h"
    assert caplog.records[0].getMessage().startswith("Accessing 'endpoint' directly on ProxyLLM is discouraged")


def test_resources_are_told_apart_by_their_tag() -> None:
    read = TypeAdapter(NamedResources).validate_python
    fields = {"endpoint": "http://h", "model": "m"}
    resources = read({"a": {"resource_type": "llm", **fields}, "b": {"resource_type": "proxy_llm", **fields}})
    assert [type(resource) for resource in resources.values()] == [LLM, ProxyLLM]
    for wrong in (fields, {"resource_type": "dataset", **fields}):
        with pytest.raises(ValidationError, match="resource_type"):
            read({"a": wrong})


def test_a_task_may_be_named_by_its_own_id_and_keeps_further_fields() -> None:
    task = Task.model_validate({"task_id": "task-1", "input": "x", "instance_id": "i-1", "dataset": "dev"})
    assert (task.rollout_id, task.task_id) == ("task-1", "task-1")
    again = Task.model_validate_json(task.model_dump_json())
    assert again == task
    assert again.model_dump(include={"instance_id", "dataset"}) == {"instance_id": "i-1", "dataset": "dev"}
    assert Task(rollout_id="ro-1", input="x").task_id == "ro-1"


# --- spans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": "x", "b": True, "c": 1, "d": 0.5}, {"a": "x", "b": True, "c": 1, "d": 0.5}),
        ({"a": [1, 0.5]}, {"a": [1.0, 0.5]}),
        ({"a": ("x", "y"), "b": []}, {"a": ["x", "y"], "b": []}),
        ({"a": b"text"}, {"a": "text"}),
    ],
)
def test_attributes_are_scalars_and_lists_of_one_kind(values: dict[str, Any], expected: dict[str, Any]) -> None:
    attributes = TypeAdapter(Attributes).validate_python(values)
    assert attributes == expected
    assert [type(value) for value in attributes.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize("wrong", [{"a": None}, {"a": {"b": 1}}, {"a": ["x", 1]}, {"a": [[1]]}, {1: "x"}])
def test_other_attributes_are_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Attributes).validate_python(wrong)


def foreign_span(**fields: Any) -> Any:
    """Something with the attributes of an OpenTelemetry span, and no more."""
    context = SimpleNamespace(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_state={"k": "v"})
    defaults: dict[str, Any] = {
        "name": "step",
        "get_span_context": lambda: context,
        "parent": None,
        "status": SimpleNamespace(status_code=SimpleNamespace(name="ERROR"), description="boom"),
        "attributes": {"k": ("a", "b")},
        "events": [SimpleNamespace(name="e", attributes=None, timestamp=2_000_000_000_000_000_000)],
        "links": [SimpleNamespace(context=context, attributes={})],
        "start_time": 1_000_000_000_000_000_000,
        "end_time": 0,
        "resource": SimpleNamespace(attributes={"service.name": "x"}, schema_url=None),
    }
    return SimpleNamespace(**{**defaults, **fields})


def test_a_span_is_made_of_anything_that_looks_like_one() -> None:
    span = Span.from_opentelemetry(foreign_span(), "ro-1", "at-1", 4)
    assert (span.rollout_id, span.attempt_id, span.sequence_id, span.name) == ("ro-1", "at-1", 4, "step")
    assert (span.trace_id, span.span_id, span.parent_id) == ("abc".zfill(32), "def".zfill(16), None)
    assert (span.status.status_code, span.status.description) == ("ERROR", "boom")
    assert (span.attributes, span.start_time, span.end_time) == ({"k": ["a", "b"]}, 1e9, None)
    assert (span.events[0].timestamp, span.links[0].attributes, span.resource.schema_url) == (2e9, None, "")
    assert span.context is not None
    assert span.context.trace_state == {"k": "v"}


def test_a_span_without_a_context_has_ids_of_zeros() -> None:
    span = Span.from_opentelemetry(foreign_span(get_span_context=lambda: None), "ro-1", "at-1", 0)
    assert (span.trace_id, span.span_id, span.context) == ("0" * 32, "0" * 16, None)


def test_a_span_is_made_of_its_attributes_alone() -> None:
    span = Span.from_attributes(attributes={"k": 1}, parent_id="p" * 16)
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("", "", 0)
    assert (span.name, span.status.status_code, span.resource.attributes) == ("agentlightning.virtual", "OK", {})
    assert (span.start_time, span.end_time, span.events, span.links) == (None, None, [], [])
    assert (len(span.trace_id), len(span.span_id)) == (32, 16)
    assert span.context is not None
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (span.trace_id, "p" * 16)
    assert Span.from_attributes(attributes={}).parent is None


def test_core_fields_become_a_span_that_starts_now() -> None:
    core = SpanCoreFields(name="n", status=TraceStatus(status_code="OK"), attributes={}, start_time=None, end_time=None)
    span = Span.from_core_fields(core, rollout_id="ro-1")
    assert span.start_time is not None
    assert (span.rollout_id, span.end_time) == ("ro-1", None)


def test_a_moment_may_be_given_as_a_datetime() -> None:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    core = SpanCoreFields(
        name="n", status=TraceStatus(status_code="OK"), attributes={}, start_time=moment, end_time=moment
    )
    assert (core.start_time, core.end_time) == (moment.timestamp(), moment.timestamp())
