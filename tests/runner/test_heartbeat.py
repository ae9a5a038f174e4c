"""Heartbeats: from the start to the end of serving, from a thread or from the loop, for every agent."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from agentlightning.litagent import LitAgent, rollout
from agentlightning.runner import LitAgentRunner, heartbeat
from agentlightning.runner.heartbeat import Heartbeats
from agentlightning.store.base import UNSET, LightningStore
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Attempt, RolloutConfig, Worker
from tests.stubs.running import run_tasks, runner_of, serving


class Counting(InMemoryLightningStore):
    """Records each heartbeat, and sets an event at the third one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.beats: list[Any] = []
        self.third = threading.Event()
        self.failing = False
        self.named: set[str] = set()

    @override
    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: Any = None,
        *,
        run_id: str | None = None,
        attempts: Sequence[str] | None = None,
    ) -> Worker:
        self.beats.append(heartbeat_stats)
        assert attempts is not None, "a runner names what it has in hand"
        self.named |= set(attempts)
        if len(self.beats) == 3:
            self.third.set()
        if self.failing and len(self.beats) == 2:
            raise ConnectionError("away")
        stats = {} if heartbeat_stats is None else {"heartbeat_stats": heartbeat_stats}
        return await super().update_worker(worker_id, run_id=run_id, attempts=attempts, **stats)


class Earlier(InMemoryLightningStore):
    """A store of a user's, written before heartbeats named claims."""

    @override
    async def update_worker(self, worker_id: str, heartbeat_stats: Any = UNSET, *, run_id: str | None = None) -> Worker:
        return await super().update_worker(worker_id, heartbeat_stats, run_id=run_id)


async def serve_until(store: Any, event: threading.Event, agent: Any = None, **settings: Any) -> None:
    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), **settings)
    stop = threading.Event()
    with runner.run_context(agent=agent or rollout(lambda task: 1.0), store=store):
        serving = asyncio.create_task(runner.iter(event=stop))
        assert await asyncio.to_thread(event.wait, 20)
        stop.set()
        await serving


@pytest.mark.parametrize("mode", ["thread", "asyncio"])
async def test_heartbeats_carry_the_host_and_end_with_the_runner(mode: str) -> None:
    store = Counting()
    await serve_until(store, store.third, heartbeat_interval=0.03, interval_jitter=0.01, heartbeat_launch_mode=mode)
    assert store.beats[0] is None, "the first one only announces the worker, before it claims"
    assert store.beats[1]["cpu_cores"] >= 1
    count = len(store.beats)
    await asyncio.sleep(0.1)
    assert len(store.beats) == count
    assert not [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name]


async def test_a_heartbeat_that_fails_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    store = Counting()
    store.failing = True
    await serve_until(store, store.third, heartbeat_interval=0.03, interval_jitter=0.0)
    assert "heartbeat failed: ConnectionError: away" in caplog.text


async def test_a_worker_without_work_beats_every_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, beats = Counting(), list[int]()
    claimed = await store.start_rollout("x")
    nine = asyncio.Event()

    def jitter(low: float, high: float) -> float:  # asked for once between two times at which a beat is due
        beats.append(len(store.beats))
        if len(beats) == 6:
            beating.held.add(claimed.attempt.attempt_id)
        if len(beats) == 9:
            nine.set()
        return 0.0

    monkeypatch.setattr(heartbeat, "SYSTEM_RANDOM", SimpleNamespace(uniform=jitter))
    beating = Heartbeats(store, "w", interval=0.05, jitter=0.0, mode="asyncio", include_gpu=False)
    async with beating.of_worker():
        await asyncio.wait_for(nine.wait(), 60)
    assert beats[:9] == [2, 2, 3, 3, 4, 4, 5, 6, 7], "the first one announces the worker"


async def test_no_interval_means_no_heartbeats() -> None:
    store = Counting()
    (finished,) = await run_tasks(store, rollout(lambda task: 1.0), "x", heartbeat_interval=0)
    assert (finished.status, store.beats) == ("succeeded", [])


BEATS: dict[str, Any] = {"heartbeat_interval": 0.1, "interval_jitter": 0.0}
LEASE: dict[str, Any] = {"lease_seconds": 0.4, "scan_debounce_seconds": 0.05}


