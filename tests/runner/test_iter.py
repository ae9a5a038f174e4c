"""Serving the queue: waiting for work, several rollouts at once, stopping, and a store that goes away."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from typing_extensions import override

from agentlightning.emitter import emit_message, find_final_reward, get_message_value
from agentlightning.errors import StoreUnreachableError
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner, claims
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.wrappers.compat import LightningStoreScoped
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Span


@rollout
def one(task: Any) -> float:
    return 1.0


def runner_of(**settings: Any) -> LitAgentRunner[Any]:
    return LitAgentRunner(OtelTracer(), **settings)


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

    runner = runner_of()
    first, second = [await store.enqueue_rollout(input=task) for task in "xy"]
    with runner.run_context(agent=agent, store=store):
        serving = asyncio.create_task(runner.iter(event=event))
        await begun.wait()
        event.set()
        go.set()
        await asyncio.wait_for(serving, 5.0)
    assert (await store.get_rollout_by_id(first.rollout_id)).status == "succeeded"  # type: ignore[union-attr]
    assert (await store.get_rollout_by_id(second.rollout_id)).status == "queuing"  # type: ignore[union-attr]


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

    runner = runner_of()
    made = await store.enqueue_rollout(input="x")
    with runner.run_context(agent=rollout(sync_agent if in_thread else async_agent), store=store):
        serving = asyncio.create_task(runner.iter())
        assert await asyncio.to_thread(begun.wait, 10)
        serving.cancel()
        await asyncio.wait({serving})
    release.set()
    assert serving.cancelled()
    finished = await store.get_rollout_by_id(made.rollout_id)
    assert isinstance(finished, AttemptedRollout)
    assert (finished.attempt.status, finished.attempt.outcome, finished.attempt.outcome_reason) == (
        "failed",
        "cancelled",
        "stopped",
    )
    assert len(await store.query_spans(made.rollout_id)) == 1


@pytest.mark.parametrize("in_thread", [True, False])
async def test_concurrency_runs_that_many_at_once_and_traces_do_not_mix(
    store: InMemoryLightningStore, in_thread: bool
) -> None:
    together = threading.Barrier(4)
    meeting, arrived = asyncio.Event(), 0

    def sync_agent(task: int) -> float:
        together.wait(10)
        emit_message(f"task {task}")
        return float(task)

    async def async_agent(task: int) -> float:
        nonlocal arrived
        arrived += 1
        if arrived % 4 == 0:
            meeting.set()
        await meeting.wait()
        emit_message(f"task {task}")
        return float(task)

    runner = runner_of(concurrency=4, max_rollouts=8)
    made = [await store.enqueue_rollout(input=i) for i in range(8)]
    with runner.run_context(agent=rollout(sync_agent if in_thread else async_agent), store=store):
        await asyncio.wait_for(runner.iter(), 30)
    for i, enqueued in enumerate(made):
        spans = await store.query_spans(enqueued.rollout_id)
        assert spans[0].attributes["agentlightning.message.body"] == f"task {i}"
        assert spans[1].attributes["agentlightning.reward.0.value"] == float(i)
        assert len(spans) == 2


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

    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(200)])
    with runner_of(concurrency=200, max_rollouts=200).run_context(agent=agent, store=store) as runner:
        await asyncio.wait_for(runner.iter(), 60)
    for i, enqueued in enumerate(made):
        spans = (await store.query_spans(enqueued.rollout_id)).items
        assert [get_message_value(span) for span in spans[:3]] == [f"task {i} step {step}" for step in range(3)]
        assert find_final_reward(spans[3:]) == float(i)
        assert len(spans) == 4


class Watched(InMemoryLightningStore):
    """Notes how many rollouts were claimed with each question, and how many questions were open at a time."""

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
    await store.close()


async def test_max_rollouts_counts_over_all_lanes(store: InMemoryLightningStore) -> None:
    for i in range(9):
        await store.enqueue_rollout(input=i)
    runner = runner_of(concurrency=3, max_rollouts=5)
    with runner.run_context(agent=one, store=store):
        await runner.iter()
    assert len(await store.query_rollouts(status_in=["succeeded"])) == 5


async def test_an_idle_runner_may_go_home(store: InMemoryLightningStore) -> None:
    await store.enqueue_rollout(input="x")
    runner = runner_of(concurrency=2)
    with runner.run_context(agent=one, store=store):
        await asyncio.wait_for(runner.iter(exit_when_idle=0.1), 10)
    assert len(await store.query_rollouts(status_in=["succeeded"])) == 1


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
    command = [sys.executable, "-c", ALONE, beside]
    program = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert program.returncode == 0, program.stderr
    serves = [] if beside == "nothing" else ["serves on: True"]
    assert program.stdout.splitlines() == [*serves, str(["succeeded"] * 3)]


class Asked(InMemoryLightningStore):
    """Notes for how long each question was to be held open."""

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
    runner = runner_of(poll_interval=0.04)
    with runner.run_context(agent=one, store=store):
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
    await store.close()


class OldFashioned(InMemoryLightningStore):
    """A store of somebody else's, whose claims cannot wait."""

    asked = 0

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:  # type: ignore[override]
        self.asked += 1
        return await super().dequeue_rollout(worker_id)


