"""A wait for many rollouts that is asked for chunk by chunk goes on: it misses nothing, and looks at each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import kept_waits, scripts
from agentlightning.store.engine import EngineStore
from agentlightning.store.kept_waits import KeptWait, KeptWaits
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.waiters import Waiters
from agentlightning.types import EnqueueRolloutRequest

MANY = 300


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineStore]:
    memory = request.param == "memory"
    made = InMemoryLightningStore() if memory else SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL")
    yield made
    await made.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rollouts of each look."""
    counted: list[int] = []
    look = scripts.ended_rollouts

    def counting(tx: Any, rollout_ids: Any) -> Any:
        counted.append(len(rollout_ids))
        return look(tx, rollout_ids)

    monkeypatch.setattr(scripts, "ended_rollouts", counting)
    return counted


async def enqueue(store: EngineStore, count: int = MANY) -> list[str]:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(count)])
    return [rollout.rollout_id for rollout in made]


async def test_the_next_chunk_looks_at_nothing_while_nothing_happens(store: EngineStore, looks: list[int]) -> None:
    ids = await enqueue(store)
    for _ in range(3):
        assert await store.wait_for_rollouts(rollout_ids=ids, timeout=0.2) == []
    assert looks == [MANY]


async def test_what_ends_between_two_chunks_is_seen_by_the_next(store: EngineStore) -> None:
    ids = await enqueue(store)
    assert await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1) == []
    await store.update_rollout(ids[7], status="cancelled")
    [ended] = await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1)
    assert ended.rollout_id == ids[7]


async def test_a_wait_that_went_on_is_woken_by_the_last_end(store: EngineStore) -> None:
    ids = await enqueue(store)
    for _ in range(2):
        assert await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1) == []
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=60))
    await asyncio.sleep(0)
    for rollout_id in ids:
        await store.update_rollout(rollout_id, status="cancelled")
    assert len(await waiting) == MANY


async def test_two_callers_that_wait_for_the_same_each_get_their_answer(store: EngineStore) -> None:
    ids = await enqueue(store)
    both = [store.wait_for_rollouts(rollout_ids=ids, timeout=0.1) for _ in range(2)]
    assert await asyncio.gather(*both) == [[], []]
    both = [asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=60)) for _ in range(2)]
    await asyncio.sleep(0)
    for rollout_id in ids:
        await store.update_rollout(rollout_id, status="cancelled")
    assert [len(ended) for ended in await asyncio.gather(*both)] == [MANY, MANY]


async def test_a_rollout_that_is_queued_again_during_a_wait_is_not_returned(store: EngineStore) -> None:
    ids = await enqueue(store, 2)
    await store.update_rollout(ids[0], status="cancelled")
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=0.3))
    await asyncio.sleep(0.05)
    await store.update_rollout(ids[0], status="queuing")
    assert await waiting == []


async def test_a_wait_with_unknown_rollouts_waits_for_the_known_ones_only(store: EngineStore) -> None:
    ids = [*await enqueue(store), "ro-unknown"]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=60))
    await asyncio.sleep(0.05)
    for rollout_id in ids[:-1]:
        await store.update_rollout(rollout_id, status="cancelled")
    assert [rollout.rollout_id for rollout in await waiting] == ids[:-1]


async def test_a_wait_that_nobody_asks_for_again_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_waits, "_KEEP_SECONDS", 0.01)
    waiters, kept = Waiters(), KeptWaits()
    with waiters.for_keys([("end", "ro-1")]) as waiter:
        waiter.kept = kept.keep("what", KeptWait(waiter, [], 0.0))
    assert waiters.parked == 1
    let_go = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, let_go.set_result, None)
    await let_go
    assert waiters.parked == 0
    assert kept.take("what", None) is None