@rollout
async def blocks(task: float) -> float:
    time.sleep(task)  # noqa: ASYNC251 -- the mistake that the thread makes up for
    return 1.0


@rollout
async def sleeps(task: float) -> float:
    await asyncio.sleep(task)
    return 1.0


async def one_attempt(store: LightningStore, rollout_id: str) -> Attempt:
    """Check that nothing but one attempt was made, and that it ended well; return it."""
    (attempt,) = await store.query_attempts(rollout_id)
    assert (attempt.status, attempt.outcome) == ("succeeded", "scored")
    return attempt


async def test_an_agent_that_blocks_the_loop_keeps_its_lease() -> None:
    store = Counting(**LEASE)
    (finished,) = await run_tasks(store, blocks, 1.0, **BEATS)  # longer than the lease
    await one_attempt(store, finished.rollout_id)


class HoldsTheInterpreter(LitAgent[float]):
    """Lets no other thread of its process run for as many seconds as the task says."""

    needs_resources = False

    @override
    def rollout(self, task: float, resources: Any, rollout: Any) -> float:
        ctypes.PyDLL(None).usleep(int(task * 1e6))
        return 1.0


async def test_an_agent_that_holds_the_interpreter_in_its_process_keeps_its_lease() -> None:
    store = Counting(**LEASE)
    (finished,) = await run_tasks(store, HoldsTheInterpreter(), 0.9, **BEATS, isolation="process")
    await one_attempt(store, finished.rollout_id)
    assert store.named == {finished.attempt.attempt_id}


async def test_every_lane_s_attempt_is_named_and_none_after_its_end() -> None:
    store = Counting(lease_seconds=0.5, scan_debounce_seconds=0.05)
    made = [(await store.enqueue_rollout(input=1.0)).rollout_id for _ in range(50)]
    with runner_of(max_rollouts=50, concurrency=50, **BEATS).run_context(agent=sleeps, store=store) as runner:
        await runner.iter()
        assert runner._ready().heartbeats.held == set()
    attempts = [attempt for i in made for attempt in await store.query_attempts(i)]
    assert {attempt.attempt_id for attempt in attempts} == store.named
    assert [attempt.outcome for attempt in attempts] == ["scored"] * 50


async def test_a_store_that_takes_no_names_renews_all_claims_of_the_worker() -> None:
    store = Earlier(**LEASE)
    (finished,) = await run_tasks(store, sleeps, 1.0, **BEATS)
    await one_attempt(store, finished.rollout_id)


@pytest.mark.parametrize(("mode", "agent"), [("thread", blocks), ("asyncio", sleeps)])
async def test_an_attempt_whose_silence_is_limited_is_kept_alive_while_its_agent_runs(mode: str, agent: Any) -> None:
    store = InMemoryLightningStore(scan_debounce_seconds=0.05)
    config = RolloutConfig(unresponsive_seconds=0.3)
    (finished,) = await run_tasks(store, agent, 0.6, config=config, heartbeat_launch_mode=mode)
    await one_attempt(store, finished.rollout_id)
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("-attempts")]


