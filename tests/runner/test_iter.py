"""Serving the queue: waiting for work, several rollouts at once, stopping, and a store that becomes unreachable."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from typing_extensions import override

from agentlightning.emitter import emit_message, find_final_reward, get_message_value
from agentlightning.errors import StoreUnreachableError
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner, claims
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.wrappers import LightningStoreScoped
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Span
from tests.stubs.processes import run_program
from tests.stubs.running import run_tasks, runner_of, serving


@rollout
def one(task: Any) -> float:
    return 1.0


async def status_of(store: InMemoryLightningStore, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def test_an_idle_runner_takes_work_as_soon_as_it_comes(store: InMemoryLightningStore) -> None:
    runner = runner_of(max_rollouts=1, poll_interval=30.0)
    with runner.run_context(agent=one, store=store):
        serving = asyncio.create_task(runner.iter())
        await asyncio.sleep(0.05)  # it waits in its long poll
        made = await store.enqueue_rollout(input="x")
        (finished,) = await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=10)
        await serving
    assert finished.status == "succeeded"


async def test_the_stop_event_ends_an_idle_runner_soon(store: InMemoryLightningStore) -> None:
    runner, event = runner_of(poll_interval=30.0), threading.Event()
    with runner.run_context(agent=one, store=store):
        serving = asyncio.create_task(runner.iter(event=event))
        await asyncio.sleep(0.05)
        event.set()
        await asyncio.wait_for(serving, 2.0)


async def test_a_rollout_that_runs_when_the_event_is_set_is_finished(store: InMemoryLightningStore) -> None:
    event, begun, go = threading.Event(), asyncio.Event(), asyncio.Event()

    @rollout
    async def agent(task: str) -> float:
        begun.set()
        await go.wait()
        return 1.0

    ids = [(await store.enqueue_rollout(input=task)).rollout_id for task in "xy"]
    with runner_of().run_context(agent=agent, store=store) as runner:
        serving = asyncio.create_task(runner.iter(event=event))
        await begun.wait()
        event.set()
        go.set()
        await asyncio.wait_for(serving, 5.0)
    assert [await status_of(store, rollout_id) for rollout_id in ids] == ["succeeded", "queuing"]


@pytest.mark.parametrize("in_thread", [True, False])
async def test_cancelling_the_runner_reports_what_ran_as_cancelled(
    store: InMemoryLightningStore, in_thread: bool
) -> None:
    begun, release = threading.Event(), threading.Event()

    def sync_agent(task: str) -> float:
        emit_message("before")
        begun.set()
        release.wait(30)
        return 1.0

    async def async_agent(task: str) -> float:
        emit_message("before")
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    made = await store.enqueue_rollout(input="x")
    agent = rollout(sync_agent if in_thread else async_agent)
    with runner_of().run_context(agent=agent, store=store) as runner:
        serving = asyncio.create_task(runner.iter())
        assert await asyncio.to_thread(begun.wait, 10)
        serving.cancel()
        await asyncio.wait({serving})
    release.set()
    assert serving.cancelled()
    attempt = await store.get_latest_attempt(made.rollout_id)
    assert attempt is not None
    assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("failed", "cancelled", "stopped")
    assert len(await store.query_spans(made.rollout_id)) == 1


async def test_threads_run_that_many_at_once_and_max_rollouts_counts_over_all_lanes(
    store: InMemoryLightningStore,
) -> None:
    together = threading.Barrier(4)

    @rollout
    def agent(task: int) -> float:
        together.wait(10)
        emit_message(f"task {task}")
        return float(task)

    last = await store.enqueue_rollout(input=8)
    finished = await asyncio.wait_for(run_tasks(store, agent, *range(1, 8), concurrency=4, max_rollouts=8), 30)
    for one in [*finished, last]:
        message, reward = await store.query_spans(one.rollout_id)
        assert get_message_value(message) == f"task {one.input}"
        assert find_final_reward([reward]) == float(one.input)


async def test_two_hundred_rollouts_run_at_once_in_one_process_and_no_span_crosses(
    store: InMemoryLightningStore,
) -> None:
    meeting, together = asyncio.Event(), 0

    @rollout
    async def agent(task: int) -> float:
        nonlocal together
        together += 1
        if together == 200:
            meeting.set()
        await meeting.wait()
        for step in range(3):
            emit_message(f"task {task} step {step}")
            await asyncio.sleep(0)
        return float(task)

    finished = await asyncio.wait_for(run_tasks(store, agent, *range(200), concurrency=200), 60)
    for i, one in enumerate(finished):
        spans = (await store.query_spans(one.rollout_id)).items
        assert [get_message_value(span) for span in spans[:3]] == [f"task {i} step {step}" for step in range(3)]
        assert find_final_reward(spans[3:]) == float(i)
        assert len(spans) == 4


class Watched(InMemoryLightningStore):
    """Records the number of rollouts claimed by each request, and the number of requests open at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.most_open = self.most_claimed = 0

    @override
    async def dequeue_many_rollouts(self, *, limit: int = 1, **rest: Any) -> list[AttemptedRollout]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            claims = await super().dequeue_many_rollouts(limit=limit, **rest)
        finally:
            self.open -= 1
        self.most_claimed = max(self.most_claimed, len(claims))
        return claims


