"""`report.html`: two runs side by side in one file, which needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from agentlightning.evaluation.compare import curve
from agentlightning.evaluation.conversations import Changed, Transcript
from agentlightning.evaluation.gate import PartResult, Promotion
from agentlightning.evaluation.intervals import Interval
from agentlightning.terminal import some_lines
from agentlightning.types.runs import Run, RunRecord
from agentlightning.utils.masking import masked_text

_PACKAGE = "agentlightning.evaluation"
_FIGURES = ("mean_reward", "reward", "accuracy", "score", "loss", "update.loss")
"""Figures of steps that are drawn, the first one that a run has."""
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760.0, 260.0, 56.0, 16.0, 12.0, 34.0
_ROW = 160.0
"""Width of the drawing of a difference."""


@dataclass(frozen=True)
class Side:
    """What the report shows of one run."""

    run: Run
    records: Sequence[RunRecord]
    """Its steps and evaluations."""
    evaluation: str
    """The evaluation that is compared, in words."""
    transcripts: Mapping[str, Transcript] = field(default_factory=dict[str, Transcript])
    """By rollout."""


def report(
    promotion: Promotion, before: Side, after: Side, won: Sequence[Changed], lost: Sequence[Changed], *, judged: bool
) -> str:
    """Return the page.

    Secrets are hidden, and text of others is escaped. `judged`: the page tells whether the rules are passed; without it
    it shows the figures only.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_safe, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(_PACKAGE).joinpath("report.html.jinja").read_text(encoding="utf-8")
    sides = (before, after)
    figure, lines = _curves(sides)
    return environment.from_string(source).render(
        promotion=promotion,
        judged=judged,
        sides=[_side(side) for side in sides],
        chart=_chart(lines),
        figure=figure,
        whole=_row("all tasks", promotion.before, promotion.after, promotion, _scale(promotion)),
        slices=[_part(part, _scale(promotion)) for part in promotion.slices],
        dimensions=[_part(part, _scale(promotion)) for part in promotion.dimensions],
        conversations=[
            ("Won", [_conversation(each, before, after) for each in won], promotion.comparison.gained),
            ("Lost", [_conversation(each, before, after) for each in lost], promotion.comparison.lost),
        ],
    )


def _safe(value: Any) -> Any:
    """Return what may leave of a value: no secret, and nothing that turns the direction of a text."""
    return some_lines(masked_text(value)) if type(value) is str else value


def _side(side: Side) -> dict[str, str]:
    run = side.run
    return {"name": run.run_id or "-", "algorithm": run.algorithm or "-", "state": run.state, "what": side.evaluation}


# --- curve -----------------------------------------------------------------------------------------------------------

_Points = list[tuple[int, float]]


def _curves(sides: tuple[Side, Side]) -> tuple[str, list[_Points]]:
    """Return the figure to draw, and the points of each side: of its steps, else the values of its evaluations."""
    for name in _FIGURES:
        found = [curve(side.records, name) for side in sides]
        if any(len(points) > 1 for points in found):
            return name, [_thinned(sorted(points.items())) for points in found]
    values = [_evaluated(side.records) for side in sides]
    return ("value of the evaluations" if any(len(points) > 1 for points in values) else ""), values


def _evaluated(records: Sequence[RunRecord]) -> _Points:
    names = [record.name for record in records if record.kind == "evaluation"]
    chosen = max(names, key=names.count, default="")
    own = [record for record in records if record.kind == "evaluation" and record.name == chosen]
    found = [(record.step, record.data.get("value")) for record in own]
    return _thinned([(step, float(value)) for step, value in found if isinstance(value, (int, float))])


def _thinned(points: _Points) -> _Points:
    """Return so many points as fit the drawing, the last one among them."""
    stride = -(-len(points) // _MOST_POINTS)
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def _chart(lines: Sequence[_Points]) -> dict[str, Any] | None:
    """Return the drawing: polylines, and the marks of both axes; None without a line of two points."""
    everything = [point for points in lines for point in points]
    if not any(len(points) > 1 for points in lines):
        return None
    first, last = min(step for step, _ in everything), max(step for step, _ in everything)
    low, high = min(value for _, value in everything), max(value for _, value in everything)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = (low, high) if (low, high) == (0.0, 1.0) else (low - margin, high + margin)

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / max(1, last - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    levels = [low + (high - low) * part / 4 for part in range(5)]
    steps = sorted({round(first + (last - first) * part / 5) for part in range(6)})
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": _HEIGHT - _BOTTOM,
        "lines": [[(x(step), y(value)) for step, value in points] for points in lines],
        "levels": [(y(level), f"{level:.3g}") for level in levels],
        "steps": [(x(step), str(step)) for step in steps],
    }


# --- rows ------------------------------------------------------------------------------------------------------------


def _scale(promotion: Promotion) -> float:
    """Return the difference that the drawings of differences reach to."""
    parts = [promotion.comparison, *(part.comparison for part in (*promotion.slices, *promotion.dimensions))]
    found = [part.difference for part in parts if part.difference is not None]
    ends = [abs(end) for each in found for end in (each.mean, each.low, each.high) if abs(end) < float("inf")]
    return max(ends, default=0.0) or 1.0


def _row(name: str, before: Interval | None, after: Interval | None, part: Any, scale: float) -> dict[str, Any]:
    comparison, change = part.comparison, part.comparison.difference
    row: dict[str, Any] = {"name": name, "pairs": comparison.pairs, "gained": comparison.gained}
    row |= {"lost": comparison.lost, "p_value": getattr(part, "p_value", comparison.p_value)}
    row |= {"before": _cell(before, ".3f"), "after": _cell(after, ".3f"), "change": _cell(change, "+.3f")}
    row["worse"] = getattr(part, "worse", False)
    middle = _ROW / 2
    row["drawn"] = None
    if change is not None:
        ends = (max(-1.0, min(1.0, end / scale)) for end in (change.low, change.mean, change.high))
        row["drawn"] = [round(middle + end * (middle - 6), 1) for end in ends]
    return row


def _cell(interval: Interval | None, form: str) -> tuple[str, str]:
    """Return the mean, and below it its interval."""
    if interval is None or interval.high == float("inf"):
        return "-" if interval is None else f"{interval.mean:{form}}", ""
    return f"{interval.mean:{form}}", f"{interval.low:{form}} to {interval.high:{form}}"


def _part(part: PartResult, scale: float) -> dict[str, Any]:
    return _row(part.name, part.before, part.after, part, scale)


def _conversation(changed: Changed, before: Side, after: Side) -> dict[str, Any]:
    told: list[dict[str, Any]] = [
        {
            "reward": f"{rollout.reward:g}",
            "rollout": rollout.rollout_id,
            "told": side.transcripts.get(rollout.rollout_id, Transcript(note="not read")),
        }
        for rollout, side in ((changed.before, before), (changed.after, after))
    ]
    task = next((each["told"].task for each in told if each["told"].task), "")
    return {"task": task, "change": f"{changed.change:+.3g}", "slices": changed.slices, "sides": told}
