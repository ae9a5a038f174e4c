"""The collections of v0.3 in MongoDB: `rollouts`, `attempts`, `spans`, `resources`; documents name their partition."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.v03.source import KINDS, Document, Kind

try:
    from pymongo.errors import PyMongoError
except ImportError as error:
    raise MissingExtraError("A source in MongoDB", "mongo", "pymongo") from error

from agentlightning.store.mongo.link import Place

_DATABASE = "agentlightning"
"""What v0.3 called its database where nothing else was said."""
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
        self._chosen: dict[str, Any] | None = None

    async def check(self) -> None:
        await self._choose()

    async def documents(self, kind: Kind) -> AsyncIterator[Document]:
        chosen = await self._choose()
        cursor = self._database[kind].find(chosen, batch_size=_PAGE).sort("_id", 1)
        while page := await self._ask(lambda: list(itertools.islice(cursor, _PAGE))):
            for document in page:
                yield document

    async def left_behind(self) -> Mapping[str, int]:
        chosen = await self._choose()
        return {name: await self._ask(lambda at=name: self._database[at].count_documents(chosen)) for name in _OTHERS}

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def _choose(self) -> dict[str, Any]:
        """Return the filter of the partitions that are read.

        Raises:
            BadRequestError: there is none of this name, or there are several and none was named; lists them.
        """
        if self._chosen is None:
            there = await self._ask(self._partitions)
            if not there:
                raise BadRequestError(
                    f"{self.name} holds no collections of v0.3 ({', '.join(KINDS)}); name the database in the URI, "
                    "mongodb://host/database"
                )
            listed = ", ".join(f"{name} ({count} rollouts)" for name, count in list(there.items())[:_MOST_NAMED])
            if self._partition is None and len(there) > 1:
                raise BadRequestError(
                    f"{self.name} holds {len(there)} partitions, each the store of its own: {listed}. "
                    "Choose one with --partition NAME, or take them all with --partition all"
                )
            if self._partition not in (None, "all", *there):
                raise BadRequestError(f"{self.name} has no partition {self._partition!r}; it has: {listed}")
            self._chosen = {} if self._partition in (None, "all") else {"partition_id": self._partition}
        return self._chosen

    def _partitions(self) -> dict[str, int]:
        """Return the partitions, and how many rollouts each has; the greatest first."""
        counted: dict[str, int] = {}
        for kind in KINDS:
            for name in self._database[kind].distinct("partition_id"):
                counted.setdefault(str(name), 0)
        for name in counted:
            counted[name] = self._database["rollouts"].count_documents({"partition_id": name})
        return dict(sorted(counted.items(), key=lambda pair: -pair[1]))

    async def _ask(self, question: Any) -> Any:
        try:
            return await asyncio.to_thread(question)
        except PyMongoError as error:
            raise self._place.failed(error) from None
