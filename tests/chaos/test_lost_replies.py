"""Requests and replies are lost, cut, delayed and doubled: afterwards the store is the same as without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.types import PromptTemplate, RolloutConfig
from tests.chaos.load import Actor, Fact, Producer, Publisher, Worker, problems
from tests.chaos.proxy import CHANCES, FaultyProxy
from tests.chaos.stores import Place, served
from tests.store.parts import required, span_of

CALLS = {"mongo": 1000, "postgres": 4000}
"""Number of calls, where it is not 10,000."""
SEED = int(os.environ.get("AGL_CHAOS_SEED", "4"))
LIMIT_SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
async def test_after_ten_thousand_calls_over_a_faulty_network_the_store_equals_the_model(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    print(f"AGL_CHAOS_SEED={SEED}")
    caplog.set_level(logging.CRITICAL)  # spans that arrive twice are logged, and there are many
    facts: list[Fact] = []
    count = CALLS.get(place.name, 10_000)
    async with place.opened(synchronous="NORMAL") as store, served(store) as endpoint:
        async with FaultyProxy(urlsplit(endpoint).port or 0, SEED) as proxy:
            calls = await asyncio.wait_for(make_calls(proxy.endpoint, count, facts), LIMIT_SECONDS)
            await proxy.settle()
        print(f"{calls} calls, {dict(proxy.seen)}")
        assert calls >= count
        assert set(proxy.seen) == set(CHANCES)
        assert await problems(store, facts, complete=True) == []


async def make_calls(endpoint: str, count: int, facts: list[Fact]) -> int:
    """Let actors on four clients work until enough calls were made; return how many."""
    clients = [LightningStoreClient(endpoint, deadline=60.0) for _ in range(4)]
    producers = [Producer(clients[i % 4], f"producer-{i}", SEED, facts.append) for i in range(4)]
    workers = [Worker(clients[i % 4], f"worker-{i}", SEED, facts.append) for i in range(24)]
    publishers = [Publisher(clients[i % 4], f"publisher-{i}", SEED, facts.append) for i in range(2)]
    actors: list[Actor] = [*producers, *workers, *publishers]
    over = asyncio.Event()
    working = asyncio.gather(*[actor.run(over) for actor in (*workers, *publishers)])
    producing = asyncio.gather(*[p.run(lambda: sum(a.calls for a in actors) >= count) for p in producers])
    try:
        await asyncio.wait((working, producing), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        await producing
        over.set()
        await working
    finally:
        for group in (working, producing):
            group.cancel()
        await asyncio.gather(working, producing, return_exceptions=True)
        for client in clients:
            await client.close()
    return sum(actor.calls for actor in actors)


# --- one fault at a time ----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def behind_proxy(place: Place) -> AsyncIterator[tuple[LightningStore, FaultyProxy, LightningStoreClient]]:
    """Yield a store, a proxy in front of its server, and a client of the proxy."""
    async with (
        place.opened(synchronous="NORMAL") as store,
        served(store) as endpoint,
        FaultyProxy(urlsplit(endpoint).port or 0, SEED) as proxy,
    ):
        client = LightningStoreClient(proxy.endpoint, deadline=30.0)
        try:
            yield store, proxy, client
        finally:
            await client.close()


async def test_a_copy_of_a_claim_takes_nothing_once_the_claim_was_answered(place: Place) -> None:
    async with behind_proxy(place) as (store, proxy, _), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{proxy._port}/v1/agl/queues/rollouts/dequeue"

        async def ask() -> Any:
            headers = {"idempotency-key": "one call"}
            async with session.post(url, json={"worker_id": "w", "timeout": 0.5}, headers=headers) as answer:
                return await answer.json()

        first = asyncio.create_task(ask())
        await asyncio.sleep(0.25)
        copy = asyncio.create_task(ask())
        assert await first == []
        rollout = await store.enqueue_rollout("x")
        assert await copy == []
        assert required(await store.dequeue_rollout(worker_id="w")).rollout_id == rollout.rollout_id


async def test_a_copy_of_a_claim_gets_what_the_claim_got(place: Place) -> None:
    async with behind_proxy(place) as (store, proxy, client):
        await store.enqueue_rollout("x")
        await store.enqueue_rollout("y")
        proxy.plan("/v1/agl/queues/rollouts/dequeue", "lost answer")
        assert required(await client.dequeue_rollout(worker_id="w")).input == "x"
        assert (await store.statistics()).get("total_attempts") == 1


async def test_a_requeue_whose_answer_was_lost_does_not_take_the_rollout_from_the_next_worker(place: Place) -> None:
    async with behind_proxy(place) as (store, proxy, client):
        started = await store.start_rollout("x")
        await store.update_rollout(started.rollout_id, status="cancelled")
        claims: list[Any] = []

        async def claim() -> None:
            claims.append(await store.dequeue_rollout(worker_id="w"))

        proxy.plan(f"/v1/agl/rollouts/{started.rollout_id}", "lost answer", claim)
        await client.update_rollout(started.rollout_id, status="queuing")
        assert await store.get_rollout_by_id(started.rollout_id) == claims[0]
        assert await store.dequeue_rollout(worker_id="other") is None


async def test_a_failure_of_the_latest_attempt_whose_answer_was_lost_does_not_fail_the_next_one(place: Place) -> None:
    async with behind_proxy(place) as (store, proxy, client):
        config = RolloutConfig(max_attempts=3, retry_condition=["failed"])
        started = await store.start_rollout("x", config=config)
        claims: list[Any] = []

        async def claim() -> None:
            claims.append(await store.dequeue_rollout(worker_id="w"))

        proxy.plan(f"/v1/agl/rollouts/{started.rollout_id}/attempts/latest", "lost answer", claim)
        await client.update_attempt(started.rollout_id, "latest", status="failed")
        assert await store.get_rollout_by_id(started.rollout_id) == claims[0]
        assert [a.status for a in await store.query_attempts(started.rollout_id)] == ["failed", "preparing"]


async def test_a_version_of_resources_whose_answer_was_lost_is_not_published_again_after_the_next(place: Place) -> None:
    async with behind_proxy(place) as (store, proxy, client):

        async def publish() -> None:
            await store.update_resources("r", {"p": PromptTemplate(template="newer", engine="f-string")})

        proxy.plan("/v1/agl/resources/r", "lost answer", publish)
        first = await client.update_resources("r", {"p": PromptTemplate(template="older", engine="f-string")})
        assert first.version == 1
        latest: Any = await store.get_latest_resources()
        assert (latest.version, latest.resources["p"].template) == (2, "newer")


async def test_a_batch_of_spans_whose_answer_was_lost_is_stored_once_and_leaves_no_gap_in_the_numbers(
    place: Place,
) -> None:
    async with behind_proxy(place) as (store, proxy, client):
        started = await store.start_rollout("x")
        batch = [span_of(started, f"span-{i}") for i in range(3)]
        proxy.plan("/v1/agl/spans/batch", "lost answer")
        await client.add_many_spans(batch)
        proxy.plan("/v1/agl/spans/batch", "pass")
        await client.add_many_spans([span_of(started, "span-3")])
        numbers = {span.name: span.sequence_id for span in await store.query_spans(started.rollout_id)}
        assert numbers == {"span-0": 1, "span-1": 2, "span-2": 3, "span-3": 4}