async def test_many_lanes_ask_with_one_voice_and_claim_no_more_than_they_can_run() -> None:
    store, event, busy, go = Watched(), threading.Event(), asyncio.Event(), asyncio.Event()
    running = 0

    @rollout
    async def agent(task: int) -> float:
        nonlocal running
        running += 1
        if running == 5:
            busy.set()
        await go.wait()
        return 1.0

    with runner_of(concurrency=5).run_context(agent=agent, store=store) as runner:
        serving = asyncio.create_task(runner.iter(event=event))
        await asyncio.sleep(0.05)  # its lanes wait
        assert store.open == 1
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(9)])
        await asyncio.wait_for(busy.wait(), 10)
        assert (await store.query_rollouts(status_in=["queuing"])).total == 4
        event.set()
        go.set()
        await asyncio.wait_for(serving, 10)
    assert (store.most_open, store.most_claimed) == (1, 5)
    assert (await store.query_rollouts(status_in=["succeeded"])).total == 5
    assert (await store.query_rollouts(status_in=["queuing"])).total == 4


ALONE = """
import asyncio, sys, threading
import agentlightning as agl
from agentlightning.utils.server_launcher import PythonServerLauncherArgs


async def main(beside):
    store, server, ended = agl.InMemoryLightningStore(), None, threading.Event()
    ids = [(await store.enqueue_rollout(task)).rollout_id for task in "abc"]
    if beside == "task":
        other = asyncio.create_task(asyncio.sleep(60))
    elif beside in ("thread", "daemon"):
        threading.Thread(target=ended.wait, args=(60,), daemon=beside == "daemon").start()
    elif beside == "server":
        args = PythonServerLauncherArgs(host="127.0.0.1", port=0, launch_mode="thread")
        server = agl.LightningStoreServer(store, launcher_args=args)
        await server.start()
    runner = agl.LitAgentRunner(tracer=agl.OtelTracer(), concurrency=2)
    with runner.run_context(agent=agl.rollout(lambda task: 1.0), store=store):
        serving = runner.iter()
        if beside == "nothing":
            await serving
            await runner.iter()  # a second time, with nothing to do
        else:
            serving = asyncio.create_task(serving)
            await store.wait_for_rollouts(rollout_ids=ids)
            print("serves on:", not (await asyncio.wait([serving], timeout=0.5))[0])
            serving.cancel()
    print([rollout.status for rollout in await store.query_rollouts()])
    ended.set()
    if server is not None:
        await server.stop()


asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("beside", ["nothing", "task", "thread", "daemon", "server"])
def test_alone_with_a_store_in_memory_a_runner_ends_with_the_queue(beside: str) -> None:
    serves = [] if beside == "nothing" else ["serves on: True"]
    assert run_program("python", "-c", ALONE, beside).stdout.splitlines() == [*serves, str(["succeeded"] * 3)]


class Asked(InMemoryLightningStore):
    """Records how long each request was to be held open."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[float] = []

    @override
    async def dequeue_rollout(self, worker_id: str | None = None, *, timeout: float = 0.0, **rest: Any) -> Any:
        self.holds.append(timeout)
        return await super().dequeue_rollout(worker_id, timeout=timeout, **rest)


