"""Workers and resources as events, and what a client hears that lags."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http.list_watch import ListWatch
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, EnqueueRolloutRequest
from tests.store.http.test_event_stream import Stream, follow


@pytest.fixture
async def server() -> AsyncIterator[LightningStoreServer]:
    started = LightningStoreServer(InMemoryLightningStore(), port=0)
    await started.start()
    yield started
    await started.stop()


async def told_of(stream: Stream, kind: str, **wanted: Any) -> dict[str, Any]:
    """Return the first event of a kind whose data have these values."""
    while True:
        found, data = await stream.next()
        if found == kind and all(data[name] == value for name, value in wanted.items()):
            return data


async def test_a_worker_is_told_when_it_claims_and_when_it_is_free(server: LightningStoreServer) -> None:
    await server.enqueue_rollout("x")
    async with follow(server) as stream:
        claimed = await server.dequeue_rollout("w-1")
        assert claimed is not None
        busy = await told_of(stream, "worker", worker_id="w-1", status="busy")
        assert busy["current_rollout_id"] == claimed.rollout_id
        await server.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        assert (await told_of(stream, "worker", worker_id="w-1", status="idle"))["current_rollout_id"] is None


async def test_each_version_of_resources_is_told_without_what_is_in_it(server: LightningStoreServer) -> None:
    async with follow(server) as stream:
        llm = LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="sk-not-to-be-told")
        published = await server.add_resources({"main_llm": llm})
        first = await told_of(stream, "resources", resources_id=published.resources_id)
        assert first == {"resources_id": published.resources_id, "version": 1, "run_id": None}
        await server.update_resources(published.resources_id, {"main_llm": llm})
        await told_of(stream, "resources", resources_id=published.resources_id, version=2)


async def test_who_begins_to_follow_hears_where_each_stands(server: LightningStoreServer) -> None:
    published = await server.add_resources({})
    await server.update_worker("w-1")
    async with follow(server) as first, follow(server) as second:
        for stream in (first, second):
            await told_of(stream, "worker", worker_id="w-1")
    async with follow(server, **{"Last-Event-ID": first.last_id}) as back:
        await told_of(back, "resources", resources_id=published.resources_id)


async def test_who_follows_one_run_hears_of_no_other(server: LightningStoreServer) -> None:
    await server.add_resources({}, run_id="other")
    mine = await server.add_resources({}, run_id="mine")
    async with follow(server, "?run_id=mine") as stream:
        while (told := await stream.next())[0] != "resources":
            pass
        assert told[1]["resources_id"] == mine.resources_id


async def test_a_client_with_much_to_hear_is_told_that_it_lags_and_hears_all(server: LightningStoreServer) -> None:
    async with follow(server, "?after=0") as stream:
        requests = [EnqueueRolloutRequest(input=number) for number in range(2500)]
        made = await server.enqueue_many_rollouts(requests)
        heard: list[str] = []
        lags: list[int] = []
        while len(heard) < 2500:
            kind, data = await stream.next()
            if kind == "lag":
                lags.append(data["behind"])
            elif kind == "rollout":
                heard.append(data["rollout_id"])
        assert heard == [rollout.rollout_id for rollout in made]
        assert lags == [1000]


async def test_nobody_looks_while_nobody_follows() -> None:
    looks = 0

    class Counted(InMemoryLightningStore):
        async def query_workers(self, **filters: Any) -> Any:
            nonlocal looks
            looks += 1
            return await super().query_workers(**filters)

    store = Counted()
    watch = ListWatch(lambda: store, look_seconds=0.01)
    assert looks == 0
    async with watch.follow():
        while looks < 3:  # noqa: ASYNC110 -- nobody tells of a look
            await asyncio.sleep(0.01)
    seen = looks
    await asyncio.sleep(0.1)
    assert looks == seen


async def test_a_store_that_fails_for_a_while_is_looked_at_again_and_one_without_lists_is_left() -> None:
    class Failing(InMemoryLightningStore):
        error: Exception | None = ConnectionError("away")

        async def query_workers(self, **filters: Any) -> Any:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return await super().query_workers(**filters)

    store = Failing()
    await store.update_worker("w-1")
    async with ListWatch(lambda: store, look_seconds=0.01).follow() as queue:
        assert (await asyncio.wait_for(queue.get(), 10))[1]["worker_id"] == "w-1"

    class Bare(LightningStore):
        @property
        def capabilities(self) -> LightningStoreCapabilities:
            return LightningStoreCapabilities()

    async with ListWatch(Bare, look_seconds=0.01).follow() as queue:
        await asyncio.sleep(0.05)
        assert queue.empty()
