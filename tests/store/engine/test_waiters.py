"""A wait that is continued chunk by chunk misses nothing, and reads the store once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.store.engine import reading, waiters
from agentlightning.store.engine import store as engine_store
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.engine.waiters import Waiters
from agentlightning.store.http import client
from agentlightning.types import EnqueueRolloutRequest
from tests.store.conftest import Serve
from tests.store.parts import required, with_token

MANY = 300


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rollouts of each look."""
    counted: list[int] = []
    look = reading.ended_rollouts

    def counting(tx: Any, rollout_ids: Any) -> Any:
        counted.append(len(rollout_ids))
        return look(tx, rollout_ids)

    monkeypatch.setattr(reading, "ended_rollouts", counting)
    return counted


async def enqueue(local: EngineStore, count: int = MANY) -> list[str]:
    made = await local.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(count)])
    return [rollout.rollout_id for rollout in made]


async def test_the_next_chunk_looks_at_nothing_while_nothing_happens(local: EngineStore, looks: list[int]) -> None:
    ids = await enqueue(local)
    for _ in range(3):
        assert await local.wait_for_rollouts(rollout_ids=ids, timeout=0.2) == []
    assert looks == [MANY]


async def test_what_ends_between_two_chunks_is_seen_by_the_next(local: EngineStore) -> None:
    ids = await enqueue(local)
    assert await local.wait_for_rollouts(rollout_ids=ids, timeout=0.1) == []
    await local.update_rollout(ids[7], status="cancelled")
    [ended] = await local.wait_for_rollouts(rollout_ids=ids, timeout=0.1)
    assert ended.rollout_id == ids[7]


async def test_a_wait_that_went_on_is_woken_by_the_last_end(local: EngineStore) -> None:
    ids = await enqueue(local)
    for _ in range(2):
        assert await local.wait_for_rollouts(rollout_ids=ids, timeout=0.1) == []
    waiting = asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=60))
    await asyncio.sleep(0)
    for rollout_id in ids:
        await local.update_rollout(rollout_id, status="cancelled")
    assert len(await waiting) == MANY


async def test_two_callers_that_wait_for_the_same_each_get_their_answer(local: EngineStore) -> None:
    ids = await enqueue(local)
    both = [local.wait_for_rollouts(rollout_ids=ids, timeout=0.1) for _ in range(2)]
    assert await asyncio.gather(*both) == [[], []]
    both = [asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=60)) for _ in range(2)]
    await asyncio.sleep(0)
    for rollout_id in ids:
        await local.update_rollout(rollout_id, status="cancelled")
    assert [len(ended) for ended in await asyncio.gather(*both)] == [MANY, MANY]


async def test_a_rollout_that_is_queued_again_during_a_wait_is_not_returned(local: EngineStore) -> None:
    ids = await enqueue(local, 2)
    await local.update_rollout(ids[0], status="cancelled")
    waiting = asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=0.3))
    await asyncio.sleep(0.05)
    await local.update_rollout(ids[0], status="queuing")
    assert await waiting == []


async def test_a_wait_with_unknown_rollouts_waits_for_the_known_ones_only(local: EngineStore) -> None:
    ids = [*await enqueue(local), "ro-unknown"]
    waiting = asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=60))
    await asyncio.sleep(0.05)
    for rollout_id in ids[:-1]:
        await local.update_rollout(rollout_id, status="cancelled")
    assert [rollout.rollout_id for rollout in await waiting] == ids[:-1]


async def test_a_wait_that_nobody_asks_for_again_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "_KEEP_SECONDS", 0.01)
    parked = Waiters()
    with parked.for_keys([("end", "ro-1")]) as waiter:
        assert parked.keep(("end", "what"), waiter)
    assert parked.parked == 1
    let_go = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, let_go.set_result, None)
    await let_go
    assert parked.parked == 0
    assert parked.take(("end", "what"), None) is None


# --- idle workers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The worker of each look at the queue."""
    counted: list[str | None] = []
    look = engine_store.claim

    def counting(tx: Any, *, worker_id: str, **how: Any) -> Any:
        counted.append(worker_id)
        return look(tx, worker_id=worker_id, **how)

    monkeypatch.setattr(engine_store, "claim", counting)
    return counted


