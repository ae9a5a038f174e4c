"""The format of a run's ledger records, and their check: the outcome of each model call, and the values of its loss.

Each rollout and step has one record, named after the rollout's id. Calls that ended after their step had closed are in
a record of the step that detected them (`late`). `recording.py` creates the records. Requires neither torch nor numpy.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, cast

from agentlightning.adapter.calls.calls import CallRef, model_calls
from agentlightning.base.field_help import explain_fields
from agentlightning.store.base import LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.types import Rollout

Dtype = Literal["f32", "i32", "u8"]

_CODES: dict[str, str] = {"f32": "f", "i32": "i", "u8": "B"}
"""Type codes of `array`; an `i` has four bytes on every platform of Python 3.11."""
_PLAIN = ("row", "vocabulary", "length", "policy")
DTYPES: dict[str, Dtype] = {"tokens": "i32", "mask": "u8", "clipped": "u8"}
"""Types of the packed fields that are not f32."""
_PAGE = 100
_NAMED_AT_MOST = 20


class Packed(TypedDict):
    """A list of numbers in an exact JSON format, a third of the size of decimal digits."""

    dtype: Dtype
    """`f32`: IEEE 754 single precision. `i32`: signed integers. `u8`: unsigned 8-bit integers (masks, flags)."""
    data: str
    """The numbers in order, little-endian, in base64: `numpy.frombuffer(base64.b64decode(data), "<f4")`."""


class LedgerCall(TypedDict):
    """The outcome of one model call: the `reason` of an exclusion, or the values of a trained call."""

    call_id: str
    attempt_id: str
    ending: str
    """`trained` or `excluded`."""
    reason: str | None
    """Reason of the exclusion, from the closed list."""
    row: int | None
    """Index of its row in the step's batch."""
    tokens: int
    """Number of its trained tokens."""
    advantage: float | None
    """Of its rollout."""
    weight_version: int | None
    """Version of the weights that served it; None if not recorded."""
    constrained_by: list[str]
    """Settings that changed the distribution of its tokens from the learner's."""


class LedgerRow(TypedDict, total=False):
    """One token row of a rollout, with the values of the loss. The row has T tokens, of which N are trained.

    `tokens`, `mask`: (T,), all others (N,) in the order of the trained tokens.
    """

    row: int
    """Index in the step's batch."""
    vocabulary: str | None
    """Id of the table with the text of each token id."""
    policy: str
    """The policy that learns from the row, if the run has several policies."""
    length: int
    """T."""
    tokens: Packed
    """Token ids."""
    mask: Packed
    """1 on the tokens that are trained."""
    engine_logprobs: Packed
    """The engine's natural log-probability of each token when it was sampled."""
    trainer_logprobs: Packed
    """The learner's log-probability of each token, before the first optimizer step."""
    entropy: Packed
    """Entropy of the learner's distribution at each token, in nats."""
    ratio: Packed
    """Learner's probability divided by the one that it is compared with (by default the engine's), before clipping."""
    clipped: Packed
    """The limit that clips the ratio: 0 none, 1 the lower, 2 the upper, 3 `delta`."""
    weight: Packed
    """Weight of the token in the sum of the loss."""
    correction: Packed
    """Importance weight for the difference of engine and learner; 1 without `importance_sampling_correction`."""
    kl: Packed
    """Divergence from the reference, before `beta`; 0 without a reference."""
    advantage: Packed
    """Advantage of the token."""
    value: Packed
    """Critic's value of the state before the token, before the step; only with a critic."""
    returns: Packed
    """Target of that value; only with a critic."""


class LedgerEntry(TypedDict, total=False):
    """The data of a record: the outcome of one rollout in one step."""

    rollout_id: str
    attempt_id: str | None
    """The latest attempt."""
    reward: float | None
    outcome: str | None
    verdict: str | None
    """Reason for excluding the full rollout; None if its calls may be trained."""
    group: int | None
    """Number of its task within the step."""
    advantage: float | None
    """Advantage of the rollout; only if it is trained."""
    weight_versions: list[int]
    """Versions of the weights that served its calls, each once."""
    calls: list[LedgerCall]
    rows: list[LedgerRow]
    """Present if token values are recorded; see the setting `record_tokens`."""
    late: bool
    """Calls that ended after the step of their rollout had closed."""


# --- packed numbers --------------------------------------------------------------------------------------------------


def numbers_of(row: LedgerRow) -> dict[str, array[Any]]:
    """Return the unpacked numbers of a recorded row by name."""
    return {name: unpack(value) for name, value in row.items() if name not in _PLAIN}


def pack(values: Sequence[float] | array[Any], dtype: Dtype) -> Packed:
    """Return the values (a list or a numpy array) in packed format. `f32` rounds, and keeps NaN and infinity.

    Raises:
        OverflowError: an integer is out of the range of the type.
    """
    sequence = cast("Any", values)
    numbers = array(_CODES[dtype], sequence.tolist() if hasattr(sequence, "tolist") else sequence)
    if sys.byteorder == "big":
        numbers.byteswap()
    return {"dtype": dtype, "data": base64.b64encode(numbers.tobytes()).decode()}


