"""Checks for conditions that prevent learning: rollouts without a trainable or a scored call, and token drift.

Rollouts without a trainable call are reported once, as are rollouts with a finally refused call; they are excluded and
the run continues. Rollouts with more rows than are trained are also reported once. The run ends with an error if the
whole first batch has no trainable call, if more tokens drift than allowed, or if no rollout of the whole run has a
reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.calls.refusals import REFUSED_CALL, refused_for_good
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.seams import describe
from agentlightning.base.terminal import counted
from agentlightning.errors import NoScoredRolloutError, NoTrainableCallError, TooMuchDriftError
from agentlightning.training.ledger import RolloutRecord
from agentlightning.training.rollouts import Evidence
from agentlightning.training.rows import StepRows

_WAYS_OUT: Final = (
    "To fix this, add a parameter for the model, `def agent(task, llm: agl.LLM)`, and pass "
    "base_url=llm.get_base_url(), api_key=llm.api_key and model=llm.model to the agent's client. Or run the agent as a "
    "separate program (agl.CommandAgent), whose environment has OPENAI_BASE_URL, OPENAI_API_KEY and similar variables. "
    "If the client caches replies, as DSPy does, disable its cache"
)
_STATE: Final = (
    *("turns", "drifts", "_first_step_seen", "_reported", "_told_of_refusals", "_told_of_row_limit", "has_looked"),
)
"""Fields of `RunGuard` that a checkpoint holds, under these names."""


@dataclass
class RunGuard:
    """Reports conditions that prevent learning. Belongs to the loop of the run, which calls it in each step."""

    max_drift: float | None = None
    """Maximum share of turns that may drift; None is no limit."""
    decode: Decode | None = None
    turns: int = field(default=0, init=False)
    """Number of model calls in rows, over the full run."""
    drifts: int = field(default=0, init=False)
    """Number of these calls that begin a row because of the chat template or the tokenizer."""
    _first_step_seen: bool = field(default=False, init=False)
    _reported: bool = field(default=False, init=False)
    _told_of_refusals: bool = field(default=False, init=False)
    _told_of_row_limit: bool = field(default=False, init=False)
    has_looked: bool = field(default=False, init=False)
    """Whether the first rollout with a reward has been checked."""

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON data: the counts, and the reports already made."""
        return {name: getattr(self, name) for name in _STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier start of the run."""
        for name in _STATE:
            setattr(self, name, state.get(name, getattr(self, name)))  # an older checkpoint has fewer fields

    def first_look(self, evidence: Evidence) -> str | None:
        """Return advice if this is the first rollout with a reward and none of its calls came through the gateway."""
        latest = evidence.latest
        if self.has_looked or evidence.reward is None or latest is None or latest.outcome_reason == REFUSED_CALL:
            return None
        self.has_looked = True
        calls = model_calls(evidence.counted)
        if any(call.spans is not None and call.spans.record is not None for call in calls):
            return None
        tracer_note = f"its tracer saw {len(calls)}, sent elsewhere" if calls else "its tracer saw none either"
        return (
            f"the first rollout with a reward ({evidence.rollout.rollout_id}) has no model call through the gateway "
            f"({tracer_note}), so it cannot be trained. {_WAYS_OUT}"
        )

    def refusals(self, records: Sequence[RolloutRecord]) -> str | None:
        """Return a report on rollouts that are excluded for a refused call, the first time that there are any."""
        refused = [record for record in records if record.verdict == REFUSED_CALL]
        if not refused or self._told_of_refusals:
            return None
        self._told_of_refusals = True
        return (
            f"{len(refused)} of {counted(len(records), 'rollout')} had a permanently refused call and are excluded as "
            f"{REFUSED_CALL}. This is reported only once. The first, rollout {refused[0].rollout_id}: "
            f"{_first_refusal(refused[0])}. Change the request of the program, or train such rollouts with "
            "refused_calls='train'"
        )

    def over_row_limit(self, records: Sequence[RolloutRecord]) -> str | None:
        """Return a report on rollouts with more rows than are trained, the first time that there are any."""
        over = [record for record in records if len(record.reading.samples) > len(record.samples)]
        if not over or self._told_of_row_limit:
            return None
        self._told_of_row_limit = True
        largest = max(over, key=lambda record: len(record.reading.samples))
        return (
            f"{len(over)} of {counted(len(records), 'rollout')} had more token rows than max_rows_per_rollout="
            f"{largest.max_rows}. Only the first rows are trained; the calls of the others are excluded as row_limit. "
            f"This is reported only once. The largest, rollout {largest.rollout_id}, has "
            f"{len(largest.reading.samples)} rows. Check whether its agent is in a loop (agl rollouts explain "
            f"{largest.rollout_id}), or increase max_rows_per_rollout"
        )

    @property
    def drift_rate(self) -> float:
        """Drifts per turn over the full run; 0 before the first turn."""
        return self.drifts / self.turns if self.turns else 0.0

    def count_drift(self, records: Sequence[RolloutRecord]) -> None:
        """Count the turns and drifts of a step; raise TooMuchDriftError if the run is beyond its limit."""
        self.turns += sum(record.reading.turns for record in records)
        self.drifts += sum(len(record.reading.drifts) for record in records)
        if self.max_drift is None or self.drift_rate <= self.max_drift:
            return
        record = next(record for record in records if record.reading.drifts)
        example = describe(record.reading.drifts[0], record.calls, self.decode)
        raise TooMuchDriftError(
            f"{self.drifts} of {counted(self.turns, 'turn')} were rendered as different tokens than were sampled "
            f"({self.drift_rate:.1%}, max_drift={self.max_drift}). Each of these turns begins a new row. Example, from "
            f"rollout {record.rollout_id}:\n{example}\nUse a chat template that renders earlier turns "
            "unchanged, or increase max_drift"
        )

    def untrainable(self, records: Sequence[RolloutRecord]) -> str | None:
        """Return a report on rollouts with a reward and no trainable call, the first time that there are any.

        Raises:
            NoTrainableCallError: it is the first step, and no rollout with a reward has a trainable call.
        """
        first, self._first_step_seen = not self._first_step_seen, True
        earned = [record for record in records if record.verdict in (None, "no_call")]
        without = [record for record in earned if not record.samples]
        if not without or self._reported:
            return None
        self._reported = True
        report = f"The first of them, rollout {without[0].rollout_id}:\n{without[0].explain(self.decode)}"
        if first and len(without) == len(earned):
            raise NoTrainableCallError(
                f"No rollout with a reward in the first step (of {len(earned)}) has a model call that can be used for "
                f"training. {report}"
            )
        counts = f"{len(without)} of {counted(len(earned), 'rollout')} with a reward"
        return f"{counts} excluded: no model call can be used for training. This is reported only once. {report}"


class Endings:
    """Counts the training rollouts of a run by their outcomes. Belongs to the loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._scored = 0
        self._first_error: str | None = None

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON data."""
        return {"counts": dict(self._counts), "scored": self._scored, "first_error": self._first_error}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier start of the run."""
        self._counts = Counter(state["counts"])
        self._scored, self._first_error = state["scored"], state["first_error"]

    def add(self, collected: Sequence[Evidence], rows: StepRows) -> None:
        """Count the rollouts of a step and their records, in the same order."""
        self._scored += len(rows.rewards)
        self._counts.update(rows.excluded_rollouts)
        for one, record in zip(collected, rows.records, strict=True):
            if self._first_error is not None:
                return
            if one.latest is not None and one.latest.error is not None:
                self._first_error = f"{record.rollout_id}: {one.latest.error.type}: {one.latest.error.message}"
            elif record.verdict == REFUSED_CALL:
                self._first_error = f"{record.rollout_id}: {_first_refusal(record)}"

    def require_scored(self) -> None:
        """Raise NoScoredRolloutError if no rollout had a reward to learn from."""
        if self._scored or not self._counts:
            return
        counts = ", ".join(f"{number} {reason}" for reason, number in self._counts.most_common())
        error = f" The first error, of rollout {self._first_error}." if self._first_error else ""
        raise NoScoredRolloutError(
            f"No rollout of the run, of {self._counts.total()}, could be used for training: {counts}.{error} The "
            "model is unchanged. To inspect a rollout: agl rollouts list, agl rollouts explain <rollout id>"
        )


def why_failed(collected: Sequence[Evidence]) -> str:
    """Return a description of the most frequent outcome of the rollouts."""
    [(way, number)] = Counter(map(_way_of, collected)).most_common(1)
    return f"{way} ({number} of {len(collected)})"


def _way_of(rollout: Evidence) -> str:
    latest = rollout.latest
    if latest is None:
        return "no runner claimed it in time"
    error = f": {latest.error.type}: {latest.error.message}" if latest.error else ""
    return f"{latest.outcome_reason or latest.outcome or latest.status}{error}"


def _first_refusal(record: RolloutRecord) -> str:
    """Return the error of the first finally refused call of a rollout."""
    calls = [call for call in record.calls if call.ref.attempt_id == record.attempt_id]
    spans = [call.spans.record for call in refused_for_good(calls) if call.spans is not None]
    return next((s.status.description for s in spans if s is not None and s.status.description), "no error is recorded")
