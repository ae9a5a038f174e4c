"""The ledger records of a step: what became of each model call of each rollout, and the numbers that its loss used.

One record for each rollout and step; its name is the rollout's id. Calls that ended after their step had closed are in
a record of the step in which they were seen (`late`). Needs no torch: numbers come in as sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.ledger import Ledger, RolloutRecord, Trained
from agentlightning.training.runs.packed import Dtype, Packed, pack, unpack


class LedgerCall(TypedDict):
    """How one model call ended."""

    call_id: str
    attempt_id: str
    ending: str
    """`trained` or `excluded`."""
    reason: str | None
    """Of an exclusion, out of the closed list."""
    row: int | None
    """Of a trained call: index of its row in the step's batch."""
    tokens: int
    """Of a trained call: how many of its tokens are trained."""
    advantage: float | None
    """Of a trained call: that of its rollout."""
    weight_version: int | None
    """The weights that served it; None where nobody recorded them."""
    constrained_by: list[str]
    """Settings under which its tokens were drawn from another distribution than the one that learns."""


class LedgerRow(TypedDict, total=False):
    """One token row of a rollout, with the numbers of the loss. T tokens, of which N are trained.

    `tokens`, `mask`: (T,), all others (N,) in the order of the trained tokens.
    """

    row: int
    """Index in the step's batch."""
    vocabulary: str | None
    """Id of the table with the text of each token id."""
    policy: str
    """The policy that learns from it, where the run has several."""
    length: int
    """T."""
    tokens: Packed
    """Token ids."""
    mask: Packed
    """1 on the tokens that are trained."""
    engine_logprobs: Packed
    """The engine's natural log-probability of each when it was sampled."""
    trainer_logprobs: Packed
    """The learner's, before the first optimizer step."""
    entropy: Packed
    """Of the learner's distribution there, in nats."""
    ratio: Packed
    """Of the learner's probability to what it is compared with (by default the engine's), before it is bounded."""
    clipped: Packed
    """Which bound of the ratio counts: 0 none, 1 the lower, 2 the upper, 3 `delta`."""
    weight: Packed
    """Of the token in the sum that is the loss."""
    correction: Packed
    """For what engine and learner differ in; 1 without `importance_sampling_correction`."""
    kl: Packed
    """Divergence from the reference, before `beta`; 0 without."""
    advantage: Packed
    """By which the token counts."""
    value: Packed
    """Of the state before the token by the critic, before the step; where there is one."""
    returns: Packed
    """What that value is to become; where there is a critic."""


_PLAIN = ("row", "vocabulary", "length", "policy")
_DTYPES: dict[str, Dtype] = {"tokens": "i32", "mask": "u8", "clipped": "u8"}
"""Of the packed fields that are no f32."""


class LedgerEntry(TypedDict, total=False):
    """What became of one rollout in one step."""

    rollout_id: str
    attempt_id: str | None
    """The latest attempt."""
    reward: float | None
    outcome: str | None
    verdict: str | None
    """Why nothing of the rollout is trained; None if its calls may be."""
    group: int | None
    """Number of its task within the step."""
    advantage: float | None
    """Of the rollout, if it is trained."""
    weight_versions: list[int]
    """The weights that served its calls, each once."""
    calls: list[LedgerCall]
    rows: list[LedgerRow]
    """Where per-token figures are recorded: see the setting `record_tokens`."""
    late: bool
    """Calls that ended after the step of their rollout had closed."""


def entries_of(
    ledger: Ledger,
    records: Sequence[RolloutRecord],
    groups: Sequence[int] | None = None,
    rows: Mapping[str, list[LedgerRow]] | None = None,
) -> list[LedgerEntry]:
    """Return an entry for each rollout of a step that has closed, and for each earlier one that has late calls.

    Shapes: records: (R,) and groups: (R,) the group of each; rows: by rollout.
    """
    by_rollout: dict[str, list[ModelCall]] = {}
    for call in ledger.calls():
        by_rollout.setdefault(call.ref.rollout_id, []).append(call)
    entries = [
        _entry(ledger, record, by_rollout.pop(record.rollout_id, []), None if groups is None else groups[place])
        for place, record in enumerate(records)
    ]
    for entry in entries:
        if rows and (own := rows.get(entry.get("rollout_id", ""))):
            entry["rows"] = own
    return entries + [_late_entry(ledger, rollout_id, calls) for rollout_id, calls in by_rollout.items()]


def _entry(ledger: Ledger, record: RolloutRecord, calls: Iterable[ModelCall], group: int | None) -> LedgerEntry:
    endings = _endings(ledger, calls)
    advantages = [end["advantage"] for end in endings if end["advantage"] is not None]
    return {
        "rollout_id": record.rollout_id,
        "attempt_id": record.attempt_id,
        "reward": record.reward,
        "outcome": record.outcome,
        "verdict": record.verdict,
        "group": group,
        "advantage": advantages[0] if advantages else None,
        "weight_versions": sorted({end["weight_version"] for end in endings if end["weight_version"] is not None}),
        "calls": endings,
    }


def _late_entry(ledger: Ledger, rollout_id: str, calls: Sequence[ModelCall]) -> LedgerEntry:
    return {
        "rollout_id": rollout_id,
        "attempt_id": calls[-1].ref.attempt_id,
        "calls": _endings(ledger, calls),
        "late": True,
    }


def _endings(ledger: Ledger, calls: Iterable[ModelCall]) -> list[LedgerCall]:
    endings = ledger.endings()
    return [
        {
            "call_id": call.ref.call_id,
            "attempt_id": call.ref.attempt_id,
            "ending": "trained" if isinstance(end, Trained) else "excluded",
            "reason": None if isinstance(end, Trained) else end.reason,
            "row": end.row if isinstance(end, Trained) else None,
            "tokens": end.tokens if isinstance(end, Trained) else 0,
            "advantage": end.advantage if isinstance(end, Trained) else None,
            "weight_version": call.weight_version,
            "constrained_by": list(end.constrained_by) if isinstance(end, Trained) else [],
        }
        for call in calls
        if (end := endings.get(call.ref)) is not None
    ]


# --- rows ------------------------------------------------------------------------------------------------------------


def row_of(sample: Sample, *, row: int, vocabulary: str | None, **figures: Sequence[float]) -> LedgerRow:
    """Return a token row as records hold it. Each figure has a number for each of the N trained tokens.

    Raises:
        ValueError: a figure has another length.
    """
    trained = sum(sample.mask)
    wrong = [f"{name} ({len(values)})" for name, values in figures.items() if len(values) != trained]
    if wrong:
        raise ValueError(f"row {row} trains {trained} tokens; other lengths have: {', '.join(wrong)}")
    numbers: dict[str, Sequence[float]] = {"tokens": sample.token_ids, "mask": sample.mask, **figures}
    packed = {name: pack(values, _DTYPES.get(name, "f32")) for name, values in numbers.items()}
    policy = {} if sample.policy is None else {"policy": sample.policy}
    return cast(LedgerRow, {"row": row, "vocabulary": vocabulary, "length": len(sample.token_ids), **policy, **packed})


def numbers_of(row: LedgerRow) -> dict[str, array[Any]]:
    """Return the numbers of a recorded row by name, each as it was.

    Raises:
        ValueError: what is recorded is no packed list.
    """
    return {name: unpack(value) for name, value in row.items() if name not in _PLAIN}
