"""Rollouts in batches: in order, with an end, and with everything that was recorded of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from agentlightning.emitter import emit_reward
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.training.rollouts import Evidence, LatePolicy, Watcher, collect, evidence
from agentlightning.types import AttemptedRollout, AttemptStatus, EnqueueRolloutRequest, Outcome, Rollout, Span


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


def _requests(*inputs: str) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(input=value, mode="train") for value in inputs]


async def _claim(store: InMemoryLightningStore) -> AttemptedRollout:
    claimed = await store.dequeue_rollout(worker_id="w", timeout=5.0)
    assert claimed is not None
    return claimed


async def _finish(
    store: InMemoryLightningStore,
    claimed: AttemptedRollout,
    *,
    reward: float | None = None,
    status: AttemptStatus = "succeeded",
    outcome: Outcome | None = "scored",
) -> None:
    """End an attempt as a runner does: first its spans, then its status."""
    if reward is not None:
        await store.add_span(_reward_span(claimed, reward))
    attempt = claimed.attempt
    await store.update_attempt(claimed.rollout_id, attempt.attempt_id, status=status, outcome=outcome)


def _reward_span(claimed: AttemptedRollout, reward: float) -> Span:
    return Span.from_core_fields(
        emit_reward(reward, propagate=False),
        rollout_id=claimed.rollout_id,
        attempt_id=claimed.attempt.attempt_id,
        sequence_id=-1,
    )


async def test_rollouts_come_back_in_the_order_of_the_requests(store: InMemoryLightningStore) -> None:
    assert await collect(store, [], timeout_seconds=30) == []
    order = list[int]()
    collecting = asyncio.create_task(
        collect(store, _requests("a", "b", "c"), timeout_seconds=30, watcher=Watcher(on_done=order.append))
    )
    claims = [await _claim(store) for _ in range(3)]
    for claimed in reversed(claims):
        await _finish(store, claimed)
    rollouts = await collecting
    assert [rollout.input for rollout in rollouts] == ["a", "b", "c"]
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert order[-1] == 3
    assert order == sorted(order)


async def test_what_is_not_done_in_time_is_cancelled(store: InMemoryLightningStore) -> None:
    collecting = asyncio.create_task(collect(store, _requests("done", "running", "waiting"), timeout_seconds=0.3))
    await _finish(store, await _claim(store))
    await _claim(store)
    rollouts = await collecting
    assert [rollout.status for rollout in rollouts] == ["succeeded", "cancelled", "cancelled"]
    assert await store.dequeue_rollout(worker_id="w") is None


async def test_a_rollout_that_ends_as_it_is_cancelled_stays_as_it_ended() -> None:
    class Late(InMemoryLightningStore):
        async def wait_for_rollouts(self, **arguments: object) -> list[object]:  # type: ignore[override]
            claimed = await self.dequeue_rollout(worker_id="w")
            if claimed is not None:
                await _finish(self, claimed)
            return []  # the news comes too late

    [rollout] = await collect(Late(), _requests("a"), timeout_seconds=0.01)
    assert rollout.status == "succeeded"


async def test_when_the_caller_is_cancelled_so_are_the_open_rollouts(store: InMemoryLightningStore) -> None:
    collecting = asyncio.create_task(collect(store, _requests("a", "b"), timeout_seconds=30))
    await _claim(store)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert [rollout.status for rollout in await store.query_rollouts()] == ["cancelled", "cancelled"]


async def test_with_wait_the_time_begins_anew_with_each_end(store: InMemoryLightningStore) -> None:
    collecting = asyncio.create_task(collect(store, _requests("a", "b", "c"), timeout_seconds=1.0, late="wait"))
    for _ in range(2):
        await asyncio.sleep(0.6)  # together longer than the time that one has
        await _finish(store, await _claim(store))
    assert [rollout.status for rollout in await collecting] == ["succeeded", "succeeded", "cancelled"]


async def test_with_resubmit_what_is_late_is_run_once_more(store: InMemoryLightningStore) -> None:
    late = await collect(store, _requests("a", "b"), timeout_seconds=0.01, late="resubmit")
    assert [rollout.status for rollout in late] == ["cancelled"] * 4
    indices, enqueued = list[int](), list[str]()
    collecting = asyncio.create_task(
        collect(
            store,
            _requests("a", "b"),
            timeout_seconds=0.5,
            late="resubmit",
            watcher=Watcher(
                on_done=indices.append,
                on_enqueued=lambda rollouts: enqueued.extend(rollout.rollout_id for rollout in rollouts),
            ),
        )
    )
    await _finish(store, await _claim(store))
    first_try, second_try = await _claim(store), await _claim(store)
    await _finish(store, second_try)
    rollouts = await collecting
    assert [(rollout.input, rollout.status) for rollout in rollouts] == [
        ("a", "succeeded"),
        ("b", "succeeded"),
        ("b", "cancelled"),
    ]
    assert [rollout.rollout_id for rollout in rollouts[1:]] == [second_try.rollout_id, first_try.rollout_id]
    assert sorted(enqueued) == sorted(rollout.rollout_id for rollout in rollouts)
    assert indices[-1] == 2


async def _evidence_of(store: InMemoryLightningStore, claimed: Rollout) -> Evidence:
    rollout = await store.get_rollout_by_id(claimed.rollout_id)
    assert rollout is not None
    return await evidence(store, rollout)


async def test_evidence_has_every_attempt_and_the_reward_of_the_latest(store: InMemoryLightningStore) -> None:
    unclaimed = await _evidence_of(store, await store.enqueue_rollout(input="a", mode="train"))
    assert (unclaimed.latest, unclaimed.counted, unclaimed.reward) == (None, [], None)
    first = await _claim(store)
    await store.add_span(_reward_span(first, 0.25))
    await store.update_rollout(first.rollout_id, status="requeuing")
    second = await _claim(store)
    await _finish(store, second, reward=1.0)
    await store.add_span(_reward_span(first, 0.5))

    evidence = await _evidence_of(store, second)
    assert [attempt.attempt_id for attempt in evidence.attempts] == [
        first.attempt.attempt_id,
        second.attempt.attempt_id,
    ]
    assert len(evidence.spans) == 3
    assert [span.attempt_id for span in evidence.counted] == [second.attempt.attempt_id]
    assert evidence.reward == 1.0


@pytest.mark.parametrize(
    ("status", "outcome", "earned"),
    [
        ("succeeded", "scored", 0.5),
        ("succeeded", None, 0.5),  # a runner that states no outcome
        ("failed", "policy_fault", 0.5),
        ("failed", "infrastructure_fault", None),
        ("failed", "cancelled", None),
        ("timeout", "cancelled", None),
        ("succeeded", "unscored", None),
        ("running", None, None),
    ],
)
async def test_only_a_score_or_a_fault_of_the_policy_earns_its_reward(
    store: InMemoryLightningStore, status: AttemptStatus, outcome: Outcome | None, earned: float | None
) -> None:
    await store.enqueue_rollout(input="a", mode="train")
    claimed = await _claim(store)
    await _finish(store, claimed, reward=0.5, status=status, outcome=outcome)
    assert (await _evidence_of(store, claimed)).reward == earned


async def test_a_caller_that_is_cancelled_while_it_enqueues_leaves_nothing_open() -> None:
    enqueued, may_answer = asyncio.Event(), asyncio.Event()

    class SlowToAnswer(InMemoryLightningStore):
        async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
            made = await super().enqueue_many_rollouts(rollouts)
            enqueued.set()
            await may_answer.wait()
            return made

    store = SlowToAnswer()
    running = asyncio.ensure_future(collect(store, _requests("a", "b"), timeout_seconds=10))
    await enqueued.wait()
    running.cancel()
    await asyncio.sleep(0)
    may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [rollout.status for rollout in await store.query_rollouts()] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(("late", "status"), [("wait", "succeeded"), ("drop", "cancelled")])
async def test_waiting_counts_from_the_last_end_of_any_call(
    store: InMemoryLightningStore, late: LatePolicy, status: str
) -> None:
    times = list[float]()
    claimed = list[AttemptedRollout]()

    def last_end() -> float:
        times.append(time.monotonic())
        if len(times) == 4:  # the time limit has passed three times: rollouts of other calls ended meanwhile
            finishing.append(asyncio.ensure_future(_finish(store, claimed[0])))
        return times[-1]

    finishing = list[asyncio.Task[None]]()
    collecting = asyncio.create_task(
        collect(store, _requests("slow"), timeout_seconds=0.05, late=late, watcher=Watcher(last_end=last_end))
    )
    claimed.append(await _claim(store))
    assert [rollout.status for rollout in await collecting] == [status]
