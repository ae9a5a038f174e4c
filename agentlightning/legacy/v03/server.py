"""A v0.3 server, read page by page. Rollouts are counted if the server has dropped their spans from memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast
from urllib.parse import quote

import aiohttp

from agentlightning.errors import BadRequestError, StoreUnreachableError
from agentlightning.legacy.v03.source import Document, Kind
from agentlightning.utils.texts import without_password

_PREFIX = "/v1/agl"
_PAGE = 200
_TRIES = 4
_TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=5.0)
_SORTED = {"rollouts": "start_time", "resources": "create_time"}


class ServerSource:
    """A running v0.3 server. Stop its runs before the import."""

    def __init__(self, address: str) -> None:
        self._root = address.rstrip("/").removesuffix(_PREFIX)
        self.name = without_password(self._root)
        self._session: aiohttp.ClientSession | None = None
        self._rollouts: list[str] = []
        self._dropped = 0

    async def check(self) -> None:
        await self._get("/rollouts", limit=1)

    async def documents(self, kind: Kind) -> AsyncIterator[Document]:
        if kind in ("resources", "rollouts"):
            async for document in self._pages(f"/{kind}", sort_by=_SORTED[kind], sort_order="asc"):
                if kind == "rollouts":
                    self._rollouts.append(str(document.get("rollout_id")))
                yield document
            return
        for rollout_id in self._rollouts:
            if kind == "attempts":
                pages = self._pages(f"/rollouts/{quote(rollout_id, safe='')}/attempts")
            else:
                pages = self._pages("/spans", rollout_id=rollout_id)
            try:
                async for document in pages:
                    yield document
            except _Refused as refusal:
                if kind == "attempts" or "evicted" not in refusal.text:
                    raise BadRequestError(f"{refusal}. See the log of that server") from None
                self._dropped += 1

    async def left_behind(self) -> Mapping[str, int]:
        workers = (await self._get("/workers", limit=1))["total"]
        return {"workers": workers, "rollouts with spans that it had dropped from memory": self._dropped}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _pages(self, path: str, **query: str) -> AsyncIterator[Document]:
        offset, total = 0, 1
        while offset < total:
            page = await self._get(path, limit=_PAGE, offset=offset, **query)
            items, total = cast("list[Document]", page["items"]), page["total"]
            if not items:
                return
            for item in items:
                yield item
            offset += len(items)

    async def _get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Return a page.

        Raises:
            BadRequestError: it is not a v0.3 server.
            StoreUnreachableError: it does not respond.
            _Refused: it responds with an error.
        """
        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(0.5 * 2**attempt)
            try:
                if self._session is None:
                    self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
                async with self._session.get(f"{self._root}{_PREFIX}{path}", params=query) as reply:
                    status, text, version = reply.status, await reply.text(), reply.headers.get("x-agl-version")
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reason = str(error) or type(error).__name__
                continue
            if version is not None:
                raise BadRequestError(
                    f"{self.name} serves a store of this version ({version}), not of v0.3. To copy it, run "
                    "agl store backup"
                )
            if status >= 500:
                if "evicted" in text:
                    raise _Refused(path, status, text)
                reason = f"status {status}: {text[:200]}"
                continue
            return self._read(path, status, text)
        raise StoreUnreachableError(f"{self.name} does not respond to {_PREFIX}{path} ({_TRIES} tries): {reason}")

    def _read(self, path: str, status: int, text: str) -> dict[str, Any]:
        try:
            page: object = json.loads(text)
        except ValueError:
            page = None
        if status == 200 and isinstance(page, dict) and {"items", "total"} <= page.keys():
            return cast("dict[str, Any]", page)
        raise BadRequestError(
            f"{self.name} is not a v0.3 server: GET {_PREFIX}{path} returned status {status}: {text[:100]!r}; "
            "expected items and total"
        )


class _Refused(Exception):
    """The server responded with an error of its store."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"GET {_PREFIX}{path} returned status {status}: {text[:200]}")
        self.text = text
