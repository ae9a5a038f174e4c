"""Features of the store in memory alone: its bound on spans, and the notice of dropped ones."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, BusyError, GoneError
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.rules.resources import forget_resources
from agentlightning.types import AttemptedRollout, PromptTemplate, RetentionPolicy, Span
from tests.store.parts import span_of


def _spans(attempted: AttemptedRollout, count: int) -> list[Span]:
    return [span_of(attempted, attributes={"text": "x" * 1000}) for _ in range(count)]


async def _ended(store: InMemoryLightningStore, count: int) -> AttemptedRollout:
    attempted = await store.start_rollout(input=1)
    await store.add_many_spans(_spans(attempted, count))
    await store.update_attempt(attempted.rollout_id, "latest", status="succeeded")
    return attempted


async def test_spans_of_ended_rollouts_that_were_read_go_first_and_active_ones_never() -> None:
    store = InMemoryLightningStore(max_span_bytes=110_000, safe_memory_threshold=100_000)
    active = await store.start_rollout(input=0)
    await store.add_many_spans(_spans(active, 10))
    unread, read = await _ended(store, 20), await _ended(store, 20)
    assert len(await store.query_spans(read.rollout_id)) == 20
    late = await _ended(store, 30)
    with pytest.raises(GoneError, match=f"{read.rollout_id} have been evicted.*max_span_bytes"):
        await store.query_spans(read.rollout_id)
    for rollout, count in ((active, 10), (unread, 20), (late, 30)):
        assert len(await store.query_spans(rollout.rollout_id)) == count
    statistics = await store.statistics()
    assert statistics["total_spans"] == 60
    assert statistics["total_span_bytes"] <= 110_000
    assert (statistics["eviction_threshold_bytes"], statistics["safe_threshold_bytes"]) == (110_000, 100_000)


async def test_unread_spans_go_when_nothing_else_is_left_the_oldest_first() -> None:
    store = InMemoryLightningStore(max_span_bytes=60_000)
    first, second, third = [await _ended(store, 20) for _ in range(3)]
    with pytest.raises(GoneError):
        await store.query_spans(first.rollout_id)
    assert len(await store.query_spans(third.rollout_id)) == 20
    assert (await store.get_rollout_by_id(first.rollout_id)) is not None
    assert second.rollout_id != third.rollout_id


async def test_a_store_full_of_active_spans_refuses_more_and_takes_them_when_there_is_room() -> None:
    store = InMemoryLightningStore(max_span_bytes=40_000)
    active = await store.start_rollout(input=1)
    await store.add_many_spans(_spans(active, 20))
    more = _spans(active, 20)
    with pytest.raises(BusyError, match="have not ended"):
        await store.add_many_spans(more)
    assert len(await store.query_spans(active.rollout_id)) == 20
    await store.update_attempt(active.rollout_id, "latest", status="succeeded")
    other = await store.start_rollout(input=2)
    await store.add_many_spans(_spans(other, 20))
    assert len(await store.query_spans(other.rollout_id)) == 20


async def test_a_new_attempt_of_an_evicted_rollout_can_be_read() -> None:
    store = InMemoryLightningStore(max_span_bytes=60_000)
    first = await _ended(store, 20)
    for _ in range(2):
        await _ended(store, 20)
    again = await store.start_attempt(first.rollout_id)
    await store.add_many_spans(_spans(again, 2))
    assert len(await store.query_spans(first.rollout_id, "latest")) == 2
    with pytest.raises(GoneError):
        await store.query_spans(first.rollout_id, first.attempt.attempt_id)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"eviction_memory_threshold": -1}, "must be non-negative"),
        ({"eviction_memory_threshold": 0}, "must be at least 1 bytes"),
        ({"eviction_memory_threshold": 1.5}, "ratio must be"),
        ({"eviction_memory_threshold": 100, "safe_memory_threshold": 100}, "must be smaller than"),
        ({"safe_memory_threshold": -0.1}, "ratio must be"),
        ({"max_span_bytes": 100, "eviction_memory_threshold": 100}, "not both"),
        ({"lease_seconds": 0}, "lease_seconds must be positive"),
    ],
)
def test_wrong_bounds_are_refused_with_the_values(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequestError, match=text):
        InMemoryLightningStore(**wrong)


def test_a_store_in_memory_says_that_it_cannot_be_sent_to_another_process() -> None:
    with pytest.raises(TypeError, match="LightningStoreServer"):
        pickle.dumps(InMemoryLightningStore())


async def test_resources_of_a_run_go_with_its_last_rollout_when_a_policy_says_what_to_keep() -> None:
    store = InMemoryLightningStore(retention=RetentionPolicy(keep_last=0))
    template = PromptTemplate(resource_type="prompt_template", template="x", engine="f-string")
    resources = await store.add_resources({"p": template}, run_id="over")
    stored_resources = await store.add_resources({"p": template}, run_id="going on")
    await store.enqueue_rollout(input=1, run_id="going on")
    later = store._runtime.now() + 7200
    store._runtime.write_now(lambda tx: forget_resources(tx, later, 3600.0))
    assert await store.get_resources_by_id(resources.resources_id) is None
    assert await store.get_latest_resources(run_id="over") is None
    assert (await store.get_latest_resources(run_id="going on")) == stored_resources
    assert (await store.statistics())["total_resources"] == 1
