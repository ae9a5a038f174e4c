"""The records of a training run in its store: each step, the ledger of its calls, evaluations, alarms."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.rows.samples import Sample
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.training.ledger import CallEnding, Ledger, RolloutRecord, Trained
from agentlightning.training.ledger_records import DTYPES, LedgerCall, LedgerEntry, LedgerRow, pack
from agentlightning.training.progress import StepFigures
from agentlightning.training.records import RunLog
from agentlightning.training.result import Evaluation
from agentlightning.training.rows import StepRows
from agentlightning.training.settings import RecordTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentlightning.training.learner.figures import RowFigures
    from agentlightning.training.updater import Updater

logger = logging.getLogger(__name__)

SAMPLED_TOKENS = 65_536
"""Number of tokens with recorded values per step, with `record_tokens="sample"`: complete rollouts."""
ROW_TOKENS = 200_000
"""Maximum number of tokens of a rollout whose values fit into one record."""


class RunRecorder:
    """Writes the records of one run. Belongs to the loop."""

    def __init__(
        self, log: RunLog, updater: Updater, record_tokens: RecordTokens = "auto", *, has_held_out: bool = False
    ) -> None:
        self.log = log
        self._learners = updater.learners
        small = all(each.policy.is_small for each in self._learners)
        self._tokens = record_tokens if record_tokens != "auto" else "all" if small else "sample"
        self._vocabularies: dict[str | None, str] = {}
        self._has_held_out = has_held_out

    async def step(self, figures: StepFigures) -> None:
        """Record the metrics of a step; without held-out tasks, the mean reward decides the run's best result."""
        await self.log.step(figures.step, dataclasses.asdict(figures))
        if figures.mean_reward is not None and not self._has_held_out:
            await self.log.best("mean_reward", figures.mean_reward, figures.step)

    async def ledger(self, ledger: Ledger, rows: StepRows | None = None, seen: Sequence[RowFigures] = ()) -> None:
        """Record the outcomes of the calls of a closed step; `seen`: (B,) the values of each row in the loss."""
        if not self.log.keeps_records:
            return
        rows_by_rollout = {} if rows is None or not seen else await self._rows(rows, seen)
        records = [] if rows is None else rows.records
        groups = None if rows is None else rows.groups
        entries = entries_of(ledger, records, groups, rows_by_rollout)
        if entries:
            await self.log.ledger(ledger.step, entries)

    async def evaluation(self, step: int, evaluation: Evaluation, tasks: Sequence[object]) -> None:
        """Record an evaluation after a step, task by task, with digests of the tasks for comparisons of runs."""
        data = {
            "sampling": evaluation.sampling,
            "weight_version": evaluation.step,
            "failed": evaluation.failed,
            "rewards": evaluation.rewards,
            "rollout_ids": evaluation.rollout_ids,
            "tasks": tasks_of(tasks),
            "seconds": evaluation.seconds,
        }
        if evaluation.solved is not None:
            data["solved"] = sum(evaluation.solved)
        counts = evaluation.sampling == "sampled"
        name = f"held_out_{evaluation.sampling}"
        await self.log.evaluation(step, name, data, value=evaluation.mean_reward, counts_for_best=counts)

    def alarm(self, step: int, name: str, text: str, **data: object) -> None:
        """Record a warning, see `RunLog.alarm`; it is stored before the run ends."""
        self.log.alarm(step, name, text, **data)

    async def _rows(self, rows: StepRows, figures: Sequence[RowFigures]) -> dict[str, list[LedgerRow]]:
        """Return the rows to record with tokens, by rollout."""
        selected = self._selected(rows)
        if not selected:
            return {}
        if not self._vocabularies:
            for learner in self._learners:
                tokens = vocabulary_of(learner.policy.tokenizer)
                self._vocabularies[learner.name] = vocabulary_id(tokens)
                await self.log.vocabulary(self._vocabularies[learner.name], tokens)
        rows_by_rollout: dict[str, list[LedgerRow]] = {}
        for number, (sample, one) in enumerate(zip(rows.samples, figures, strict=True)):
            if sample.rollout_id in selected:
                vocabulary = next(self._vocabularies[each.name] for each in self._learners if each.takes(sample))
                row = row_of(sample, row=number, vocabulary=vocabulary, **one)
                rows_by_rollout.setdefault(sample.rollout_id, []).append(row)
        return rows_by_rollout

    def _selected(self, rows: StepRows) -> frozenset[str]:
        """Return the ids of the rollouts to record with tokens."""
        lengths: dict[str, int] = {}
        for sample in rows.samples:
            lengths[sample.rollout_id] = lengths.get(sample.rollout_id, 0) + len(sample.token_ids)
        fitting = [rollout_id for rollout_id, length in lengths.items() if length <= ROW_TOKENS]
        if len(fitting) < len(lengths) and self._tokens == "all":
            logger.info("%d rollouts have too many tokens to be recorded", len(lengths) - len(fitting))
        if self._tokens != "sample":
            return frozenset(fitting if self._tokens == "all" else ())
        remaining, selected = SAMPLED_TOKENS, set[str]()
        stride = max(1, sum(lengths.values()) // SAMPLED_TOKENS)
        for rollout_id in fitting[::stride]:
            if lengths[rollout_id] <= remaining:
                selected.add(rollout_id)
                remaining -= lengths[rollout_id]
        return frozenset(selected)


# --- the records of a ledger -----------------------------------------------------------------------------------------


def entries_of(
    ledger: Ledger,
    records: Sequence[RolloutRecord],
    groups: Sequence[int] | None = None,
    rows: Mapping[str, list[LedgerRow]] | None = None,
) -> list[LedgerEntry]:
    """Return an entry for each rollout of a closed step, and for each earlier rollout that has late calls.

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


def _call_of(call: ModelCall, ending: CallEnding) -> LedgerCall:
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


def row_of(sample: Sample, *, row: int, vocabulary: str | None, **figures: Sequence[float] | NDArray[Any]) -> LedgerRow:
    """Return a token row in the format of records. Each list has a value for each of the N trained tokens.

    Raises:
        ValueError: a list has another length.
    """
    trained = sum(sample.mask)
    if wrong := [f"{name} ({len(values)})" for name, values in figures.items() if len(values) != trained]:
        raise ValueError(
            f"row {row} has {trained} trained tokens, but these lists do not have that length: {', '.join(wrong)}"
        )
    numbers: dict[str, Any] = {"tokens": sample.token_ids, "mask": sample.mask, **figures}
    packed = {name: pack(values, DTYPES.get(name, "f32")) for name, values in numbers.items()}
    policy = {} if sample.policy is None else {"policy": sample.policy}
    return cast(LedgerRow, {"row": row, "vocabulary": vocabulary, "length": len(sample.token_ids), **policy, **packed})


# --- the text of token ids -------------------------------------------------------------------------------------------


def vocabulary_of(tokenizer: Any) -> list[str]:
    """Return the text of each token id of a transformers tokenizer; `""` for an id without a token.

    Bytes of byte-level and of sentencepiece tokenizers are decoded to characters; a part of a character, which is not
    valid UTF-8, is shown as `\\xe2`.
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
    if not all(character in _BYTES for character in piece):  # an added token, which is text
        return piece
    return bytes(_BYTES[character] for character in piece).decode("utf-8", "backslashreplace")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte of each character of a byte-level piece (GPT-2, `bytes_to_unicode`): printable bytes are unchanged, the
others are mapped to U+0100 and above."""
