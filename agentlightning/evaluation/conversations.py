"""Conversations won and lost: tasks whose reward differs, with what the agent said on both sides.

What agents say is text of others: secrets are hidden before anything is cut, and there is a bound on everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask
from agentlightning.store.base import LightningStore
from agentlightning.utils.masking import masked_text

MOST_CONVERSATIONS = 10
"""Won, and as many lost: those whose reward differs most."""
_MESSAGE_CHARACTERS = 4000
_MOST_MESSAGES = 40
_TASK_CHARACTERS = 2000
_READ_CHARACTERS = 1_000_000
"""Of one text; what comes after is never shown, and need not be searched for secrets."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A task that was won or lost, with one rollout of each side."""

    before: EvaluatedRollout
    after: EvaluatedRollout
    change: float
    """Of the reward of the task."""
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the store knows of one rollout, without secrets."""

    task: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """Role and text, in order."""
    note: str = ""
    """Why there are no messages, or how many are left out."""


def changed_tasks(
    pairs: Sequence[tuple[EvaluatedTask, EvaluatedTask]], most: int = MOST_CONVERSATIONS
) -> tuple[list[Changed], list[Changed]]:
    """Return the tasks won and lost, the greatest difference first, so many of each at most.

    Of several samples: the worst of the side that was worse, and the best of the other.
    """
    found = [
        _changed(early, late, late.reward - early.reward)
        for early, late in pairs
        if early.reward is not None and late.reward is not None
    ]
    won = sorted((each for each in found if each.change > 1e-12), key=lambda each: -each.change)
    lost = sorted((each for each in found if each.change < -1e-12), key=lambda each: each.change)
    return won[:most], lost[:most]


def _changed(early: EvaluatedTask, late: EvaluatedTask, change: float) -> Changed:
    mine, its = ([r for r in side.rollouts if r.reward is not None] for side in (early, late))
    worst, best = (min, max) if change > 0 else (max, min)
    before, after = worst(mine, key=_reward), best(its, key=_reward)
    return Changed(before, after, change, early.slices or late.slices)


def _reward(rollout: EvaluatedRollout) -> float:
    return rollout.reward or 0.0


async def transcripts(store: LightningStore, rollout_ids: Iterable[str]) -> dict[str, Transcript]:
    """Return what a store knows of each rollout, by its id; one that it has forgotten says so."""
    return {name: await _transcript(store, name) for name in dict.fromkeys(rollout_ids)}


async def _transcript(store: LightningStore, rollout_id: str) -> Transcript:
    rollout = await store.get_rollout_by_id(rollout_id) if rollout_id else None
    if rollout is None:
        return Transcript(note="the store has no such rollout" if rollout_id else "the record names no rollout")
    spans = list(await store.query_spans(rollout_id, "latest"))
    messages = _whole([list(call["messages"]) for call in TraceToMessages().adapt(spans)])
    task = _shown(rollout.input if isinstance(rollout.input, str) else _json(rollout.input), _TASK_CHARACTERS)
    if not messages:
        return Transcript(task, note="no model call was recorded with its text")
    kept, note = messages, ""
    if len(messages) > _MOST_MESSAGES:
        half = _MOST_MESSAGES // 2
        kept = [*messages[:half], *messages[-half:]]
        note = f"{len(messages) - len(kept)} messages in the middle are left out"
    told = ((str(message.get("role", "?")), _shown(_text(message), _MESSAGE_CHARACTERS)) for message in kept)
    return Transcript(task, tuple(told), note)


def _whole(calls: Sequence[list[Message]]) -> list[Message]:
    """Return the messages of all calls, each once: a call that goes on with what was said repeats it."""
    said: list[Message] = []
    for messages in calls:
        common = next((at for at, (a, b) in enumerate(zip(said, messages, strict=False)) if a != b), None)
        start = min(len(said), len(messages)) if common is None else common
        said += messages[start:]
    return said


def _text(message: Message) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else _json(content)] if content else []
    calls: Any = message.get("tool_calls") or ()
    parts += [f"calls {call['function']['name']}({call['function']['arguments']})" for call in calls]
    return "\n".join(parts) or "(says nothing)"


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def _shown(text: str, most: int) -> str:
    """Return a text without secrets, and then its beginning."""
    text = masked_text(text[:_READ_CHARACTERS])
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
