"""The ledger records of a run: the ending of each model call of each rollout, and the numbers that its loss used.

One record for each rollout and step; its name is the rollout's id. Calls that ended after their step had closed are in
a record of the step in which they were seen (`late`). Needs neither torch nor numpy: numbers come in as sequences.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, cast

from agentlightning.adapter.calls.calls import CallRef, ModelCall, model_calls
from agentlightning.adapter.rows.samples import Sample
from agentlightning.field_help import explain_fields
from agentlightning.store.base import LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.training.ledger import Ending, Ledger, RolloutRecord, Trained
from agentlightning.types import Rollout

Dtype = Literal["f32", "i32", "u8"]

_CODES: dict[str, str] = {"f32": "f", "i32": "i", "u8": "B"}
"""Type codes of `array`; an `i` has four bytes wherever Python 3.11 runs."""
_PLAIN = ("row", "vocabulary", "length", "policy")
_DTYPES: dict[str, Dtype] = {"tokens": "i32", "mask": "u8", "clipped": "u8"}
"""Of the packed fields that are not f32."""
_PAGE = 100
_NAMED_AT_MOST = 20


class Packed(TypedDict):
    """A list of numbers as JSON holds it exactly, in a third of the bytes of decimal digits."""

    dtype: Dtype
    """`f32`: IEEE 754 single precision. `i32`: signed. `u8`: unsigned, of masks and decisions."""
    data: str
    """The numbers one after another, little-endian, in base64: `numpy.frombuffer(base64.b64decode(data), "<f4")`."""


class LedgerCall(TypedDict):
    """The ending of one model call: the `reason` of an exclusion, or the figures of a trained call."""

    call_id: str
    attempt_id: str
    ending: str  # `trained` or `excluded`
    reason: str | None  # out of the closed list
    row: int | None  # index of its row in the step's batch
    tokens: int  # how many of its tokens are trained
    advantage: float | None  # that of its rollout
    weight_version: int | None  # the weights that served it; None where nobody recorded them
    constrained_by: list[str]  # settings under which its tokens were drawn from another distribution than the learner's


class LedgerRow(TypedDict, total=False):
    """One token row of a rollout, with the numbers of the loss. T tokens, of which N are trained.

    `tokens`, `mask`: (T,), all others (N,) in the order of the trained tokens.
    """

    row: int  # index in the step's batch
    vocabulary: str | None  # id of the table with the text of each token id
    policy: str  # the policy that learns from it, where the run has several
    length: int  # T
    tokens: Packed  # token ids
    mask: Packed  # 1 on the tokens that are trained
    engine_logprobs: Packed  # the engine's natural log-probability of each token when it was sampled
    trainer_logprobs: Packed  # the learner's, before the first optimizer step
    entropy: Packed  # of the learner's distribution there, in nats
    ratio: Packed  # of the learner's probability to what it is compared with (by default the engine's), unbounded
    clipped: Packed  # the bound of the ratio that counts: 0 none, 1 the lower, 2 the upper, 3 `delta`
    weight: Packed  # of the token in the sum that is the loss
    correction: Packed  # for what engine and learner differ in; 1 without `importance_sampling_correction`
    kl: Packed  # divergence from the reference, before `beta`; 0 without
    advantage: Packed  # by which the token counts
    value: Packed  # of the state before the token by the critic, before the step; where there is one
    returns: Packed  # the target of that value; where there is a critic


class LedgerEntry(TypedDict, total=False):
    """The data of a record: what became of one rollout in one step."""

    rollout_id: str
    attempt_id: str | None  # the latest attempt
    reward: float | None
    outcome: str | None
    verdict: str | None  # why nothing of the rollout is trained; None if its calls may be
    group: int | None  # number of its task within the step
    advantage: float | None  # of the rollout, if it is trained
    weight_versions: list[int]  # the weights that served its calls, each once
    calls: list[LedgerCall]
    rows: list[LedgerRow]  # where per-token figures are recorded: see the setting `record_tokens`
    late: bool  # calls that ended after the step of their rollout had closed


# --- entries ---------------------------------------------------------------------------------------------------------


def entries_of(
    ledger: Ledger,
    records: Sequence[RolloutRecord],
    groups: Sequence[int] | None = None,
    rows: Mapping[str, list[LedgerRow]] | None = None,
) -> list[LedgerEntry]:
    """Return an entry for each rollout of a step that has closed, and for each earlier one that has late calls.

    Shapes: records: (R,) and groups: (R,) the group of each; rows: by rollout.
    """
    by_rollout: dict[str, list[LedgerCall]] = {}
    endings = ledger.endings()
    for call in ledger.calls():
        calls = by_rollout.setdefault(call.ref.rollout_id, [])
        if (ending := endings.get(call.ref)) is not None:
            calls.append(_call_of(call, ending))
    entries: list[LedgerEntry] = []
    for place, record in enumerate(records):
        calls = by_rollout.pop(record.rollout_id, [])
        entry: LedgerEntry = {
            "rollout_id": record.rollout_id,
            "attempt_id": record.attempt_id,
            "reward": record.reward,
            "outcome": record.outcome,
            "verdict": record.verdict,
            "group": None if groups is None else groups[place],
            "advantage": next((call["advantage"] for call in calls if call["advantage"] is not None), None),
            "weight_versions": sorted({call["weight_version"] for call in calls if call["weight_version"] is not None}),
            "calls": calls,
        }
        if rows and (own := rows.get(record.rollout_id)):
            entry["rows"] = own
        entries.append(entry)
    for rollout_id, calls in by_rollout.items():
        entries.append({"rollout_id": rollout_id, "attempt_id": calls[-1]["attempt_id"], "calls": calls, "late": True})
    return entries


def _call_of(call: ModelCall, ending: Ending) -> LedgerCall:
    trained = ending if isinstance(ending, Trained) else None
    return {
        "call_id": call.ref.call_id,
        "attempt_id": call.ref.attempt_id,
        "ending": "excluded" if trained is None else "trained",
        "reason": None if isinstance(ending, Trained) else ending,
        "row": None if trained is None else trained.row,
        "tokens": 0 if trained is None else trained.tokens,
        "advantage": None if trained is None else trained.advantage,
        "weight_version": call.weight_version,
        "constrained_by": [] if trained is None else list(trained.constrained_by),
    }


# --- token rows ------------------------------------------------------------------------------------------------------


def row_of(sample: Sample, *, row: int, vocabulary: str | None, **figures: Sequence[float]) -> LedgerRow:
    """Return a token row as records hold it. Each figure has a number for each of the N trained tokens.

    Raises:
        ValueError: a figure has another length.
    """
    trained = sum(sample.mask)
    if wrong := [f"{name} ({len(values)})" for name, values in figures.items() if len(values) != trained]:
        raise ValueError(f"row {row} trains {trained} tokens; other lengths have: {', '.join(wrong)}")
    numbers: dict[str, Sequence[float]] = {"tokens": sample.token_ids, "mask": sample.mask, **figures}
    packed = {name: pack(values, _DTYPES.get(name, "f32")) for name, values in numbers.items()}
    policy = {} if sample.policy is None else {"policy": sample.policy}
    return cast(LedgerRow, {"row": row, "vocabulary": vocabulary, "length": len(sample.token_ids), **policy, **packed})


def numbers_of(row: LedgerRow) -> dict[str, array[Any]]:
    """Return the numbers of a recorded row by name, each as it was.

    Raises:
        ValueError: a field is no packed list.
    """
    return {name: unpack(value) for name, value in row.items() if name not in _PLAIN}


def pack(values: Sequence[float] | array[Any], dtype: Dtype) -> Packed:
    """Return the values, a list or a numpy array, in their packed form. `f32` rounds to it; NaN and infinity stay.

    Raises:
        OverflowError: a whole number does not fit the type.
    """
    sequence = cast("Any", values)
    numbers = array(_CODES[dtype], sequence.tolist() if hasattr(sequence, "tolist") else sequence)
    if sys.byteorder == "big":
        numbers.byteswap()
    return {"dtype": dtype, "data": base64.b64encode(numbers.tobytes()).decode()}


def unpack(packed: object) -> array[Any]:
    """Return the numbers of a packed list: an `array`, which is a buffer too.

    Raises:
        ValueError: it is none; says what is wrong with it.
    """
    if not isinstance(packed, dict):
        raise ValueError(f"packed numbers are {{'dtype': ..., 'data': ...}}; got {type(packed).__name__}")
    dtype, data = packed.get("dtype"), packed.get("data")
    if dtype not in _CODES or not isinstance(data, str):
        raise ValueError(f"dtype must be one of {', '.join(_CODES)} and data a text; got {dtype!r}, {type(data)}")
    numbers: array[Any] = array(_CODES[dtype])
    try:
        numbers.frombytes(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"data is not base64 of {dtype} numbers: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# --- the text of token ids -------------------------------------------------------------------------------------------


def vocabulary_of(tokenizer: Any) -> list[str]:
    """Return the text of each token id of a transformers tokenizer; `""` for an id without a token.

    Bytes of byte-level and of sentencepiece tokenizers become the characters that they are; a part of a character,
    which is no UTF-8, is shown as `\\xe2`.
    """
    pieces: Sequence[str | None] = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    readable = _byte_level if "ByteLevel" in decoder else _sentencepiece
    return ["" if piece is None else piece if index in added else readable(piece) for index, piece in enumerate(pieces)]


def vocabulary_id(tokens: Sequence[str]) -> str:
    """Return the id of a table of texts: the SHA-256 of its JSON."""
    return hashlib.sha256(json.dumps(list(tokens), separators=(",", ":")).encode()).hexdigest()


def _sentencepiece(piece: str) -> str:
    if (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)) is not None:
        return bytes.fromhex(byte[1]).decode("utf-8", "backslashreplace")
    return piece.replace("\u2581", " ")


def _byte_level(piece: str) -> str:
    if not all(character in _BYTES for character in piece):  # a token that was added as text
        return piece
    return bytes(_BYTES[character] for character in piece).decode("utf-8", "backslashreplace")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte of each character of a byte-level piece (GPT-2, `bytes_to_unicode`): printable bytes stand for themselves,
the others follow from U+0100 on."""


# --- the check of a recorded ledger ----------------------------------------------------------------------------------


@explain_fields
@dataclass
class LedgerCheck:
    """The result of a check of a run's ledger."""

    captured: int = 0
    """Model calls that the spans of the training rollouts show."""
    trained: int = 0
    """Those of them that are part of an update."""
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
    """The first twenty faults in words."""
    wrong_count: int = 0
    """The number of all faults."""

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

    Reads the records and the spans alone, a rollout at a time, so that the size of the run does not matter. A run that
    goes on has calls whose step has not closed: check it when it has ended.
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
            check.fault(f"{name} has no recorded ending")
            continue
        if len(ends) > 1:
            check.fault(f"{name} has {len(ends)} endings, in steps {', '.join(str(step) for step, _ in ends)}")
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
            check.fault(f"{where}: row {number} trains {trained} tokens, its calls have {expected}")
        lengths = {name: row.get("length") if name in ("tokens", "mask") else trained for name in numbers}
        short = [name for name, values in numbers.items() if len(values) != lengths[name]]
        if short:
            check.fault(f"{where}: row {number} has another length in: {', '.join(short)}")
