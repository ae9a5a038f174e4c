"""A place with data of v0.3 by the text that names it, and the four kinds of documents that are read from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from agentlightning.errors import BadRequestError

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


def open_source(place: str, partition: str | None = None) -> Source:
    """Return the source that a text names: a MongoDB URI, the address of a server, a file or a folder.

    `partition` names one of several stores in a database of MongoDB; `all` takes all of them.

    Raises:
        BadRequestError: it names none of these, or a partition of what has none.
        MissingExtraError: the driver of MongoDB is not installed.
    """
    if place.startswith(("mongodb://", "mongodb+srv://")):
        from agentlightning.v03.mongo import MongoSource

        return MongoSource(place, partition)
    if partition is not None:
        raise BadRequestError(f"--partition {partition!r}: only a database of MongoDB has partitions; leave it out")
    if place.startswith(("http://", "https://")):
        from agentlightning.v03.server import ServerSource

        return ServerSource(place)
    if Path(place).exists():
        from agentlightning.v03.dump import DumpSource

        return DumpSource(Path(place))
    raise BadRequestError(
        f"{place!r} is no source; expected mongodb://host/database, the address of a server of v0.3 "
        "(http://127.0.0.1:4747), or a file or folder of JSON, which is not there"
    )
