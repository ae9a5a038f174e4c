"""Facts of each rollout, stored next to its record, so that lists and statistics need not read records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from agentlightning.types import Attempt, Rollout, RolloutSummary

PREVIEW: Final = 200
"""Characters of the input in a summary."""
SEARCHED: Final = 2000
"""Characters of the input that are searched."""
_LONGEST_TASK = 200
_LARGEST = 2**53


class Facts(NamedTuple):
    """The fields of a rollout's summary, without its spans and its input. A durable store has a column for each."""

    rollout_id: str
    run_id: str | None
    status: str
    mode: str | None
    step: int | None
    task: str | None
    """The task as JSON, so that a text column can also contain numbers."""
    sample: int | None
    start_time: float
    end_time: float | None
    resources_id: str | None
    resources_version: int | None
    attempts: int
    attempt_id: str | None
    attempt_status: str | None
    worker_id: str | None
    outcome: str | None
    outcome_reason: str | None
    error_type: str | None
    reward: float | None
    rewards: str | None
    """The rewards as JSON."""


def facts_of(rollout: Rollout, attempt: Attempt | None, attempts: int) -> Facts:
    """Return the facts of a rollout, its latest attempt and the number of its attempts."""
    metadata = rollout.metadata
    step = task = sample = None
    if metadata:
        step, task, sample = _whole(metadata.get("step")), _task(metadata.get("task")), _whole(metadata.get("sample"))
    if attempt is None:
        return Facts(
            rollout.rollout_id, rollout.run_id, rollout.status, rollout.mode, step, task, sample, rollout.start_time,
            rollout.end_time, rollout.resources_id, rollout.resources_version, attempts,
            None, None, None, None, None, None, None, None,
        )  # fmt: skip
    return Facts(
        rollout.rollout_id, rollout.run_id, rollout.status, rollout.mode, step, task, sample, rollout.start_time,
        rollout.end_time, rollout.resources_id, rollout.resources_version, attempts,
        attempt.attempt_id, attempt.status, attempt.worker_id, attempt.outcome, attempt.outcome_reason,
        None if attempt.error is None else attempt.error.type, attempt.reward,
        None if attempt.rewards is None else json.dumps(attempt.rewards, separators=(",", ":")),
    )  # fmt: skip


def summary_of(facts: Facts, spans: int, preview: str) -> RolloutSummary:
    """Return the summary for facts, the number of spans and the preview."""
    fields: dict[str, Any] = facts._asdict()
    fields["task"] = task_of(facts.task)
    fields["rewards"] = None if facts.rewards is None else json.loads(facts.rewards)
    return RolloutSummary.model_construct(**fields, spans=spans, input_preview=preview)


def task_of(text: str | None) -> int | str | None:
    """Return the task from its JSON."""
    return None if text is None else cast("int | str", json.loads(text))


def task_text(task: int | str) -> str:
    """Return a task as stored in its column."""
    return json.dumps(task, ensure_ascii=False)


def _whole(value: object) -> int | None:
    return value if type(value) is int and -_LARGEST <= value <= _LARGEST else None


def _task(value: object) -> str | None:
    if type(value) is str and len(value) <= _LONGEST_TASK:
        return task_text(value)
    return None if (number := _whole(value)) is None else str(number)


# --- the input as text ---------------------------------------------------------------------------------------------


def input_text(value: object) -> str:
    """Return the first `SEARCHED` characters of an input. An input that is not a text is converted to JSON."""
    if type(value) is str:
        return value[:SEARCHED].replace("\0", " ")
    text = json.dumps(_trimmed(value, SEARCHED)[0], ensure_ascii=False)
    return text[:SEARCHED].replace("\0", " ")


def preview_of(text: str) -> str:
    """Return the part of an input's text that a summary shows."""
    return text[:PREVIEW]


def searched(text: str) -> str:
    """Return a text in a form for case-insensitive search."""
    return text.casefold()


def _trimmed(value: Any, room: int) -> tuple[Any, int]:
    """Return a value, truncated after `room` characters of its JSON, and the number of remaining characters."""
    if type(value) is str:
        return value[:room], room - len(value)
    if isinstance(value, Mapping):
        named: dict[str, Any] = {}
        for key, item in cast("Mapping[str, Any]", value).items():
            if room <= 0:
                break
            named[key[:room]], room = _trimmed(item, room - len(key) - 4)
        return named, room
    if isinstance(value, list):
        items: list[Any] = []
        for item in islice(cast("list[Any]", value), SEARCHED):
            if room <= 0:
                break
            trimmed, room = _trimmed(item, room - 1)
            items.append(trimmed)
        return items, room
    return value, room - 1
