"""A source with data of v0.3, and the four kinds of documents that are read from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol, get_args

Kind = Literal["resources", "rollouts", "attempts", "spans"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds in the order of the import: a document belongs to one of an earlier kind."""
Document = dict[str, Any]
"""One document as v0.3 wrote it, from JSON or BSON."""


class Source(Protocol):
    """A source with data of v0.3, which is only read.

    Raises (all but `close`):
        BadRequestError: the source does not hold data of v0.3, or a partition must be selected.
        StoreUnreachableError: the source does not respond.
    """

    name: str
    """Readable name, without a password."""

    async def check(self) -> None:
        """Check that the source exists and holds data of v0.3."""
        ...

    def documents(self, kind: Kind) -> AsyncIterator[Document]:
        """Yield the documents of a kind, in the order of creation. Kinds are requested in the order of `KINDS`."""
        ...

    async def left_behind(self) -> Mapping[str, int]:
        """Return the number of other items by name: they are not part of a history and are not read."""
        ...

    async def close(self) -> None: ...
