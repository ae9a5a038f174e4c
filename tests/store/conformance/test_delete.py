"""Removing rollouts: by id, by run, and by bounds on what a run keeps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, ConflictError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout
from tests.store.conftest import Given
from tests.store.parts import required, span_of


async def _ended(store: LightningStore, spans: int = 1, **start: Any) -> AttemptedRollout:
    attempted = await store.start_rollout(input=1, **start)
    if spans:
        await store.add_many_spans([span_of(attempted) for _ in range(spans)])
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
    return attempted


async def _ids(store: LightningStore) -> list[str]:
    return [rollout.rollout_id for rollout in await store.query_rollouts(sort_by="start_time")]


async def test_a_deleted_rollout_is_gone_with_its_attempts_and_spans(store: LightningStore) -> None:
    target, other = await _ended(store, 3), await _ended(store, 2)
    assert await store.delete_rollouts(rollout_ids=[target.rollout_id, "ro-unknown", target.rollout_id]) == 1
    assert await store.get_rollout_by_id(target.rollout_id) is None
    assert list(await store.query_attempts(target.rollout_id)) == []
    assert list(await store.query_spans(target.rollout_id)) == []
    with pytest.raises(NotFoundError):
        await store.update_rollout(target.rollout_id, status="cancelled")
    assert await _ids(store) == [other.rollout_id]
    counts = await store.statistics()
    assert (counts["total_rollouts"], counts["total_attempts"], counts["total_spans"]) == (1, 1, 2)
    assert await store.delete_rollouts(rollout_ids=[target.rollout_id]) == 0


async def test_a_rollout_that_has_not_ended_is_refused_and_nothing_is_deleted(store: LightningStore) -> None:
    ended = await _ended(store)
    queued = await store.enqueue_rollout(input=2)
    with pytest.raises(ConflictError, match=f"{queued.rollout_id} is queuing.*force"):
        await store.delete_rollouts(rollout_ids=[ended.rollout_id, queued.rollout_id])
    assert len(await _ids(store)) == 2
    assert await store.delete_rollouts(rollout_ids=[ended.rollout_id, queued.rollout_id], force=True) == 2
    assert await store.dequeue_rollout() is None


async def test_a_worker_does_not_hold_what_was_deleted(store: LightningStore) -> None:
    await store.enqueue_rollout(input=1)
    await store.delete_rollouts(rollout_ids=[required(await store.dequeue_rollout("w1")).rollout_id], force=True)
    assert await store.dequeue_rollout("w1") is None
    worker = required(await store.get_worker_by_id("w1"))
    assert (worker.status, worker.current_rollout_id) == ("idle", None)


async def test_keep_last_keeps_those_that_ended_last_of_each_run(store: LightningStore) -> None:
    runs: dict[str, list[str]] = {"a": [], "b": []}
    for run_id, made in runs.items():
        for _ in range(4):
            made.append((await _ended(store, run_id=run_id)).rollout_id)
    running = await store.start_rollout(input=2, run_id="a")
    assert await store.delete_rollouts(keep_last=1, run_id="a") == 3
    assert set(await _ids(store)) == {runs["a"][3], running.rollout_id, *runs["b"]}
    assert await store.delete_rollouts(keep_last=2) == 2
    assert set(await _ids(store)) == {runs["a"][3], running.rollout_id, *runs["b"][2:]}


async def test_max_age_removes_what_ended_longer_ago(store: LightningStore) -> None:
    old = await _ended(store)
    await asyncio.sleep(0.3)
    young = await _ended(store)
    ended = required((await store.get_rollout_by_id(old.rollout_id)).end_time)  # type: ignore[union-attr]
    assert await store.delete_rollouts(max_age=time.time() - ended - 0.15) == 1
    assert await _ids(store) == [young.rollout_id]


async def test_max_bytes_removes_the_oldest_ended_ones_until_the_run_fits(store: LightningStore) -> None:
    made = [await _ended(store, 10) for _ in range(3)]
    running = await store.start_rollout(input=2)
    await store.add_many_spans([span_of(running) for _ in range(10)])
    size = (await store.statistics())["total_span_bytes"]
    assert await store.delete_rollouts(max_bytes=size * 3 // 5) == 2
    assert await _ids(store) == [made[2].rollout_id, running.rollout_id]
    assert await store.delete_rollouts(max_bytes=0) == 1
    assert await _ids(store) == [running.rollout_id]


async def test_a_run_alone_removes_all_its_ended_rollouts(store: LightningStore) -> None:
    await _ended(store, run_id="a")
    other = await _ended(store, run_id="b")
    queued = await store.enqueue_rollout(input=3, run_id="a")
    assert await store.delete_rollouts(run_id="a") == 1
    assert set(await _ids(store)) == {other.rollout_id, queued.rollout_id}


async def test_who_waits_for_a_deleted_rollout_is_told(store: LightningStore) -> None:
    queued = await store.enqueue_rollout(input=1)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=20.0))
    await asyncio.sleep(0.05)
    await store.delete_rollouts(rollout_ids=[queued.rollout_id], force=True)
    assert await asyncio.wait_for(waiting, 5.0) == []


@pytest.mark.parametrize(
    "wrong",
    [{}, {"rollout_ids": ["ro-1"], "keep_last": 1}, {"rollout_ids": ["ro-1"], "run_id": "a"}, {"force": True}],
)
async def test_an_unclear_selection_is_refused(store: LightningStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        await store.delete_rollouts(**wrong)


async def test_a_negative_bound_is_refused(store: LightningStore) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        await store.delete_rollouts(keep_last=-1)


@pytest.mark.parametrize("name", ["finish_rollout", "fail_rollout"])
async def test_a_rollout_that_is_deleted_while_it_is_finished_is_not_found(given: Given, name: str) -> None:
    store = given.store
    rollout = await store.start_rollout("x")
    get = type(store).get_rollout_by_id

    async def deleted_first(rollout_id: str) -> Any:
        await given.engine.delete_rollouts(rollout_ids=[rollout_id], force=True)
        return await get(store, rollout_id)

    store.get_rollout_by_id = deleted_first  # type: ignore[method-assign]
    with pytest.raises(NotFoundError, match="deleted immediately after"):
        await getattr(store, name)(rollout.rollout_id)
