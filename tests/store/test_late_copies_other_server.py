"""The copy of a request arrives at another server than the first one, or at the same one after a restart, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.store.conformance.late_copies import STORIES, Story, check_late_copy, world

Open = Callable[[], Awaitable["Served"]]


class Served:
    """A server over the data of a test, with a client."""

    def __init__(self, engine: LightningStore) -> None:
        self.engine = engine
        self.server = LightningStoreServer(engine, port=0)

    async def start(self) -> Served:
        await self.server.start()
        self.client = LightningStoreClient(self.server.endpoint, deadline=5.0)
        return self

    async def stop(self) -> None:
        await self.client.close()
        await self.server.stop()
        await self.engine.close()


@pytest.fixture(params=["sqlite", "postgres", "mongo"])
async def serve(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Starts one more server over the same data."""
    partition, started = uuid4().hex, list[Served]()

    def engine() -> LightningStore:
        if request.param == "sqlite":
            return SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")
        if request.param == "postgres":
            from agentlightning.store.postgres import PostgresLightningStore

            return PostgresLightningStore(request.getfixturevalue("postgres_uri"), partition=partition)
        from agentlightning.store.mongo import MongoLightningStore

        return MongoLightningStore(request.getfixturevalue("mongo_uri"), partition_id=partition)

    async def start() -> Served:
        started.append(await Served(engine()).start())
        return started[-1]

    yield start
    for served in started:
        await served.stop()


@pytest.mark.heavy
@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_at_a_second_server_changes_nothing(serve: Open, story: Story) -> None:
    first, second = await serve(), await serve()

    async def open_other() -> LightningStore:
        return second.client

    await check_late_copy(story, first.client, open_other)


@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_after_a_restart_changes_nothing(tmp_path: Path, story: Story) -> None:
    def engine() -> LightningStore:
        return SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")

    served = await Served(engine()).start()

    async def open_other() -> LightningStore:
        nonlocal served
        await served.stop()
        served = await Served(engine()).start()
        return served.client

    await check_late_copy(story, served.client, open_other)
    await served.stop()


async def test_the_short_form_of_finishing_is_done_once_over_http_too(serve: Open) -> None:
    first, second = await serve(), await serve()
    rollout = await first.client.start_rollout("x", worker_id="w")

    async def finish(served: Served, response: str) -> tuple[int, Any]:
        url = f"{served.server.endpoint}/v1/agl/rollouts/{rollout.rollout_id}/finish"
        headers = {"idempotency-key": "the token"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"response": response}, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    status, ended = await finish(first, "a")
    assert (status, ended["status"]) == (200, "succeeded")
    await first.client.start_attempt(rollout.rollout_id, worker_id="w2")
    before = await world(first.client)
    status, again = await finish(second, "a")
    assert (status, again["rollout_id"]) == (200, rollout.rollout_id)
    status, other = await finish(second, "b")
    assert (status, other["error_type"]) == (422, "TokenReusedError")
    assert "metadata" in other["detail"]
    assert await world(second.client) == before