async def test_an_idle_worker_that_asks_again_looks_at_the_queue_once(local: EngineStore, claims: list[Any]) -> None:
    for _ in range(3):
        assert await local.dequeue_rollout(worker_id="w", timeout=0.5) is None
    assert claims == ["w"]


async def test_work_that_comes_between_two_questions_is_claimed_at_once(local: EngineStore) -> None:
    for number in range(3):
        assert await local.dequeue_rollout(worker_id="w", timeout=0.02) is None
        await local.enqueue_rollout(number)
        assert required(await local.dequeue_rollout(worker_id="w", timeout=60)).input == number


async def test_work_that_comes_during_a_later_question_wakes_it(local: EngineStore) -> None:
    assert await local.dequeue_rollout(worker_id="w", timeout=0.02) is None
    asking = asyncio.create_task(local.dequeue_rollout(worker_id="w", timeout=60))
    await asyncio.sleep(0.01)
    made = await local.enqueue_rollout("task")
    assert required(await asking).rollout_id == made.rollout_id


async def test_a_worker_that_does_not_come_back_keeps_nothing_from_the_others(local: EngineStore) -> None:
    lost_workers = [local.dequeue_rollout(worker_id=f"gone-{number}", timeout=0.02) for number in range(5)]
    assert await asyncio.gather(*lost_workers) == [None] * 5
    asking = [asyncio.create_task(local.dequeue_rollout(worker_id=f"w-{number}", timeout=60)) for number in range(2)]
    await asyncio.sleep(0.02)
    made = await local.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(2)])
    claims = await asyncio.gather(*asking)
    assert sorted(claim.rollout_id for claim in claims if claim) == sorted(rollout.rollout_id for rollout in made)


async def test_workers_of_two_runs_keep_questions_of_their_own(local: EngineStore) -> None:
    for run_id in ("a", "b"):
        assert await local.dequeue_rollout(worker_id="w", timeout=0.02, run_id=run_id) is None
    made = await local.enqueue_rollout("task", run_id="b")
    assert await local.dequeue_rollout(worker_id="w", timeout=0.02, run_id="a") is None
    assert required(await local.dequeue_rollout(worker_id="w", timeout=60, run_id="b")).rollout_id == made.rollout_id


async def test_many_idle_workers_lose_no_work_while_it_comes_at_any_moment(local: EngineStore) -> None:
    claimed: list[str] = []
    everything = asyncio.Event()

    async def work(worker_id: str) -> None:
        while not everything.is_set():
            claim = await local.dequeue_rollout(worker_id=worker_id, timeout=0.003)
            if claim is not None:
                claimed.append(claim.rollout_id)
                if len(claimed) == MANY:
                    everything.set()

    workers = [asyncio.create_task(work(f"w-{number}")) for number in range(20)]
    made: list[str] = []
    for number in range(MANY):
        made.append((await local.enqueue_rollout(number)).rollout_id)
        await asyncio.sleep(0.001 * (number % 4))
    await asyncio.gather(*workers)
    assert sorted(claimed) == sorted(made)


async def test_a_copy_of_an_answered_claim_passes_the_work_on_that_woke_it(local: EngineStore) -> None:
    async def ask(token: str, worker: str, timeout: float) -> Any:
        return await with_token(token, local.dequeue_rollout(worker, timeout=timeout))

    assert await ask("before", "w", 0.05) is None
    assert await ask("answered", "w", 0.05) is None
    copy = asyncio.create_task(ask("answered", "w", 20.0))
    await asyncio.sleep(0.05)
    other = asyncio.create_task(ask("other", "v", 20.0))
    await asyncio.sleep(0.05)
    await enqueue(local, 1)
    required(await asyncio.wait_for(other, 15.0))
    assert await copy is None


async def test_a_long_question_with_a_token_of_the_callers_is_asked_in_chunks(
    local: EngineStore, serve: Serve, monkeypatch: pytest.MonkeyPatch, claims: list[Any]
) -> None:
    monkeypatch.setattr(client, "POLL_SECONDS", 0.1)
    _, asker = await serve(local)
    asking = asyncio.create_task(with_token("the callers own", asker.dequeue_rollout(timeout=60)))
    await asyncio.sleep(0.5)
    count = len(claims)
    made = await local.enqueue_rollout("task")
    assert required(await asking).rollout_id == made.rollout_id
    assert count < 20, "each chunk is held open"
