"""The dashboard's data beyond the store's operations: GET requests for JSON, with the server's token if it has one.

Everything is read through the `LightningStore` interface, so any store works. Slow work runs in a thread with few
concurrent requests, so that the server can respond to the runners.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.base.field_help import Value
from agentlightning.dashboard.pages import PATHS, Pages
from agentlightning.dashboard.questions import MOST_PAIRS, QUESTIONS, described
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.store.http.mounts import Mount
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.http.redaction import hidden
from agentlightning.utils.version import VERSION

_AT_ONCE: Final = 2
"""Maximum number of responses that are computed concurrently. Other requests wait."""
_BACKENDS: Final = {"InMemory": "memory", "SQLite": "sqlite", "Postgres": "postgres", "Mongo": "mongo"}


def dashboard(store: Callable[[], LightningStore]) -> Mount:
    """Return the dashboard and its data for the server of a store, see `agentlightning/store/http/mounts.py`."""
    pages, data = Pages(), Data(store)

    def describe() -> tuple[dict[str, Any], dict[str, Any]]:
        paths, schemas = described()
        return {**PATHS, **paths}, schemas

    return Mount(routes=[*pages.routes(), *data.routes()], is_open=pages.is_open, describe=describe)


class Data:
    """The endpoints of one server."""

    def __init__(self, store: Callable[[], LightningStore]) -> None:
        self._store, self._started = store, time.time()
        self._places = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> list[Route]:
        """Return the paths of the data."""
        return [
            Route(PREFIX + each.path, self._endpoint(getattr(self, f"_{each.name}")), methods=["GET"], name=each.name)
            for each in QUESTIONS
        ]

    @staticmethod
    def _endpoint(answer: Callable[[Request], Awaitable[Value]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            value = await answer(request)
            body = await asyncio.to_thread(lambda: hidden(value).model_dump_json().encode())
            return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

        return endpoint

    async def _explain_rollout(self, request: Request) -> Value:
        from agentlightning.dashboard.explanation import explanation_of
        from agentlightning.dashboard.reading import ledger_record, rollout_evidence

        rollout_id, attempt_id = request.path_params["rollout_id"], request.query_params.get("attempt_id")
        async with self._places:
            rollout = await rollout_evidence(self._store(), rollout_id, attempt_id)
            record = await ledger_record(self._store(), rollout.rollout.run_id, rollout_id)
            run = await self._store().get_run_by_id(rollout.rollout.run_id or "")
            return await asyncio.to_thread(explanation_of, rollout, record, run and run.algorithm, attempt_id)

    async def _span_tree(self, request: Request) -> Value:
        from agentlightning.dashboard.reading import known_attempt
        from agentlightning.dashboard.tree import tree_of

        rollout_id, attempt_id = request.path_params["rollout_id"], request.path_params["attempt_id"]
        async with self._places:
            attempt_id = await known_attempt(self._store(), rollout_id, attempt_id)
            spans = list(await self._store().query_spans(rollout_id, attempt_id))
            return await asyncio.to_thread(tree_of, spans)

    async def _conversation(self, request: Request) -> Value:
        from agentlightning.dashboard.conversation import conversation_of
        from agentlightning.dashboard.reading import first_evidence, known_attempt, rollout_evidence

        rollout_id, attempt_id = request.path_params["rollout_id"], request.path_params["attempt_id"]
        limit = _whole(request, "limit", 0, MOST_PAIRS)
        async with self._places:
            attempt_id = await known_attempt(self._store(), rollout_id, attempt_id)
            if limit and (beginning := await first_evidence(self._store(), rollout_id, limit)) is not None:
                return await asyncio.to_thread(conversation_of, beginning, attempt_id, limit)
            rollout = await rollout_evidence(self._store(), rollout_id, attempt_id)
            return await asyncio.to_thread(conversation_of, rollout, attempt_id)

    async def _compare_sides(self, request: Request) -> Value:
        from agentlightning.dashboard.comparison import FORMS, compare

        before, after = request.query_params.get("before"), request.query_params.get("after")
        if not before or not after:
            raise BadRequestError(f"before= and after= are required. Expected form: {FORMS}")
        limit = _whole(request, "limit", 100, MOST_PAIRS)
        offset = _whole(request, "offset", 0, 1 << 31)
        async with self._places:
            return await compare(self._store(), before, after, limit=limit, offset=offset)

    async def _server(self, request: Request) -> Value:
        from agentlightning.dashboard.values import ServerFacts

        store = self._store()
        statistics = dict(await store.statistics())
        name = str(statistics.get("name") or type(store).__name__)
        return ServerFacts(
            version=VERSION,
            python=platform.python_version(),
            backend=next((word for start, word in _BACKENDS.items() if name.startswith(start)), name),
            persistent=bool(store.capabilities.get("persistent", store.capabilities.get("persistence"))),
            started=self._started,
            now=time.time(),
            statistics=statistics,
        )


def _whole(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else -1
    if not 0 <= value <= most:
        raise BadRequestError(f"{name} must be a whole number from 0 to {most}; got {text[:50]!r}")
    return value