async def test_an_idle_runner_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LONGEST_HOLD", 0.1)
    store, event = Asked(), threading.Event()
    with runner_of(poll_interval=0.04).run_context(agent=one, store=store) as runner:
        serving = asyncio.create_task(runner.iter(event=event))
        await asyncio.sleep(0.5)
        idle = list(store.holds)
        made = await store.enqueue_rollout(input="x")
        assert len(await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=10)) == 1
        while store.holds.count(0.04) < 2:  # noqa: ASYNC110 -- after a task it begins anew; the test's time limit ends it
            await asyncio.sleep(0.001)
        event.set()
        await serving
    assert idle[0] == 0.04
    assert 0.06 <= idle[1] <= 0.08, "spread, so that runners that began together do not ask together"
    assert all(0.075 <= hold <= 0.1 for hold in idle[2:])


class OldFashioned(InMemoryLightningStore):
    """A store of somebody else's, whose claims cannot wait."""

    asked = 0

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:  # type: ignore[override]
        self.asked += 1
        return await super().dequeue_rollout(worker_id)


async def test_a_store_without_long_poll_is_asked_after_growing_pauses() -> None:
    store, event = OldFashioned(), threading.Event()
    with runner_of().run_context(agent=one, store=store) as runner:
        serving = asyncio.create_task(runner.iter(event=event))
        await asyncio.sleep(0.5)
        made = await store.enqueue_rollout(input="x")
        assert len(await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=10)) == 1
        event.set()
        await serving
    assert 3 < store.asked < 15


class Away(InMemoryLightningStore):
    """A store that does not answer claims for a while, or not even as it is called."""

    def __init__(self, failures: int, *, at_call: bool = False) -> None:
        super().__init__()
        self.failures, self.at_call = failures, at_call

    def dequeue_rollout(self, *args: Any, **kwargs: Any) -> Any:
        if self.at_call and self.failures:
            self.failures -= 1
            raise ConnectionRefusedError("no answer")
        return self._answer(*args, **kwargs)

    async def _answer(self, *args: Any, **kwargs: Any) -> AttemptedRollout | None:
        if self.failures:
            self.failures -= 1
            raise StoreUnreachableError("no answer")
        return await super().dequeue_rollout(*args, **kwargs)


@pytest.mark.parametrize("at_call", [False, True])
async def test_a_short_outage_is_survived(caplog: pytest.LogCaptureFixture, at_call: bool) -> None:
    with caplog.at_level(logging.INFO):
        (finished,) = await asyncio.wait_for(run_tasks(Away(3, at_call=at_call), one, "x"), 20)
    assert finished.status == "succeeded"
    assert caplog.text.count("the store does not respond (no answer); retrying") == 1
    assert "the store responds again" in caplog.text


class Deaf(InMemoryLightningStore):
    """A store that never answers a claim."""

    @override
    async def dequeue_rollout(self, *args: Any, **kwargs: Any) -> AttemptedRollout | None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("store", [Away(10_000), Deaf()])
async def test_a_long_outage_ends_the_runner_with_an_error(store: InMemoryLightningStore) -> None:
    with pytest.raises(StoreUnreachableError, match=r"stops: .* \(store_unreachable_timeout=0\.2\)"):
        await asyncio.wait_for(run_tasks(store, one, "x", store_unreachable_timeout=0.2, poll_interval=0.05), 30)


