"""A place with data of v0.3, and the four kinds of documents that are read from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol, get_args

Kind = Literal["resources", "rollouts", "attempts", "spans"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which they are imported: each belongs to one before."""
Document = dict[str, Any]
"""One document as the older system wrote it, out of JSON or BSON."""


class Source(Protocol):
    """A place with data of v0.3. Nothing in it is changed.

    Raises (all but `close`):
        BadRequestError: the place does not hold what v0.3 wrote, or it is not clear which part is meant.
        StoreUnreachableError: the place does not answer.
    """

    name: str
    """For people to read, without a password."""

    async def check(self) -> None:
        """Check that the place is there and holds data of v0.3."""
        ...

    def documents(self, kind: Kind) -> AsyncIterator[Document]:
        """Yield the documents of a kind, in the order in which they were made. Kinds are asked for as in `KINDS`."""
        ...

    async def left_behind(self) -> Mapping[str, int]:
        """Return what else is there, by name, and how much of it: it belongs to no history and is not read."""
        ...

    async def close(self) -> None: ...
