"""What is read from a place with data of v0.3: four kinds of documents, each as the older system wrote it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, Protocol, get_args

Kind = Literal["resources", "rollouts", "attempts", "spans"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What is taken over, in the order in which it is: each belongs to one before."""
Document = dict[str, Any]
"""One piece as the older system wrote it, out of JSON or BSON."""


class Source(Protocol):
    """A place with data of v0.3. Nothing in it is changed."""

    name: str
    """For people to read, without a password."""

    async def check(self) -> None:
        """Look whether the place is there and holds data of v0.3.

        Raises:
            BadRequestError: it holds none, or it is not clear which of it is meant.
            StoreUnreachableError: the place does not answer.
        """
        ...

    def documents(self, kind: Kind) -> AsyncIterator[Document]:
        """Yield the documents of a kind, in the order in which they were made. Kinds are asked for as in `KINDS`.

        Raises:
            BadRequestError: the place does not hold what v0.3 wrote; says what was expected.
            StoreUnreachableError: the place does not answer.
        """
        ...

    async def left_behind(self) -> Mapping[str, int]:
        """Return what else is there, by name, and how much of it: it belongs to no history and is not read."""
        ...

    async def close(self) -> None:
        """Release the place."""
        ...
