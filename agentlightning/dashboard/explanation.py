"""What became of every model call of a rollout, as data: what `agl rollouts explain` prints, and the run's ledger."""

from __future__ import annotations

from typing import Any

from agentlightning.adapter.explain import ExplainedCall, advice_for
from agentlightning.dashboard.values import CallExplanation, LedgerEntry, RolloutExplanation
from agentlightning.training.ledger import read_rollout
from agentlightning.training.rollouts import Evidence
from agentlightning.types import RunRecord


def explanation_of(found: Evidence, record: RunRecord | None, attempt_id: str | None = None) -> RolloutExplanation:
    """Return the explanation of a rollout; with an attempt, of the calls of that one only.

    `record` is what the ledger of its run has of it.
    """
    reading = read_rollout(found.rollout, found.attempts, found.spans)
    told = reading.explain()
    entries = _ledger(record)
    calls = [
        _call(each, entries) for each in told.calls if attempt_id is None or each.call.ref.attempt_id == attempt_id
    ]
    latest = found.latest
    notes = [*told.seams, *(told.to_try() if not told.trainable else ())]
    return RolloutExplanation(
        rollout_id=found.rollout.rollout_id,
        attempt_id=reading.attempt_id,
        outcome=reading.outcome,
        verdict=reading.verdict,
        reward=reading.reward,
        error=None if latest is None else latest.error,
        calls=calls,
        rows=len(reading.samples),
        notes=notes,
    )


def _call(told: ExplainedCall, entries: dict[tuple[str, str], LedgerEntry]) -> CallExplanation:
    call, spans = told.call, told.call.spans
    own = [] if spans is None else [spans.request, spans.record, spans.seen, *spans.also]
    return CallExplanation(
        number=told.number,
        call_id=call.call_id,
        attempt_id=call.ref.attempt_id,
        agent=call.agent,
        model=told.model,
        state=call.state,
        stale=call.stale,
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        has_tokens=told.has_tokens,
        seen_by=told.seen_by,
        matched_by=told.matched_by,
        row=told.row,
        begins=told.begins,
        reason=told.reason,
        what_to_try=None if told.reason is None else advice_for(told.reason),
        error=told.error,
        weight_version=call.weight_version,
        span_ids=list(dict.fromkeys(span.span_id for span in own if span is not None)),
        ledger=entries.get((call.ref.attempt_id, call.call_id)),
    )


def _ledger(record: RunRecord | None) -> dict[tuple[str, str], LedgerEntry]:
    """Return the entries of a ledger record by attempt and call. What cannot be read is left out."""
    entries: dict[tuple[str, str], LedgerEntry] = {}
    told: list[Any] = [] if record is None else record.data.get("calls") or []
    for each in told:
        try:
            fields = {name: each.get(name) for name in ("ending", "reason", "row", "advantage", "weight_version")}
            entries[each["attempt_id"], each["call_id"]] = LedgerEntry(**fields, step=record.step if record else 0)
        except (AttributeError, KeyError, TypeError, ValueError):  # a record that another program wrote
            continue
    return entries
