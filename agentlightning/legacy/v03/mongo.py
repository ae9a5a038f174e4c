"""The collections of v0.3 in MongoDB: `rollouts`, `attempts`, `spans`, `resources`; documents name their partition."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.legacy.v03.source import KINDS, Document, Kind

try:
    from pymongo.errors import PyMongoError
except ImportError as error:
    raise MissingExtraError("A source in MongoDB", "mongo", "pymongo") from error

from agentlightning.store.mongo.link import Place

_DATABASE = "agentlightning"
"""The default name of the database of v0.3."""
_PAGE = 500
_OTHERS = ("workers", "rollout_queue")
_MOST_NAMED = 20


class MongoSource:
    """One partition of a database, or all of them."""

    def __init__(self, uri: str, partition: str | None) -> None:
        self._place = Place(uri)
        self._client = self._place.client()
        self._database = self._client[self._place.database or _DATABASE]
        self.name = f"{self._place!r}/{self._database.name}"
        self._partition = partition
        self._partition_filter: dict[str, Any] | None = None

    async def check(self) -> None:
        await self._filter()

    async def documents(self, kind: Kind) -> AsyncIterator[Document]:
        query = await self._filter()
        cursor = self._database[kind].find(query, batch_size=_PAGE).sort("_id", 1)
        while page := await self._ask(lambda: list(itertools.islice(cursor, _PAGE))):
            for document in page:
                yield document

    async def left_behind(self) -> Mapping[str, int]:
        query = await self._filter()
        return {name: await self._ask(lambda at=name: self._database[at].count_documents(query)) for name in _OTHERS}

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def _filter(self) -> dict[str, Any]:
        """Return the filter of the partitions to read.

        Raises:
            BadRequestError: no partition has this name, or one must be selected; the message lists them.
        """
        if self._partition_filter is None:
            partitions = await self._ask(self._partitions)
            if not partitions:
                raise BadRequestError(
                    f"{self.name} holds no collections of v0.3 ({', '.join(KINDS)}). Put the name of the database into "
                    "the URI: mongodb://host/database"
                )
            names = ", ".join(f"{name} (rollouts: {count})" for name, count in list(partitions.items())[:_MOST_NAMED])
            if self._partition is None and len(partitions) > 1:
                raise BadRequestError(
                    f"{self.name} holds {len(partitions)} partitions, each a separate store: {names}. "
                    "Select one with --partition NAME, or all of them with --partition all"
                )
            if self._partition not in (None, "all", *partitions):
                raise BadRequestError(f"{self.name} has no partition {self._partition!r}; it has: {names}")
            self._partition_filter = {} if self._partition in (None, "all") else {"partition_id": self._partition}
        return self._partition_filter

    def _partitions(self) -> dict[str, int]:
        """Return the partitions with their numbers of rollouts, the largest first."""
        counts: dict[str, int] = {}
        for kind in KINDS:
            for name in self._database[kind].distinct("partition_id"):
                counts.setdefault(str(name), 0)
        for name in counts:
            counts[name] = self._database["rollouts"].count_documents({"partition_id": name})
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    async def _ask(self, question: Any) -> Any:
        try:
            return await asyncio.to_thread(question)
        except PyMongoError as error:
            raise self._place.failed(error) from None
