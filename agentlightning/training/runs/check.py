"""Whether the recorded ledger of a run adds up, told from its records and the spans of its rollouts alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from agentlightning.adapter.calls.calls import CallRef, model_calls
from agentlightning.field_help import explain_fields
from agentlightning.store.base import LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.training.runs.ledger_record import LedgerCall, LedgerEntry, numbers_of
from agentlightning.types import Rollout

_PAGE = 100
_NAMED_AT_MOST = 20


@explain_fields
@dataclass
class LedgerCheck:
    """What a check of a run's ledger has found."""

    captured: int = 0
    """Model calls that the spans of the training rollouts show."""
    trained: int = 0
    """Of them, those that are part of an update."""
    trained_tokens: int = 0
    """Tokens of these calls that were trained."""
    excluded: Counter[str] = field(default_factory=Counter[str])
    """The others, by the reason of their exclusion."""
    evaluation_calls: int = 0
    """Calls of rollouts that were not sampled for training, which are in no ledger."""
    without_span: int = 0
    """Recorded calls whose spans the store has forgotten."""
    rows: int = 0
    """Recorded token rows; the trained tokens of each are those of its calls."""
    wrong: list[str] = field(default_factory=list[str])
    """What does not add up, the first twenty of it in words."""
    wrong_count: int = 0
    """How much does not add up in all."""

    @property
    def adds_up(self) -> bool:
        """True if each call is in exactly one ending, and each row has the tokens of its calls."""
        return not self.wrong_count

    def fault(self, text: str) -> None:
        """Note something that does not add up."""
        self.wrong_count += 1
        if len(self.wrong) < _NAMED_AT_MOST:
            self.wrong.append(text)


async def check_ledger(store: LightningStore, run_id: str) -> LedgerCheck:
    """Return whether every model call of a run's training rollouts has exactly one recorded ending.

    Reads a rollout at a time, so that the size of the run does not matter. A run that goes on has calls whose step has
    not closed: check it when it has ended.
    """
    found = LedgerCheck()
    async for page in pages_of(store.query_rollouts, run_id=run_id or None, sort_by="start_time", limit=_PAGE):
        for rollout in page:
            await _check_rollout(store, run_id, rollout, found)
    return found


async def _check_rollout(store: LightningStore, run_id: str, rollout: Rollout, found: LedgerCheck) -> None:
    spans = await store.query_spans(rollout.rollout_id)
    captured = {call.ref for call in model_calls(list(spans))}
    if rollout.mode in ("val", "test"):
        found.evaluation_calls += len(captured)
        return
    records = await store.query_run_records(run_id, kind_in=["ledger"], name=rollout.rollout_id)
    endings: dict[CallRef, list[tuple[int, LedgerCall]]] = {}
    for record in records:
        entry = cast(LedgerEntry, record.data)
        for call in entry.get("calls", ()):
            ref = CallRef(rollout.rollout_id, call["attempt_id"], call["call_id"])
            endings.setdefault(ref, []).append((record.step, call))
        _check_rows(f"rollout {rollout.rollout_id}, step {record.step}", entry, found)
    found.captured += len(captured)
    for ref in sorted(captured | endings.keys(), key=lambda ref: (ref.attempt_id, ref.call_id)):
        ends = endings.get(ref, [])
        name = f"call {ref.call_id} (rollout {ref.rollout_id}, attempt {ref.attempt_id})"
        if not ends:
            found.fault(f"{name} has no recorded ending")
            continue
        if len(ends) > 1:
            found.fault(f"{name} has {len(ends)} endings, in steps {', '.join(str(step) for step, _ in ends)}")
        found.without_span += ref not in captured
        _, call = ends[0]
        if call["ending"] == "trained":
            found.trained += 1
            found.trained_tokens += call["tokens"]
        else:
            found.excluded[str(call["reason"])] += 1


def _check_rows(where: str, entry: LedgerEntry, found: LedgerCheck) -> None:
    for row in entry.get("rows", ()):
        found.rows += 1
        number = row.get("row")
        calls = [call for call in entry.get("calls", ()) if call["row"] == number]
        expected = sum(call["tokens"] for call in calls)
        try:
            numbers = numbers_of(row)
            trained = sum(numbers["mask"])
        except (ValueError, KeyError) as error:
            found.fault(f"{where}: row {number} cannot be read: {error}")
            continue
        if calls and trained != expected:  # the calls of a step that was skipped are in no row
            found.fault(f"{where}: row {number} trains {trained} tokens, its calls have {expected}")
        lengths = {name: row.get("length") if name in ("tokens", "mask") else trained for name in numbers}
        short = [name for name, values in numbers.items() if len(values) != lengths[name]]
        if short:
            found.fault(f"{where}: row {number} has another length in: {', '.join(short)}")