class Refusing(InMemoryLightningStore):
    """A store that takes no spans, or no ends of attempts."""

    spans = ends = True

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        if not self.spans:
            raise ValueError("no spans today")
        return await super().add_many_spans(spans)

    @override
    async def update_attempt(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ends:
            raise ValueError("no ends today")
        return await super().update_attempt(*args, **kwargs)


async def test_refused_spans_are_an_infrastructure_fault_and_no_success() -> None:
    store = Refusing()
    store.spans = False
    (finished,) = await run_tasks(store, one, "x")
    assert (finished.attempt.outcome, finished.attempt.outcome_reason) == ("infrastructure_fault", "spans_refused")
    assert (finished.status, finished.attempt.sequence_id) == ("failed", 1), "a repetition would be refused, too"


async def test_an_end_that_is_not_taken_is_logged_and_the_runner_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store = Refusing()
    store.ends = False
    await run_tasks(store, one, "x", "y")
    assert caplog.text.count("its lease will run out") == 2


async def test_a_late_end_does_not_disturb_the_runner(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    @rollout
    async def agent(task: str, rollout: AttemptedRollout) -> float:
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        return 1.0

    (finished,) = await run_tasks(store, agent, "x")
    assert finished.status == "failed"
    assert "already ended in the store" in caplog.text


async def test_runners_of_a_run_take_its_rollouts_only_and_may_go_home_when_idle(store: InMemoryLightningStore) -> None:
    mine = await store.enqueue_rollout(input="mine", run_id="run-1")
    other = await store.enqueue_rollout(input="other")
    with runner_of(concurrency=2).run_context(agent=one, store=LightningStoreScoped(store, "run-1")) as runner:
        await asyncio.wait_for(runner.iter(exit_when_idle=0.1), 10)
    assert [await status_of(store, one.rollout_id) for one in (mine, other)] == ["succeeded", "queuing"]


async def test_the_label_of_a_worker_names_host_process_and_index(store: InMemoryLightningStore) -> None:
    runner = runner_of()
    assert runner.get_worker_id() == "Worker-Unknown"
    with pytest.raises(ValueError, match=r"Call init_worker\(\) first"):
        runner.get_worker_label()
    await store.enqueue_rollout(input="x")
    with runner.run_context(agent=one, store=store, worker_id=3):
        assert (runner.worker_id, runner.get_worker_id()) == (3, "Worker-3")
        await runner.iter(exit_when_idle=0.05)
        (worker,) = await store.query_workers()
        assert worker.worker_id == runner.get_worker_label() == f"{socket.gethostname()}-{os.getpid()}-3"


def _serve_in_child(runner: LitAgentRunner[Any], address: str) -> None:
    async def serve() -> None:
        store = LightningStoreClient(address)
        with runner.run_context(agent=one, store=store, worker_id=7):
            await runner.iter(exit_when_idle=0.2)
        await store.close()

    asyncio.run(serve())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_runner_made_here_works_in_another_process(store: InMemoryLightningStore, method: str) -> None:
    made = await store.enqueue_rollout(input="x")
    async with serving(store) as server:
        address = (runner_of(concurrency=2), server.endpoint)
        child = multiprocessing.get_context(method).Process(target=_serve_in_child, args=address)
        child.start()
        await asyncio.to_thread(child.join, 30)
    attempt = await store.get_latest_attempt(made.rollout_id)
    assert child.exitcode == 0
    assert attempt is not None
    assert (attempt.outcome, str(child.pid) in str(attempt.worker_id)) == ("scored", True)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1; got 0"),
        ({"max_rollouts": -1}, ValueError, "max_rollouts must be at least 0; got -1"),
        (
            {"heartbeat_launch_mode": "fork"},
            ValueError,
            "Unsupported heartbeat launch mode: 'fork'",
        ),
        ({"reward_fn": 3}, TypeError, "reward_fn must be callable, such as .*; got 3"),
        ({"policy_faults": {"ValueError": 0.0}}, TypeError, "policy_faults must map exception classes to rewards"),
        ({"policy_faults": {ValueError: float("nan")}}, ValueError, "the reward for ValueError must be finite"),
    ],
)
def test_settings_are_checked_when_they_are_given(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runner_of(**settings)


def test_before_its_time_a_runner_says_what_to_call() -> None:
    runner = runner_of()
    calls: list[tuple[Callable[[], Any], str]] = [
        (runner.get_agent, r"Call init\(\) first"),
        (runner.get_store, r"Call init_worker\(\) first"),
        (lambda: runner.store, r"Call init_worker\(\) first"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match=r"Await iter\(\) to run queued rollouts, or step"):
        runner.run()
