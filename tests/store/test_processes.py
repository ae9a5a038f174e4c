"""Several processes with one store hear of each other's changes, are forked, get a copy, and end their threads."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.rules.tx import TextRow
from tests.chaos.stores import Place, fresh_place, open_store

_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return fresh_place(request.param, request, tmp_path)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[Any]:
    async with place.opened() as made:
        yield made


def _finish_in_another_process(spec: str, rollout_id: str) -> None:
    async def finish() -> None:
        store = open_store(spec)
        await store.update_rollout(rollout_id, status="succeeded")
        await store.enqueue_rollout(input="from the other process")
        await store.close()

    asyncio.run(finish())


async def test_who_waits_hears_what_another_process_does(store: Any, place: Place) -> None:
    held = await store.start_rollout(input=1)
    cursor = (await store.query_events()).cursor
    waits = (
        asyncio.create_task(store.wait_for_rollouts(rollout_ids=[held.rollout_id], timeout=60.0)),
        asyncio.create_task(store.dequeue_rollout(timeout=60.0)),
        asyncio.create_task(store.query_events(after=cursor, timeout=60.0)),
    )
    other = _SPAWN.Process(target=_finish_in_another_process, args=(place.spec, held.rollout_id))
    other.start()
    finished, claimed, page = await asyncio.wait_for(asyncio.gather(*waits), 60.0)
    await asyncio.to_thread(other.join)
    assert [rollout.rollout_id for rollout in finished] == [held.rollout_id]
    assert claimed is not None
    assert claimed.input == "from the other process"
    assert held.rollout_id in {event.rollout_id for event in page.events}


async def test_a_forked_child_uses_the_store_that_its_parent_has_used(store: Any) -> None:
    await store.enqueue_rollout(input=1)
    await store.query_rollouts()  # threads and connections of both kinds are there
    child = os.fork()
    if child == 0:
        try:
            made = asyncio.run(asyncio.wait_for(store.enqueue_rollout(input=2), 20.0))
            store._backend._processes.pop(os.getppid())
            gc.collect()  # the parent's connections are not the child's to end
            os._exit(0 if made.input == 2 else 1)
        except BaseException:
            os._exit(2)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert [rollout.input for rollout in await store.query_rollouts()] == [1, 2]
    await store.enqueue_rollout(input=3)


async def test_a_copy_by_pickle_opens_the_same_data_with_the_same_settings(place: Place) -> None:
    async with place.opened(lease_seconds=7.0) as store:
        made = await store.enqueue_rollout(input=1)
        copy: Any = pickle.loads(pickle.dumps(store))
        assert copy._settings == vars(store)["_settings"]
        assert [rollout.rollout_id for rollout in await copy.query_rollouts()] == [made.rollout_id]
        await copy.close()


async def test_a_closed_store_has_no_threads_and_answers_what_it_was_asked(place: Place) -> None:
    before = set(threading.enumerate())
    store: Any = place.open()
    put = [lambda tx, n=n: tx.put("latest_resources", str(n), TextRow("x")) for n in range(50)]
    waiting = [asyncio.create_task(store._backend.run(script)) for script in put]
    await store.query_rollouts()  # each of them was submitted before
    await asyncio.to_thread(store._backend.await_change, 0.1)
    await store.close()
    await store.close()
    assert len(await asyncio.gather(*waiting)) == 50
    threads = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in threads if name.startswith(f"agl-{place.name}")] == []
    with pytest.raises(ConflictError, match="is closed"):
        await store.enqueue_rollout(input=1)
