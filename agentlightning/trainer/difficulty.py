"""The difficulty of tasks: the share of samples of each task that a policy solves, kept in a file, and a filter by it.

The file has one JSON line for each task, agent and model. While samples run, each reward is appended as a line of its
own, so that an interruption loses only samples in progress. A later call adds the lines up and runs what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agentlightning.base.field_help import explain_fields
from agentlightning.base.private_files import open_private
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.evaluation.result import SUCCESS, EvaluatedRollout
from agentlightning.evaluation.statistics import Interval, interval_of
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.litagent.decorator import as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.trainer.datasets import as_dataset
from agentlightning.training.run_folder import replace_file
from agentlightning.types import LLM, Dataset
from agentlightning.utils.masking import masked_text
from agentlightning.utils.setting_checks import check_count

if TYPE_CHECKING:
    from agentlightning.trainer.trainer import Trainer

T = TypeVar("T")
_Key = tuple[str, str, str]
"""Digest of the task, name of the agent, and description of the model with its sampling."""


@explain_fields
@dataclass(frozen=True)
class TaskRate:
    """The samples of a task by one agent and model."""

    task: str
    """Digest of the task, the same for equal tasks. The task cannot be read from it."""
    rewards: Sequence[float] = ()
    """Rewards of the samples that have one."""
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of samples without a reward by reason. They do not count as unsolved."""
    solved_above: float | None = SUCCESS
    """Reward above which a sample is solved; None for rewards other than 0 and 1 if no limit was set."""

    @property
    def failed(self) -> int:
        """Number of samples without a reward."""
        return sum(self.failures.values())

    @property
    def mean_reward(self) -> float | None:
        """Mean reward; None without a reward."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def solve_rate(self) -> Interval | None:
        """Share of solved samples with its 95 % interval (Wilson); None without a reward or a limit."""
        limit = self.solved_above
        return None if limit is None else interval_of([float(reward > limit) for reward in self.rewards])

    def as_json(self) -> dict[str, Any]:
        """Return the samples and their statistics as JSON data."""
        rate = self.solve_rate
        statistics = {} if rate is None else {"solve_rate": rate.mean, "low": rate.low, "high": rate.high}
        own = {"task": self.task, "n": len(self.rewards), "mean_reward": self.mean_reward, **statistics}
        return {**own, "failed": self.failed, "failures": dict(self.failures), "rewards": list(self.rewards)}


def task_rates(
    agent: LitAgent[Any] | Callable[..., object],
    tasks: Dataset[Any] | Iterable[object],
    *,
    model: str | Path | LLM,
    n_samples: int = 8,
    cache: str | Path | None = None,
    solved_above: float | None = None,
    temperature: float = 1.0,
    max_completion_length: int = 512,
    resource_name: str = "main_llm",
    trainer: Trainer[Any] | None = None,
) -> list[TaskRate]:
    """Run each task `n_samples` times with a policy, without learning, and return the rates in the order of the tasks.

    Samples without a reward are counted apart, and a later call with the same `cache` runs them again. The cache knows
    an agent by its name and the contents of its file, a model by its files or its address, and the sampling.

    Args:
        model: folder of a model, checkpoint or run, which is served on the CPU, or an `agl.LLM`, which is used with its
            own sampling parameters.
        cache: file that keeps the samples. One process at a time may use it.
        solved_above: reward above which a sample is solved; None is for rewards of 0 and 1.
        temperature: sampling temperature of a model in a folder.
        max_completion_length: maximum number of tokens per call of a model in a folder.
        resource_name: name of the resource with which the agent receives the model.
        trainer: runs the tasks, with its `initial_resources`; by default eight at a time, with a store in memory.

    Raises:
        TypeError: the agent or the tasks have the wrong type.
        BadRequestError: the tasks are empty, or `model` or `cache` cannot be read.
        KeyboardInterrupt, RunnerDiedError, StrandedWorkError: as in `Trainer.evaluate`.
    """
    from agentlightning.trainer.trainer import Trainer

    check_count("n_samples", n_samples)
    agent, dataset = as_agent(agent), as_dataset("tasks", tasks)
    if dataset is None or not len(dataset):
        raise BadRequestError("task_rates needs tasks; the dataset is empty")
    trainer = trainer or Trainer(strategy={"type": "cs", "server_port": 0}, runner={"concurrency": 8}, progress="none")
    items = [dataset[index] for index in range(len(dataset))]
    digests = tasks_of(items)
    others = dict(trainer.initial_resources or {})
    sampling = {"temperature": temperature, "max_tokens": max_completion_length}
    described = _described(model, sampling, others)
    place, name = None if cache is None else Path(cache), name_of_agent(agent)
    samples = _Samples({} if place is None else read_samples(place))
    if place is not None:
        samples.write(place, solved_above)  # without the truncated line of a killed process
    missing = [
        item
        for digest, item in dict(zip(digests, items, strict=True)).items()
        for _ in range(n_samples - len(samples.of((digest, name, described)).rewards))
    ]
    if missing:
        record = _Recorder(place, name, described)
        with _served(model, sampling) as llm:
            resources = {**others, resource_name: llm}
            result = trainer.evaluate(agent, missing, resources=resources, on_sample=record)
        for task in result.tasks:
            for sample in task.rollouts:
                samples.add((task.digest, name, described), sample)
        if place is not None:
            samples.write(place, solved_above)
    rates = [samples.of((digest, name, described)) for digest in digests]
    return _with_limit(rates, solved_above)


def tasks_between(
    tasks: Iterable[T],
    rates: Iterable[TaskRate] | str | Path,
    low: float,
    high: float,
    *,
    solved_above: float | None = None,
) -> list[T]:
    """Return the tasks whose solve rate is at least `low` and at most `high`, in their order, for `Trainer.fit`.

    Tasks without a reward have no rate and are excluded. `rates` are those of `task_rates` or the path of its cache;
    `solved_above` is for a path, as in `task_rates`.

    Raises:
        BadRequestError: a limit is out of range; a task was not measured; rewards other than 0 and 1 have no limit; or
            the file has samples of several agents or models.
    """
    if not 0 <= low <= high <= 1:
        raise BadRequestError(f"low={low} and high={high} must be between 0 and 1, the lower one first")
    if isinstance(rates, (str, Path)):
        if not Path(rates).is_file():
            raise NotFoundError(f"The file of task rates {str(rates)!r} does not exist; agl.task_rates writes it")
        samples = _Samples(read_samples(Path(rates)))
        if len(makers := {key[1:] for key in samples.by_key}) != 1:
            raise BadRequestError(
                f"{str(rates)!r} has samples of {counted(len(makers), 'pair')} of agent and model; expected one. Pass "
                "the result of agl.task_rates, or use a file for each pair"
            )
        rates = _with_limit([samples.of(key) for key in samples.by_key], solved_above)
    by_digest = {rate.task: rate for rate in rates}
    if any(rate.solved_above is None for rate in by_digest.values()):
        raise BadRequestError("rewards other than 0 and 1 have no solve rate: set solved_above")
    tasks = list(tasks)
    digests = tasks_of(tasks)
    if unknown := sum(digest not in by_digest for digest in digests):
        raise BadRequestError(
            f"{unknown} of {counted(len(tasks), 'task')} were not measured: run agl.task_rates on all"
        )
    solved = [by_digest[digest].solve_rate for digest in digests]
    return [task for task, rate in zip(tasks, solved, strict=True) if rate is not None and low <= rate.mean <= high]


def name_of_agent(agent: LitAgent[Any]) -> str:
    """Return the name of an agent and a digest of the files that define it and its functions, and of the values it was
    made with, which change with them."""
    named: Any = agent if hasattr(agent, "__qualname__") else type(agent)
    values: dict[str, object] = {} if named is agent else vars(agent)
    functions = [value for _, value in sorted(values.items()) if inspect.isfunction(value)]
    plain = {
        name: str(cast("object", value))
        for name, value in values.items()
        if isinstance(value, (str, int, float, list, dict))
    }
    digest = hashlib.sha256()
    for each in (named, *functions):
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        digest.update(f"{each.__qualname__} ".encode())
        digest.update(Path(file).read_bytes() if file and Path(file).is_file() else b"-")
    digest.update(repr(sorted(plain.items())).encode())
    file = getattr(sys.modules.get(named.__module__), "__file__", None)
    return f"{Path(file).stem if file else named.__module__}:{named.__qualname__} {digest.hexdigest()[:12]}"


# --- the file --------------------------------------------------------------------------------------------------------


def read_samples(path: Path) -> dict[_Key, tuple[list[float], Counter[str]]]:
    """Return the rewards and failures in a file, added up; empty without the file. A truncated last line is skipped.

    Raises:
        BadRequestError: another line is not one of samples, or the file cannot be read.
    """
    samples: dict[_Key, tuple[list[float], Counter[str]]] = {}
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise BadRequestError(f"Cannot read {str(path)!r}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data: Any = json.loads(line)
            key = (str(data["task"]), str(data["agent"]), str(data["model"]))
            rewards = [float(reward) for reward in data["rewards"]]
            failures = {str(reason): int(count) for reason, count in data.get("failures", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and line.startswith(b'{"task":'):
                continue
            raise BadRequestError(f"{str(path)!r}, line {number} is not a line of task rates: {error!r}") from None
        own = samples.setdefault(key, ([], Counter()))
        own[0].extend(rewards)
        own[1].update(failures)
    return samples


@dataclass(frozen=True)
class _Samples:
    """Rewards and failures by task, agent and model."""

    by_key: dict[_Key, tuple[list[float], Counter[str]]]

    def of(self, key: _Key) -> TaskRate:
        rewards, failures = self.by_key.get(key, ([], Counter[str]()))
        return TaskRate(key[0], tuple(rewards), dict(failures))

    def add(self, key: _Key, sample: EvaluatedRollout) -> None:
        rewards, failures = self.by_key.setdefault(key, ([], Counter()))
        if sample.reward is not None:
            rewards.append(sample.reward)
        else:
            failures[sample.failure or sample.outcome] += 1

    def write(self, path: Path, solved_above: float | None = None) -> None:
        """Replace the file by one line for each task, agent and model."""
        rates = _with_limit([self.of(key) for key in self.by_key], solved_above)
        lines = ({"agent": key[1], "model": key[2]} for key in self.by_key)
        texts = [json.dumps({**rate.as_json(), **line}) for rate, line in zip(rates, lines, strict=True)]
        try:
            replace_file(path, "".join(f"{text}\n" for text in texts))
        except OSError as error:
            raise BadRequestError(f"Cannot write {str(path)!r}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Recorder:
    """Appends each reward to the file when its sample ends. May be sent to another process."""

    path: Path | None
    agent: str
    model: str

    def __call__(self, task: object, sample: EvaluatedRollout) -> None:
        if self.path is None or sample.reward is None:
            return
        [digest] = tasks_of([task])
        line = {"task": digest, "agent": self.agent, "model": self.model, "rewards": [sample.reward]}
        with open_private(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def _with_limit(rates: Sequence[TaskRate], solved_above: float | None) -> list[TaskRate]:
    """Return the rates with the limit, or without one if rewards other than 0 and 1 need it."""
    is_graded = any(reward not in (0.0, 1.0) for rate in rates for reward in rate.rewards)
    limit = solved_above if solved_above is not None else None if is_graded else SUCCESS
    return [TaskRate(rate.task, rate.rewards, rate.failures, limit) for rate in rates]


# --- the model -------------------------------------------------------------------------------------------------------


def _described(model: str | Path | LLM, sampling: Mapping[str, object], others: Mapping[str, Any]) -> str:
    """Return a text that is the same for the same weights, sampling and other resources."""
    if isinstance(model, LLM):
        text = f"{model.model} at {masked_text(model.endpoint)} {json.dumps(model.sampling_parameters, sort_keys=True)}"
    else:
        from agentlightning.training.model_export import trained_in
        from agentlightning.training.policy_files import fingerprint_of

        text = f"{fingerprint_of(trained_in(model).path)[:16]} {json.dumps(sampling, sort_keys=True)}"
    if others:
        plain = {name: each.model_dump(exclude={"api_key"}) for name, each in sorted(others.items())}
        text += f" with {tasks_of([plain])[0]}"
    return text


@contextlib.contextmanager
def _served(model: str | Path | LLM, sampling: Mapping[str, Any]) -> Generator[LLM]:
    """Yield the model as a resource, served while the context is open if it is a folder."""
    if isinstance(model, LLM):
        yield model
        return
    from agentlightning.engine.engine import InferenceEngine
    from agentlightning.training.model_export import trained_in

    engine = InferenceEngine(trained_in(model).load(), max_batch=64, max_new_tokens=sampling["max_tokens"])
    engine.start()
    try:
        yield LLM(endpoint=engine.base_url, model=engine.model_name, sampling_parameters=dict(sampling))
    finally:
        engine.stop()
