"""Writes the documents of a source into a store, and counts each as new, present, or not carried over.

A repeated import starts from the beginning and skips data that is already present.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from agentlightning.errors import TooLargeError
from agentlightning.legacy.v03.convert import Converter, NotCarriedOver
from agentlightning.legacy.v03.source import KINDS, Document, Kind, Source

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import HistoryImport

_BATCH = 1000
_BATCH_BYTES = 4 * 2**20
"""Size of a batch in bytes of JSON; a server accepts 32 MiB per request."""
_MOST_EXAMPLES = 3
_NAMES: dict[str, Kind] = {"resources": "resources", "rollout": "rollouts", "attempt": "attempts", "span": "spans"}


@dataclass
class Tally:
    """Counts of the documents of one kind; `read` is the sum of the others."""

    read: int = 0
    new: int = 0
    present: int = 0
    """Number of documents from an earlier import."""
    left: int = 0
    """Number of documents that were not carried over."""


@dataclass
class Missed:
    """Pieces that were not carried over for one reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list[str])
    """Ids of the first pieces."""
    message: str = ""
    """The problem of the first piece, and the way to solve it."""


@dataclass
class Report:
    """The result of an import."""

    source: str
    tallies: dict[Kind, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    missed: dict[tuple[Kind, str], Missed] = field(default_factory=dict[tuple[Kind, str], Missed])
    """Pieces that were not carried over, by kind and reason."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fields without an equivalent, with the number of documents that have them."""
    changed: Counter[str] = field(default_factory=Counter[str])
    """Changes, with the number of documents that have them."""
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of documents of the source that are not part of a history, by kind."""

    @property
    def is_whole(self) -> bool:
        """True if all data was imported, except rollouts that had not ended and the data that belongs to them."""
        expected = {"not_ended", "no_rollout"} if ("rollouts", "not_ended") in self.missed else set[str]()
        return all(reason in expected for _, reason in self.missed)

    def miss(self, kind: Kind, piece: str, reason: str, message: str) -> None:
        """Count a piece that is not carried over."""
        self.tallies[kind].left += 1
        missed = self.missed.setdefault((kind, reason), Missed(message=message))
        missed.count += 1
        if len(missed.examples) < _MOST_EXAMPLES:
            missed.examples.append(piece)


class _Piece(NamedTuple):
    """A value with the name and the change of its document."""

    name: str
    value: BaseModel
    change: str


class Importing:
    """An import. `report` has the current counts at any time."""

    def __init__(self, source: Source, converter: Converter, tell: Callable[[Report], None] | None = None) -> None:
        """`tell` is called after each batch."""
        self.source = source
        self.report = Report(source.name, dropped=converter.dropped)
        self._converter = converter
        self._tell: Callable[[Report], None] = tell or (lambda report: None)
        self.has_begun = False
        """True as soon as data may have been written."""
        self._store: LightningStore | None = None
        self._early: list[_Piece] = []

    async def run(self, store: LightningStore | None) -> Report:
        """Read all data, write it into a store, and return the report; without a store nothing is written.

        Raises:
            BadRequestError: the source does not hold data of v0.3.
            StoreUnreachableError: the source or the store does not respond. Retry later: the imported data is kept.
        """
        self._store, self.has_begun = store, True
        for kind in KINDS:
            batch: list[_Piece] = []
            size = 0
            async for document in self.source.documents(kind):
                self.report.tallies[kind].read += 1
                name = _name(kind, document)
                try:
                    value, bytes_of_value, change = self._converter.convert(kind, document)
                except NotCarriedOver as failure:
                    self.report.miss(kind, name, failure.reason, str(failure))
                    continue
                batch.append(_Piece(name, value, change))
                size += bytes_of_value
                if len(batch) >= _BATCH or size >= _BATCH_BYTES:
                    await self._write(kind, batch)
                    batch, size = [], 0
            await self._write(kind, batch)
            await self._write_early(kind)
        self.report.others = {name: count for name, count in (await self.source.left_behind()).items() if count}
        return self.report

    async def _write(self, kind: Kind, batch: Sequence[_Piece]) -> None:
        """Write a batch; if all of it is rejected, skip the piece that causes this."""
        if not batch:
            return
        if self._store is None:
            self.report.tallies[kind].new += len(batch)
            self.report.changed.update(piece.change for piece in batch if piece.change)
            self._tell(self.report)
            return
        values: dict[str, Any] = {kind: [piece.value for piece in batch]}
        try:
            result = await self._store.import_history(**values)
        except (TypeError, ValueError, TooLargeError) as error:  # BadRequestError, too
            if len(batch) == 1:
                self.report.miss(kind, batch[0].name, "refused", str(error))
                return
            middle = len(batch) // 2
            await self._write(kind, batch[:middle])
            await self._write(kind, batch[middle:])
            return
        self._count(kind, batch, result)
        self._tell(self.report)

    def _count(self, kind: Kind, batch: Sequence[_Piece], result: HistoryImport) -> None:
        tally = self.report.tallies[kind]
        tally.new += getattr(result, kind)
        tally.present += result.present
        early = {each.id for each in result.refused if each.reason == "wrong_number"}
        if early:  # its predecessor follows it in the source
            self._early += [piece for piece in batch if getattr(piece.value, "attempt_id", "") in early]
        refused_ids = {each.id for each in result.refused}
        self.report.changed.update(piece.change for piece in batch if piece.change and piece.name not in refused_ids)
        for refusal in result.refused:
            if refusal.reason != "wrong_number":
                self.report.miss(_NAMES[refusal.kind], refusal.id, refusal.reason, refusal.message)

    async def _write_early(self, kind: Kind) -> None:
        """Retry the attempts that were read before their predecessors, as long as some are imported."""
        while kind == "attempts" and self._early:
            pending, self._early = self._early, []
            pending.sort(key=lambda each: getattr(each.value, "sequence_id", 0))
            for start in range(0, len(pending), _BATCH):
                await self._write(kind, pending[start : start + _BATCH])
            if len(self._early) == len(pending):
                for piece in self._early:
                    self.report.miss(kind, piece.name, "wrong_number", "an earlier attempt of its rollout is missing")
                self._early = []


def _name(kind: Kind, document: Document) -> str:
    """Return the readable name of a document, in the form of `HistoryRefusal`."""
    keys = {
        "resources": ("resources_id", "version"),
        "rollouts": ("rollout_id",),
        "attempts": ("attempt_id",),
        "spans": ("rollout_id", "attempt_id", "span_id"),
    }[kind]
    return "/".join(str(document.get(key, "?"))[:80] for key in keys)
