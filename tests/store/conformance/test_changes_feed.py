"""The feed of a store: the rollouts that changed after a cursor, also for a reader that comes back later."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from tests.store.parts import span_of


async def _follow(
    store: LightningStore, cursor: str, until: set[str], timeout: float = 10.0
) -> tuple[dict[str, str], str]:
    """Read pages until each of these rollouts has appeared, and return the last status reported of each."""
    statuses: dict[str, str] = {}

    async def read() -> str:
        at = cursor
        while not until <= set(statuses):
            page = await store.query_events(after=at, timeout=timeout, limit=2)
            statuses.update({event.rollout_id: event.status for event in page.events})
            at = page.cursor
        return at

    return statuses, await asyncio.wait_for(read(), timeout)


async def test_from_the_beginning_every_rollout_is_told_once_in_the_order_of_its_last_change(
    store: LightningStore,
) -> None:
    made = [await store.enqueue_rollout(input=i) for i in range(5)]
    await store.update_rollout(made[1].rollout_id, status="cancelled")
    statuses, cursor = await _follow(store, "0", {rollout.rollout_id for rollout in made})
    order = [made[i].rollout_id for i in (0, 2, 3, 4, 1)]
    assert list(statuses) == order
    assert statuses[made[1].rollout_id] == "cancelled"
    assert (await store.query_events(after=cursor)).events == []


async def test_an_event_says_where_the_rollout_stands(store: LightningStore) -> None:
    start = (await store.query_events()).cursor
    attempted = await store.start_rollout(input=1, mode="val", worker_id="w1", run_id="r")
    await store.add_many_spans([span_of(attempted), span_of(attempted)])
    await store.update_attempt(attempted.rollout_id, "latest", status="succeeded", outcome="scored")
    page = await store.query_events(after=start, timeout=5.0)
    while not page.events or page.events[-1].status != "succeeded":
        page = await store.query_events(after=page.cursor, timeout=5.0)
    event = page.events[-1]
    assert (event.rollout_id, event.run_id, event.mode) == (attempted.rollout_id, "r", "val")
    assert (event.attempt_id, event.attempt_status, event.outcome) == (
        attempted.attempt.attempt_id,
        "succeeded",
        "scored",
    )
    assert (event.worker_id, event.spans) == ("w1", 2)
    assert event.end_time is not None


async def test_a_reader_that_waits_is_told_at_once(store: LightningStore) -> None:
    start = (await store.query_events()).cursor
    waiting = asyncio.create_task(store.query_events(after=start, timeout=20.0))
    await asyncio.sleep(0.05)
    made = await store.enqueue_rollout(input=1)
    page = await asyncio.wait_for(waiting, 10.0)
    assert [event.rollout_id for event in page.events] == [made.rollout_id]


async def test_who_comes_back_with_a_cursor_misses_nothing(store: LightningStore) -> None:
    first = await store.enqueue_rollout(input=1)
    _, cursor = await _follow(store, "0", {first.rollout_id})
    others = {(await store.enqueue_rollout(input=i)).rollout_id for i in range(3)}
    await store.update_rollout(first.rollout_id, status="cancelled")
    statuses, _ = await _follow(store, cursor, others | {first.rollout_id})
    assert statuses[first.rollout_id] == "cancelled"


async def test_the_cursor_outlives_the_deletion_of_what_it_points_at(store: LightningStore) -> None:
    made = await store.enqueue_rollout(input=1)
    _, cursor = await _follow(store, "0", {made.rollout_id})
    await store.delete_rollouts(rollout_ids=[made.rollout_id], force=True)
    later = await store.enqueue_rollout(input=2)
    statuses, _ = await _follow(store, cursor, {later.rollout_id})
    assert list(statuses) == [later.rollout_id]


async def test_one_run_can_be_followed_alone(store: LightningStore) -> None:
    await store.enqueue_rollout(input=1, run_id="other")
    mine = await store.enqueue_rollout(input=2, run_id="mine")
    page = await store.query_events(after="0", run_id="mine", timeout=5.0)
    while not page.events:
        page = await store.query_events(after=page.cursor, run_id="mine", timeout=5.0)
    assert [event.rollout_id for event in page.events] == [mine.rollout_id]


async def test_nothing_new_gives_an_empty_page_when_time_is_up(store: LightningStore) -> None:
    await store.enqueue_rollout(input=1)
    cursor = (await store.query_events()).cursor
    page = await store.query_events(after=cursor, timeout=0.05)
    assert page.events == []


@pytest.mark.parametrize("wrong", [{"after": "yesterday"}, {"after": "-1"}, {"limit": 0}, {"limit": 5000}])
async def test_a_wrong_cursor_or_limit_is_refused(store: LightningStore, wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequestError):
        await store.query_events(**{"after": "0", **wrong})  # type: ignore[arg-type]
