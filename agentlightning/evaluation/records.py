"""An evaluation as the data of a run's `evaluation` record, and back.

Tasks are recorded as digests: what a task says stays with its rollouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from agentlightning.evaluation.betting import Stopping
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult

MOST_BYTES = 6 * 1024 * 1024
"""Size of a record, whose own bound is 8 MiB. Larger parts are dropped, samples first, and named in `left_out`."""
_SAMPLES: TypeAdapter[list[list[EvaluatedRollout]]] = TypeAdapter(list[list[EvaluatedRollout]])
_STOPPING: TypeAdapter[Stopping | None] = TypeAdapter(Stopping | None)
_NAMES: TypeAdapter[list[str]] = TypeAdapter(list[str])
_REWARDS: TypeAdapter[list[float | None]] = TypeAdapter(list[float | None])
_SLICES: TypeAdapter[list[tuple[str, ...]]] = TypeAdapter(list[tuple[str, ...]])
_REPEATS: TypeAdapter[list[int | None]] = TypeAdapter(list[int | None])
_LARGEST = 1e100
TOO_LARGE = f"rewards of at most {_LARGEST:g} can be compared: squares of larger ones are not finite; got {{value:g}}"
_COLUMNS = ("rollout_id", "outcome", "reward", "seconds", "failure", "dimensions", "tokens")


def record_of(result: EvaluationResult, tasks: Sequence[str]) -> dict[str, Any]:
    """Return the data of a record; `tasks`: (T,) digests, see `tasks_of`."""
    data: dict[str, Any] = {"rewards": result.rewards, "tasks": list(tasks), "n_samples": result.n_samples}
    data |= {"outcomes": result.outcomes, "failures": result.failures, "seconds": result.seconds}
    data["interval"] = _interval(result)
    if result.dimensions:
        data["dimensions"] = {name: _interval(result.dimension(name)) for name in result.dimensions}
    if any(task.slices for task in result.tasks):
        data["slices"] = [list(task.slices) for task in result.tasks]
    if result.stopping is not None:
        data["stopping"] = dataclasses.asdict(result.stopping)
        if any(task.repeat for task in result.tasks):
            data["repeats"] = [task.repeat for task in result.tasks]
    data["samples"] = [[_sample(rollout) for rollout in task.rollouts] for task in result.tasks]
    sizes = {
        name: len(json.dumps(data[name]))
        for name in ("samples", "slices", "repeats", "tasks", "rewards")
        if name in data
    }
    for name in list(sizes):
        if sum(sizes.values()) <= MOST_BYTES:
            break
        del sizes[name], data[name]
        data.setdefault("left_out", []).append(name)
    return data


def _interval(result: EvaluationResult) -> dict[str, Any] | None:
    interval = result.interval()
    return None if interval is None else dataclasses.asdict(interval)


def _sample(rollout: EvaluatedRollout) -> dict[str, Any]:
    """Return the fields that say something."""
    values = ((name, getattr(rollout, name)) for name in _COLUMNS)
    return {name: value for name, value in values if value is not None and value != {}}


def result_of(data: Mapping[str, Any], run_id: str | None = None) -> EvaluationResult | None:
    """Return the evaluation that a record holds; None if it holds no rewards by task.

    A record of another algorithm needs `rewards` and `tasks` only; `rollout_ids` (one of each task) lead to their
    conversations.

    Raises:
        ValueError: it holds something else under these names; says what.
    """
    if not isinstance(data.get("rewards"), list) or not isinstance(data.get("tasks"), list):
        return None
    try:
        rewards, digests = _REWARDS.validate_python(data["rewards"]), _NAMES.validate_python(data["tasks"])
        samples = _samples(data, rewards)
        slices = _SLICES.validate_python(data.get("slices") or [()] * len(digests))
        repeats = _REPEATS.validate_python(data.get("repeats") or [None] * len(digests))
        stopping = _STOPPING.validate_python(data.get("stopping"))
        left_out = _NAMES.validate_python(data.get("left_out") or [])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"an evaluation record is not readable: {where}: {first['msg']}") from None
    if not len(rewards) == len(digests) == len(samples) == len(slices) == len(repeats):
        lengths = f"{len(rewards)} rewards, {len(digests)} tasks, {len(samples)} samples, {len(slices)} slices"
        lengths += f", {len(repeats)} repeats"
        raise ValueError(f"an evaluation record is not readable: it has {lengths}")
    tasks = (
        EvaluatedTask(digest, tuple(group), own, digest, repeat)
        for digest, group, own, repeat in zip(digests, samples, slices, repeats, strict=True)
    )
    if (value := too_large([rollout for group in samples for rollout in group])) is not None:
        raise ValueError(TOO_LARGE.format(value=value))
    seconds = data.get("seconds")
    whole = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    return EvaluationResult(tuple(tasks), whole, run_id, stopping=stopping, left_out=tuple(left_out))


def too_large(rollouts: Sequence[EvaluatedRollout]) -> float | None:
    """Return a reward, or one dimension of it, that is too large to be compared; None if there is none."""
    values = (value for each in rollouts for value in (each.reward, *each.dimensions.values()))
    return next((value for value in values if value is not None and abs(value) > _LARGEST), None)


def _samples(data: Mapping[str, Any], rewards: Sequence[float | None]) -> list[list[EvaluatedRollout]]:
    if (own := data.get("samples")) is not None:
        filled = [[{"reward": None, **each} for each in group] for group in own] if _is_nested(own) else own
        return _SAMPLES.validate_python(filled)
    ids = data.get("rollout_ids")
    names = _NAMES.validate_python(ids) if ids is not None else []
    names = names if len(names) == len(rewards) else [""] * len(rewards)
    return [
        [EvaluatedRollout(name, "scored" if reward is not None else "unknown", reward, 0.0)]
        for name, reward in zip(names, rewards, strict=True)
    ]


def _is_nested(value: object) -> bool:
    groups = cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(isinstance(group, list) and all(isinstance(each, dict) for each in group) for group in groups)  # pyright: ignore[reportUnknownVariableType] -- JSON data