async def test_a_store_without_long_poll_is_asked_after_growing_pauses() -> None:
    store, event = OldFashioned(), threading.Event()
    runner = runner_of()
    with runner.run_context(agent=one, store=store):
        serving = asyncio.create_task(runner.iter(event=event))
        await asyncio.sleep(0.5)
        made = await store.enqueue_rollout(input="x")
        assert len(await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=10)) == 1
        event.set()
        await serving
    assert 3 < store.asked < 15
    await store.close()


class Away(InMemoryLightningStore):
    """A store that does not answer claims for a while."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    @override
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, run_id: str | None = None
    ) -> AttemptedRollout | None:
        if self.failures:
            self.failures -= 1
            raise StoreUnreachableError("no answer")
        return await super().dequeue_rollout(worker_id, timeout=timeout, run_id=run_id)


async def test_a_short_outage_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    store = Away(3)
    await store.enqueue_rollout(input="x")
    runner = runner_of(max_rollouts=1)
    with runner.run_context(agent=one, store=store), caplog.at_level(logging.INFO):
        await runner.iter()
    assert caplog.text.count("the store does not answer") == 1
    assert "the store answers again" in caplog.text
    await store.close()


async def test_a_long_outage_ends_the_runner_with_an_error() -> None:
    store = Away(10_000)
    runner = runner_of(store_unreachable_timeout=0.2)
    with (
        runner.run_context(agent=one, store=store),
        pytest.raises(StoreUnreachableError, match=r"gives up: .* \(store_unreachable_timeout=0\.2\)"),
    ):
        await runner.iter()
    await store.close()


class Deaf(InMemoryLightningStore):
    """A store that never answers a claim."""

    @override
    async def dequeue_rollout(self, *args: Any, **kwargs: Any) -> AttemptedRollout | None:
        await asyncio.Event().wait()


async def test_a_claim_that_is_never_answered_ends_the_runner_when_the_outage_is_over() -> None:
    store = Deaf()
    runner = runner_of(store_unreachable_timeout=0.2, poll_interval=0.05)
    with (
        runner.run_context(agent=one, store=store),
        pytest.raises(StoreUnreachableError, match=r"gives up: .* \(store_unreachable_timeout=0\.2\)"),
    ):
        await asyncio.wait_for(runner.iter(), 30)
    await store.close()


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
    made = await store.enqueue_rollout(input="x")
    runner = runner_of(max_rollouts=1)
    with runner.run_context(agent=one, store=store):
        await runner.iter()
    finished = await store.get_rollout_by_id(made.rollout_id)
    assert isinstance(finished, AttemptedRollout)
    assert (finished.attempt.outcome, finished.attempt.outcome_reason) == ("infrastructure_fault", "spans_refused")
    assert (finished.status, finished.attempt.sequence_id) == ("failed", 1), "a repetition would be refused, too"
    await store.close()


async def test_an_end_that_is_not_taken_is_logged_and_the_runner_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    store = Refusing()
    store.ends = False
    for task in "xy":
        await store.enqueue_rollout(input=task)
    runner = runner_of(max_rollouts=2)
    with runner.run_context(agent=one, store=store), caplog.at_level(logging.ERROR):
        await runner.iter()
    assert caplog.text.count("Its lease will run out") == 2
    await store.close()


async def test_a_late_end_does_not_disturb_the_runner(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    @rollout
    async def agent(task: str, rollout: AttemptedRollout) -> float:
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        return 1.0

    made = await store.enqueue_rollout(input="x")
    runner = runner_of(max_rollouts=1)
    with runner.run_context(agent=agent, store=store), caplog.at_level(logging.WARNING):
        await runner.iter()
    assert "ended meanwhile" in caplog.text
    assert (await store.get_rollout_by_id(made.rollout_id)).status == "failed"  # type: ignore[union-attr]


async def test_runners_of_a_run_take_its_rollouts_only(store: InMemoryLightningStore) -> None:
    mine = await store.enqueue_rollout(input="mine", run_id="run-1")
    other = await store.enqueue_rollout(input="other")
    runner = runner_of()
    with runner.run_context(agent=one, store=LightningStoreScoped(store, "run-1")):
        await runner.iter(exit_when_idle=0.1)
    assert (await store.get_rollout_by_id(mine.rollout_id)).status == "succeeded"  # type: ignore[union-attr]
    assert (await store.get_rollout_by_id(other.rollout_id)).status == "queuing"  # type: ignore[union-attr]


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
async def test_a_runner_made_here_works_in_another_process(method: str) -> None:
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await server.start()
    client = LightningStoreClient(server.endpoint)
    made = await client.enqueue_rollout(input="x")
    runner = runner_of(concurrency=2)
    child = multiprocessing.get_context(method).Process(target=_serve_in_child, args=(runner, server.endpoint))
    child.start()
    await asyncio.to_thread(child.join, 30)
    finished = await client.get_rollout_by_id(made.rollout_id)
    await client.close()
    await server.stop()
    assert child.exitcode == 0
    assert isinstance(finished, AttemptedRollout)
    assert finished.attempt.outcome == "scored"
    assert str(child.pid) in str(finished.attempt.worker_id)


def test_a_runner_pickles_before_it_is_initialised() -> None:
    runner = runner_of(reward_fn=len, policy_faults={ValueError: 0.0}, concurrency=2)
    copy: LitAgentRunner[Any] = pickle.loads(pickle.dumps(runner))
    assert copy.get_worker_id() == "Worker-Unknown"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be an integer of at least 1; got 0"),
        ({"max_rollouts": -1}, ValueError, "max_rollouts must be an integer of at least 0; got -1"),
        ({"heartbeat_launch_mode": "fork"}, ValueError, "Unsupported heartbeat launch mode: 'fork'"),
        ({"reward_fn": 3}, TypeError, "reward_fn must be callable; got 3"),
        ({"policy_faults": {"ValueError": 0.0}}, TypeError, "policy_faults maps exception classes to rewards"),
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
    with pytest.raises(RuntimeError, match=r"await iter\(\) to serve the queue, or step"):
        runner.run()


class AwayAtTheCall(InMemoryLightningStore):
    """A store whose claim is a plain function that connects first, and cannot the first time."""

    away = True

    def dequeue_rollout(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            self.away = False
            raise ConnectionRefusedError("not yet")
        return super().dequeue_rollout(*args, **kwargs)


async def test_a_store_that_is_away_when_it_is_called_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    store = AwayAtTheCall()
    await store.enqueue_rollout(input="x")
    runner = runner_of(max_rollouts=1)
    with caplog.at_level(logging.WARNING), runner.run_context(agent=one, store=store):
        await asyncio.wait_for(runner.iter(), 20.0)
    assert [r.status for r in await store.query_rollouts()] == ["succeeded"]
    assert "the store does not answer (not yet); asking again" in caplog.text
