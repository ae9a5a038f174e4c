"""`report.html`: two runs side by side in one file, without network access or scripts.

It shows conversations on tasks that were gained or lost. Agents' messages are untrusted text: secrets are hidden
before texts are cut, and every part has a size limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.base.terminal import counted, some_lines
from agentlightning.evaluation.compare import curve
from agentlightning.evaluation.gate import PartResult, Promotion
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask
from agentlightning.evaluation.statistics import METHODS, Interval
from agentlightning.store.base import LightningStore
from agentlightning.types.runs import Run, RunRecord
from agentlightning.utils.masking import masked_text

MOST_CONVERSATIONS = 10
"""Maximum number of gained and of lost tasks with conversations. Those with the largest difference are shown."""
_MESSAGE_CHARACTERS = 4000
_MOST_MESSAGES = 40
_TASK_CHARACTERS = 2000
_READ_CHARACTERS = 1_000_000
"""Maximum number of characters read from a text. The rest is never shown or searched for secrets."""
_FIGURES = ("mean_reward", "reward", "accuracy", "score", "loss", "update.loss")
"""Metrics of steps for the chart. It shows the first one that a run has."""
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760.0, 260.0, 56.0, 16.0, 12.0, 34.0
_Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Changed:
    """A gained or lost task, with one rollout of each side."""

    before: EvaluatedRollout
    after: EvaluatedRollout
    change: float
    """Change of the task's reward."""
    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """The task and the messages of one rollout, without secrets."""

    task: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """Role and text, in order."""
    note: str = ""
    """Reason for missing messages, or the number of messages that are not shown."""


@dataclass(frozen=True)
class Side:
    """One run in the report."""

    run: Run
    records: Sequence[RunRecord]
    """Records of steps and evaluations."""
    evaluation: str
    """Description of the compared evaluation."""
    transcripts: Mapping[str, Transcript] = field(default_factory=dict[str, Transcript])
    """Transcripts by rollout id."""


