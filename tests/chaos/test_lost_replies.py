"""Requests and replies are lost, cut, delayed and doubled: afterwards the store is the same as without."""

from __future__ import annotations

import asyncio
import logging
import os
from urllib.parse import urlsplit

import pytest

from agentlightning.store.client_server import LightningStoreClient
from tests.chaos.load import Actor, Fact, Producer, Publisher, Worker, problems
from tests.chaos.proxy import CHANCES, FaultyProxy
from tests.chaos.stores import Place

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
    async with place.opened(synchronous="NORMAL") as store, place.served(store) as endpoint:
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
