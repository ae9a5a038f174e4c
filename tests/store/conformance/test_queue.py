"""The order in which rollouts are claimed: priority, `not_before`, pauses before a retry."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from tests.store.parts import required


async def _claim_all(store: LightningStore) -> list[int]:
    inputs: list[int] = []
    while (claimed := await store.dequeue_rollout()) is not None:
        inputs.append(claimed.input)
    return inputs


async def test_higher_priority_is_claimed_first_and_equal_ones_in_order(store: LightningStore) -> None:
    for task, priority in enumerate((0, 5, -1, 5, 0)):
        await store.enqueue_rollout(input=task, priority=priority)
    assert await _claim_all(store) == [1, 3, 0, 4, 2]


async def test_a_batch_carries_its_priorities(store: LightningStore) -> None:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i, priority=i) for i in range(3)])
    assert [rollout.priority for rollout in made] == [0, 1, 2]
    claims = await store.dequeue_many_rollouts(limit=2)
    assert [claim.input for claim in claims] == [2, 1]


async def test_nobody_claims_a_rollout_before_its_time(store: LightningStore) -> None:
    later = await store.enqueue_rollout(input="later", not_before=time.time() + 60, priority=9)
    await store.enqueue_rollout(input="now")
    assert required(await store.dequeue_rollout()).input == "now"
    assert await store.dequeue_rollout() is None
    assert (await store.get_rollout_by_id(later.rollout_id)).status == "queuing"  # type: ignore[union-attr]


async def test_a_waiting_claim_wakes_when_the_time_has_come(store: LightningStore) -> None:
    at = time.time() + 0.3
    await store.enqueue_rollout(input="soon", not_before=at)
    assert required(await store.dequeue_rollout(timeout=10.0)).attempt.start_time >= at


async def test_a_claim_that_waits_already_hears_of_a_rollout_for_later(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=10.0))
    await asyncio.sleep(0.05)
    at = time.time() + 0.2
    await store.enqueue_rollout(input="soon", not_before=at)
    assert required(await waiting).attempt.start_time >= at


async def test_a_retry_waits_for_its_pause_which_grows(store: LightningStore) -> None:
    config = RolloutConfig(
        max_attempts=4, retry_condition=["failed"], retry_delay_seconds=0.1, retry_backoff=3.0, infrastructure_retries=0
    )
    made = await store.enqueue_rollout(input=1, config=config)
    pauses: list[float] = []
    for _ in range(3):
        claimed = required(await store.dequeue_rollout(timeout=10.0))
        before = time.time()
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed")
        waiting = required(await store.get_rollout_by_id(made.rollout_id))
        assert waiting.status == "requeuing"
        assert waiting.not_before is not None
        pauses.append(waiting.not_before - before)
    assert pauses == pytest.approx([0.1, 0.3, 0.9], abs=0.09)


CLOCKS_APART = 1.0
"""Seconds: a store over a database knows its server's clock up to half a round trip."""


async def test_the_largest_pause_has_an_end_after_any_number_of_retries(store: LightningStore) -> None:
    config = RolloutConfig(
        max_attempts=100, retry_condition=["failed"], retry_delay_seconds=1e10, retry_backoff=1000,
        retry_delay_max_seconds=1e10,
    )  # fmt: skip
    started = await store.start_rollout(input=1, config=config)
    for _ in range(70):
        await store.update_attempt(started.rollout_id, "latest", status="failed")
        await store.start_attempt(started.rollout_id)
    before = time.time()
    await store.update_attempt(started.rollout_id, "latest", status="failed")
    waiting = required(await store.get_rollout_by_id(started.rollout_id))
    assert waiting.not_before is not None
    assert waiting.not_before >= before - CLOCKS_APART + 1e10


async def test_a_config_that_was_changed_beyond_its_bounds_is_refused(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=100, retry_condition=["failed"], retry_delay_seconds=1.0)
    config.retry_backoff = 1e300
    made = await store.enqueue_rollout(input=1)
    for call in (
        store.enqueue_rollout(input=2, config=config),
        store.start_rollout(input=2, config=config),
        store.enqueue_many_rollouts([EnqueueRolloutRequest(input=2, config=config)]),
        store.update_rollout(made.rollout_id, config=config),
    ):
        with pytest.raises(BadRequestError, match="retry_backoff"):
            await call
    assert await _claim_all(store) == [1]


async def test_a_rollout_that_is_queued_by_hand_keeps_its_priority(store: LightningStore) -> None:
    first = await store.enqueue_rollout(input="first", priority=1)
    await store.enqueue_rollout(input="second")
    required(await store.dequeue_rollout())
    await store.update_rollout(first.rollout_id, status="requeuing")
    await store.enqueue_rollout(input="third", priority=1)
    await store.update_rollout(first.rollout_id, status="queuing")  # it was in the queue and keeps its place
    assert await _claim_all(store) == ["first", "third", "second"]


@pytest.mark.parametrize(
    "value", [datetime(2026, 1, 1, tzinfo=UTC), b"bytes", {1, 2}, object()], ids=lambda value: type(value).__name__
)
async def test_what_is_no_json_is_refused_with_its_place_one_by_one_and_in_a_batch(
    store: LightningStore, value: object
) -> None:
    inside = {"items": [1, {"when": value}]}
    with pytest.raises(TypeError, match=r"input\.items\[1\]\.when is a (datetime|bytes|set|object)"):
        await store.enqueue_rollout(inside)
    with pytest.raises(TypeError, match=r"input\.items\[1\]\.when is a (datetime|bytes|set|object)"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=inside)])
    with pytest.raises(TypeError, match=r"metadata\.items\[1\]\.when is a (datetime|bytes|set|object)"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, metadata=inside)])
    assert (await store.query_rollouts()).total == 0