def unpack(packed: object) -> array[Any]:
    """Return the numbers of a packed list as an `array`, which supports the buffer protocol.

    Raises:
        ValueError: the value is not a packed list. The message describes the error.
    """
    if not isinstance(packed, dict):
        raise ValueError(f"packed numbers must be {{'dtype': ..., 'data': ...}}; got {type(packed).__name__}")
    dtype, data = packed.get("dtype"), packed.get("data")
    if dtype not in _CODES or not isinstance(data, str):
        raise ValueError(f"dtype must be one of {', '.join(_CODES)} and data a string; got {dtype!r}, {type(data)}")
    numbers: array[Any] = array(_CODES[dtype])
    try:
        numbers.frombytes(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data is not base64 of {dtype} numbers: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# --- the check of a recorded ledger ----------------------------------------------------------------------------------


@explain_fields
@dataclass
class LedgerCheck:
    """The result of a check of a run's ledger."""

    captured: int = 0
    """Number of model calls in the spans of the training rollouts."""
    trained: int = 0
    """Number of these calls that are part of an update."""
    trained_tokens: int = 0
    """Number of trained tokens of these calls."""
    excluded: Counter[str] = field(default_factory=Counter[str])
    """Number of the other calls, by the reason of their exclusion."""
    evaluation_calls: int = 0
    """Number of calls of rollouts that were not sampled for training, which are in no ledger."""
    without_span: int = 0
    """Number of recorded calls whose spans are no longer in the store."""
    rows: int = 0
    """Number of recorded token rows; the trained tokens of each are those of its calls."""
    wrong: list[str] = field(default_factory=list[str])
    """Descriptions of the first twenty errors."""
    wrong_count: int = 0
    """Number of all errors."""

    @property
    def adds_up(self) -> bool:
        """True if each call has exactly one outcome, and each row has the tokens of its calls."""
        return not self.wrong_count

    def fault(self, text: str) -> None:
        """Record an error."""
        self.wrong_count += 1
        if len(self.wrong) < _NAMED_AT_MOST:
            self.wrong.append(text)


async def check_ledger(store: LightningStore, run_id: str) -> LedgerCheck:
    """Check that every model call of a run's training rollouts has exactly one recorded outcome.

    Reads only the records and the spans, one rollout at a time, so memory use does not depend on the size of the run.
    Check a run after it has ended: before, it has calls whose step has not closed.
    """
    check = LedgerCheck()
    async for page in pages_of(store.query_rollouts, run_id=run_id or None, sort_by="start_time", limit=_PAGE):
        for rollout in page:
            await _check_rollout(store, run_id, rollout, check)
    return check


async def _check_rollout(store: LightningStore, run_id: str, rollout: Rollout, check: LedgerCheck) -> None:
    captured = {call.ref for call in model_calls(list(await store.query_spans(rollout.rollout_id)))}
    if rollout.mode in ("val", "test"):
        check.evaluation_calls += len(captured)
        return
    endings: dict[CallRef, list[tuple[int, LedgerCall]]] = {}
    for record in await store.query_run_records(run_id, kind_in=["ledger"], name=rollout.rollout_id):
        entry = cast(LedgerEntry, record.data)
        for call in entry.get("calls", ()):
            ref = CallRef(rollout.rollout_id, call["attempt_id"], call["call_id"])
            endings.setdefault(ref, []).append((record.step, call))
        _check_rows(f"rollout {rollout.rollout_id}, step {record.step}", entry, check)
    check.captured += len(captured)
    for ref in sorted(captured | endings.keys(), key=lambda ref: (ref.attempt_id, ref.call_id)):
        ends = endings.get(ref, [])
        name = f"call {ref.call_id} (rollout {ref.rollout_id}, attempt {ref.attempt_id})"
        if not ends:
            check.fault(f"{name} has no recorded outcome")
            continue
        if len(ends) > 1:
            check.fault(f"{name} has {len(ends)} outcomes, in steps {', '.join(str(step) for step, _ in ends)}")
        check.without_span += ref not in captured
        _, call = ends[0]
        if call["ending"] == "trained":
            check.trained += 1
            check.trained_tokens += call["tokens"]
        else:
            check.excluded[str(call["reason"])] += 1


def _check_rows(where: str, entry: LedgerEntry, check: LedgerCheck) -> None:
    for row in entry.get("rows", ()):
        check.rows += 1
        number = row.get("row")
        calls = [call for call in entry.get("calls", ()) if call["row"] == number]
        expected = sum(call["tokens"] for call in calls)
        try:
            numbers = numbers_of(row)
            trained = sum(numbers["mask"])
        except (ValueError, KeyError) as error:
            check.fault(f"{where}: row {number} cannot be read: {error}")
            continue
        if calls and trained != expected:  # the calls of a step that was skipped are in no row
            check.fault(f"{where}: row {number} has {trained} trained tokens, but its calls contain {expected}")
        lengths = {name: row.get("length") if name in ("tokens", "mask") else trained for name in numbers}
        short = [name for name, values in numbers.items() if len(values) != lengths[name]]
        if short:
            check.fault(f"{where}: row {number} has a wrong number of values in: {', '.join(short)}")