class Timed(InMemoryLightningStore):
    """Records how far the time of each heartbeat of an attempt is from its own, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.off: list[float] = []

    @override
    async def update_attempt(self, *place: Any, **changes: Any) -> Attempt:
        if "last_heartbeat_time" in changes:
            self.off.append(abs(changes["last_heartbeat_time"] - time.time()))
        return await super().update_attempt(*place, **changes)


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
async def test_heartbeats_of_an_attempt_carry_the_store_s_time_whatever_the_machine_s_is(
    skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: time.time() + skew))
    store = Timed()
    (finished,) = await run_tasks(store, blocks, 0.6, config=RolloutConfig(unresponsive_seconds=0.3))
    await one_attempt(store, finished.rollout_id)
    assert store.off
    assert max(store.off) < 1800


async def test_over_http_the_heartbeats_close_their_own_connections() -> None:
    store = Counting()
    async with serving(store) as server:
        client = LightningStoreClient(server.endpoint)
        await serve_until(client, store.third, heartbeat_interval=0.03, interval_jitter=0.0)
        await client.close()
    assert len(store.beats) >= 3


async def test_one_step_after_serving_the_queue_keeps_its_lease() -> None:
    """The worker has sent heartbeats before, so that from then on its silence would cost it its rollouts."""
    store = InMemoryLightningStore(**LEASE)
    with runner_of(**BEATS).run_context(agent=sleeps, store=store) as runner:
        await runner.iter(exit_when_idle=0.05)
        other = asyncio.create_task(store.dequeue_rollout("other", timeout=20))
        finished = await runner.step(1.0)
    other.cancel()
    await one_attempt(store, finished.rollout_id)


@pytest.mark.parametrize("reads", ["an earlier attempt", "success", "nothing"])
async def test_an_attempt_that_may_still_count_goes_on(reads: str, caplog: pytest.LogCaptureFixture) -> None:
    """A replica may be behind, a program may have reported the success itself, and a store may lack the query."""
    asked = asyncio.Event()

    class Behind(InMemoryLightningStore):
        @override
        async def query_rollouts(self, *args: Any, **filters: Any) -> Any:
            found = await super().query_rollouts(*args, **filters)
            asked.set()
            if reads == "nothing":
                raise NotImplementedError("query_rollouts")
            attempt = first if reads == "an earlier attempt" else found[0].attempt
            status = "running" if reads == "an earlier attempt" else "succeeded"
            return [each.model_copy(update={"attempt": attempt, "status": status}) for each in found]

    async def waits(task: Any) -> float:
        await asked.wait()
        await asyncio.sleep(0.3)
        return 1.0

    store = Behind()
    queued = await store.enqueue_rollout(1, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    taken = await store.dequeue_rollout()
    assert taken is not None
    first = taken.attempt
    await store.update_attempt(queued.rollout_id, first.attempt_id, status="failed")
    runner: LitAgentRunner[Any] = LitAgentRunner(
        OtelTracer(), heartbeat_interval=0.05, interval_jitter=0.0, heartbeat_launch_mode="asyncio", max_rollouts=1
    )
    with runner.run_context(agent=rollout(waits), store=store):
        await asyncio.wait_for(runner.iter(), 20)
    attempts = await store.query_attempts(queued.rollout_id)
    assert (attempts[-1].sequence_id, attempts[-1].outcome, attempts[-1].reward) == (2, "scored", 1.0)
    assert ("no query_rollouts" in caplog.text) == (reads == "nothing")


@pytest.mark.parametrize("mode", ["thread", "asyncio"])
@pytest.mark.parametrize("kind", ["coroutine", "function"])
@pytest.mark.parametrize("why", ["cancelled", "retried", "away once"])
async def test_an_attempt_that_can_no_longer_count_is_ended(kind: str, mode: str, why: str) -> None:
    class Away(InMemoryLightningStore):
        failures = 1 if why == "away once" else 0

        @override
        async def query_rollouts(self, *args: Any, **filters: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("away")
            return await super().query_rollouts(*args, **filters)

    store, started, over, ended = Away(), threading.Event(), threading.Event(), list[str]()

    async def waits(task: Any) -> float:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("coroutine")
            raise
        return 1.0

    def blocks(task: Any) -> float:  # in a thread, which cannot be ended and is abandoned
        started.set()
        assert over.wait(60)
        return 1.0

    runner: LitAgentRunner[Any] = LitAgentRunner(
        OtelTracer(), heartbeat_interval=0.05, interval_jitter=0.0, heartbeat_launch_mode=mode, max_rollouts=1
    )
    queued = await store.enqueue_rollout(1)
    agent = rollout(waits) if kind == "coroutine" else rollout(blocks)
    with runner.run_context(agent=agent, store=store):
        serving = asyncio.create_task(runner.iter())
        assert await asyncio.to_thread(started.wait, 20)
        if why == "retried":
            await store.start_attempt(queued.rollout_id)
        else:
            await store.update_rollout(queued.rollout_id, status="cancelled")
        await asyncio.wait_for(serving, 20)
    over.set()
    [attempt, *_] = await store.query_attempts(queued.rollout_id)
    assert (attempt.outcome, attempt.outcome_reason) == ("cancelled", "cancelled")
    assert attempt.error is not None
    assert ("A later attempt" if why == "retried" else "ended (cancelled)") in attempt.error.message
    assert ended == ([kind] if kind == "coroutine" else [])
