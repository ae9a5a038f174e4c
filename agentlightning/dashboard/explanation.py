"""The use of each model call of a rollout, as data: the output of `agl rollouts explain`, and the run's ledger."""

from __future__ import annotations

from typing import Any

from agentlightning.adapter.explain import ExplainedCall, advice_for, why_untrained
from agentlightning.dashboard.values import CallExplanation, LedgerEntry, RolloutExplanation
from agentlightning.training.ledger import read_rollout
from agentlightning.training.rollouts import Evidence
from agentlightning.types import RunRecord


def explanation_of(
    evidence: Evidence, record: RunRecord | None, algorithm: str | None, attempt_id: str | None = None
) -> RolloutExplanation:
    """Return the explanation of a rollout, or with an attempt only of that attempt's calls.

    `record` is the rollout's record in the ledger of its run, and `algorithm` the name of the run's algorithm.
    """
    reading = read_rollout(evidence.rollout, evidence.attempts, evidence.spans)
    explanation = reading.explain()
    entries = _ledger(record)
    calls = [
        _call(each, entries)
        for each in explanation.calls
        if attempt_id is None or each.call.ref.attempt_id == attempt_id
    ]
    latest = evidence.latest
    untrained = why_untrained(evidence.rollout.mode, algorithm)
    advice = explanation.to_try() if untrained is None and not explanation.trainable else ()
    return RolloutExplanation(
        rollout_id=evidence.rollout.rollout_id,
        attempt_id=reading.attempt_id,
        outcome=reading.outcome,
        verdict=reading.verdict,
        reward=reading.reward,
        error=None if latest is None else latest.error,
        calls=calls,
        rows=len(reading.samples),
        notes=[*explanation.seams, *advice],
        untrained=untrained,
    )


def _call(explanation: ExplainedCall, entries: dict[tuple[str, str], LedgerEntry]) -> CallExplanation:
    call, spans = explanation.call, explanation.call.spans
    own = [] if spans is None else [spans.request, spans.record, spans.seen, *spans.also]
    return CallExplanation(
        number=explanation.number,
        call_id=call.call_id,
        attempt_id=call.ref.attempt_id,
        agent=call.agent,
        model=explanation.model,
        state=call.state,
        stale=call.stale,
        prompt_tokens=explanation.prompt_tokens,
        completion_tokens=explanation.completion_tokens,
        has_tokens=explanation.has_tokens,
        seen_by=explanation.seen_by,
        matched_by=explanation.matched_by,
        row=explanation.row,
        begins=explanation.begins,
        reason=explanation.reason,
        what_to_try=None if explanation.reason is None else advice_for(explanation.reason),
        error=explanation.error,
        weight_version=call.weight_version,
        span_ids=list(dict.fromkeys(span.span_id for span in own if span is not None)),
        ledger=entries.get((call.ref.attempt_id, call.call_id)),
    )


def _ledger(record: RunRecord | None) -> dict[tuple[str, str], LedgerEntry]:
    """Return the entries of a ledger record by attempt and call. Unreadable entries are skipped."""
    entries: dict[tuple[str, str], LedgerEntry] = {}
    calls: list[Any] = [] if record is None else record.data.get("calls") or []
    for each in calls:
        try:
            fields = {name: each.get(name) for name in ("ending", "reason", "row", "advantage", "weight_version")}
            entries[each["attempt_id"], each["call_id"]] = LedgerEntry(**fields, step=record.step if record else 0)
        except (AttributeError, KeyError, TypeError, ValueError):  # a record that another program wrote
            continue
    return entries