def report(
    promotion: Promotion, before: Side, after: Side, won: Sequence[Changed], lost: Sequence[Changed], *, judged: bool
) -> str:
    """Return the report as HTML.

    Secrets are hidden, and untrusted text is escaped. With `judged`, the report shows the result of each rule.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_safe, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(__package__ or "").joinpath("report.html.jinja").read_text(encoding="utf-8")
    whole = promotion.comparison
    parts = [PartResult("all tasks", promotion.before, promotion.after, whole, whole.p_value)]
    every = (*parts, *promotion.slices, *promotion.dimensions)
    changes = [part.comparison.difference for part in every if part.comparison.difference is not None]
    ends = [abs(end) for change in changes for end in (change.mean, change.low, change.high)]
    sides = (side for part in every for side in (part.before, part.after) if side is not None)
    methods = sorted({METHODS[each.method] for each in (*sides, *changes) if each.high < math.inf})
    scale = max((end for end in ends if end < math.inf), default=0.0) or 1.0

    def drawing(change: Interval | None) -> list[float] | None:
        """Return low, mean and high as positions in a drawing of width 160 with 0 in the middle."""
        if change is None:
            return None
        ends = (max(-1.0, min(1.0, end / scale)) for end in (change.low, change.mean, change.high))
        return [round(80.0 + end * 74.0, 1) for end in ends]

    def conversation(changed: Changed) -> tuple[Changed, str, list[tuple[EvaluatedRollout, Transcript]]]:
        unread = Transcript(note="not read")
        samples = [
            (rollout, side.transcripts.get(rollout.rollout_id, unread))
            for rollout, side in ((changed.before, before), (changed.after, after))
        ]
        return changed, next((transcript.task for _, transcript in samples if transcript.task), ""), samples

    figure, lines = _curves((before, after))
    return environment.from_string(source).render(
        promotion=promotion,
        judged=judged,
        sides=(before, after),
        chart=_chart(lines),
        figure=figure,
        whole=parts[0],
        cell=_cell,
        drawing=drawing,
        methods=", ".join(methods),
        conversations=[
            ("Tasks gained", list(map(conversation, won)), whole.gained),
            ("Tasks lost", list(map(conversation, lost)), whole.lost),
        ],
    )


def _safe(value: Any) -> Any:
    """Return a text without secrets and without characters that change its direction."""
    return some_lines(masked_text(value)) if type(value) is str else value


def _cell(interval: Interval | None, form: str) -> tuple[str, str]:
    """Return the mean, and its interval for the line below it."""
    if interval is None or interval.high == math.inf:
        return "-" if interval is None else f"{interval.mean:{form}}", ""
    return f"{interval.mean:{form}}", f"{interval.low:{form}} to {interval.high:{form}}"


def _curves(sides: tuple[Side, Side]) -> tuple[str, list[_Points]]:
    """Return the metric to draw, and the points of each side: from its steps, otherwise from its evaluations."""
    for name in _FIGURES:
        curves = [curve(side.records, name) for side in sides]
        if any(len(points) > 1 for points in curves):
            return name, [_thinned(sorted(points.items())) for points in curves]
    values = [_thinned(_evaluated(side.records)) for side in sides]
    return ("value of the evaluations" if any(len(points) > 1 for points in values) else ""), values


def _evaluated(records: Sequence[RunRecord]) -> _Points:
    """Return the values of the most frequent evaluation, by step."""
    names = [record.name for record in records if record.kind == "evaluation"]
    name = max(names, key=names.count, default="")
    values = [(r.step, r.data.get("value")) for r in records if r.kind == "evaluation" and r.name == name]
    return [(step, float(value)) for step, value in values if isinstance(value, (int, float))]


def _thinned(points: _Points) -> _Points:
    """Return the points that fit the drawing, including the last one."""
    stride = -(-len(points) // _MOST_POINTS)
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def _chart(lines: Sequence[_Points]) -> dict[str, Any] | None:
    """Return the drawing: polylines and the ticks of both axes; None without a line of at least two points."""
    if not any(len(points) > 1 for points in lines):
        return None
    steps, values = zip(*(point for points in lines for point in points), strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    else:
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        low, high = low - margin, high + margin

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / max(1, last - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    levels = [low + (high - low) * part / 4 for part in range(5)]
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "lines": [[(x(step), y(value)) for step, value in points] for points in lines],
        "levels": [(y(level), f"{level:.3g}") for level in levels],
        "steps": [(x(s), str(s)) for s in sorted({round(first + (last - first) * part / 5) for part in range(6)})],
    }


def changed_tasks(
    pairs: Sequence[tuple[EvaluatedTask, EvaluatedTask]], most: int = MOST_CONVERSATIONS
) -> tuple[list[Changed], list[Changed]]:
    """Return the gained and the lost tasks, largest difference first, at most a fixed number of each.

    Of several samples, the worst of the worse side and the best of the other side are shown.
    """
    changed = [
        _changed(early, late, late.reward - early.reward)
        for early, late in pairs
        if early.reward is not None and late.reward is not None and abs(late.reward - early.reward) > 1e-12
    ]
    changed.sort(key=lambda each: -abs(each.change))
    return [each for each in changed if each.change > 0][:most], [each for each in changed if each.change < 0][:most]


def _changed(early: EvaluatedTask, late: EvaluatedTask, change: float) -> Changed:
    before, after = ([r for r in side.rollouts if r.reward is not None] for side in (early, late))
    worst, best = (min, max) if change > 0 else (max, min)
    return Changed(worst(before, key=_reward), best(after, key=_reward), change, early.slices or late.slices)


def _reward(rollout: EvaluatedRollout) -> float:
    return rollout.reward or 0.0


async def transcripts(store: LightningStore, rollout_ids: Iterable[str]) -> dict[str, Transcript]:
    """Return the transcripts of rollouts in a store by id. A missing rollout has a note instead."""
    return {rollout_id: await _transcript(store, rollout_id) for rollout_id in dict.fromkeys(rollout_ids)}


async def _transcript(store: LightningStore, rollout_id: str) -> Transcript:
    rollout = await store.get_rollout_by_id(rollout_id) if rollout_id else None
    if rollout is None:
        return Transcript(note="the rollout is not in the store" if rollout_id else "the record has no rollout id")
    spans = list(await store.query_spans(rollout_id, "latest"))
    messages: list[Message] = []
    for call in TraceToMessages().adapt(spans):  # a call that continues a conversation repeats it
        prompt = list(call["messages"])
        same = next((n for n, (a, b) in enumerate(zip(messages, prompt, strict=False)) if a != b), None)
        messages += prompt[min(len(messages), len(prompt)) if same is None else same :]
    task = _shown(rollout.input if isinstance(rollout.input, str) else _json(rollout.input), _TASK_CHARACTERS)
    if not messages:
        return Transcript(task, note="no model call with text is recorded")
    shown, note = messages, ""
    if len(messages) > _MOST_MESSAGES:
        shown = [*messages[: _MOST_MESSAGES // 2], *messages[-_MOST_MESSAGES // 2 :]]
        note = f"not shown: {counted(len(messages) - len(shown), 'message')} in the middle"
    texts = ((str(message.get("role", "?")), _shown(_text(message), _MESSAGE_CHARACTERS)) for message in shown)
    return Transcript(task, tuple(texts), note)


def _text(message: Message) -> str:
    content = message.get("content")
    parts = [content if isinstance(content, str) else _json(content)] if content else []
    calls: Any = message.get("tool_calls") or ()
    parts += [f"calls {call['function']['name']}({call['function']['arguments']})" for call in calls]
    return "\n".join(parts) or "(says nothing)"


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def _shown(text: str, most: int) -> str:
    """Return the beginning of a text, without secrets."""
    text = masked_text(text[:_READ_CHARACTERS])
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
