"""Concurrent rollouts in one process never cross, whether they run as tasks or as threads."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace

from agentlightning.emitter import emit_message, emit_reward
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout

from .test_otel import ids


async def messages(store: InMemoryLightningStore, rollout: AttemptedRollout) -> set[object]:
    return {span.attributes["agentlightning.message.body"] for span in await store.query_spans(rollout.rollout_id)}


async def test_many_rollouts_at_once_as_tasks_threads_and_threads_of_threads(
    store: InMemoryLightningStore, tracer: OtelTracer
) -> None:
    meet = asyncio.Barrier(8) if hasattr(asyncio, "Barrier") else None

    async def run_rollout(rollout: AttemptedRollout) -> None:
        async with tracer.trace_context("trace", **ids(rollout)):
            if meet is not None:
                await meet.wait()  # all contexts are open
            emit_message(f"{rollout.rollout_id} task")
            await asyncio.to_thread(emit_message, f"{rollout.rollout_id} thread")
            await asyncio.gather(asyncio.to_thread(emit_message, f"{rollout.rollout_id} child"))
            carried = contextvars.copy_context()
            thread = threading.Thread(target=carried.run, args=(emit_message, f"{rollout.rollout_id} carried"))
            thread.start()
            await asyncio.to_thread(thread.join)

    rollouts = [await store.start_rollout(input=i) for i in range(8)]
    await asyncio.gather(*(run_rollout(rollout) for rollout in rollouts))
    for rollout in rollouts:
        expected = {f"{rollout.rollout_id} {who}" for who in ("task", "thread", "child", "carried")}
        assert await messages(store, rollout) == expected


async def test_a_plain_thread_finds_the_only_open_scope(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    with ThreadPoolExecutor(1) as pool:  # its thread is older than the scope
        pool.submit(int).result()
        async with tracer.trace_context("trace", **ids(rollout)):
            await asyncio.to_thread(lambda: pool.submit(emit_message, "pool").result())
    assert await messages(store, rollout) == {"pool"}


async def test_a_plain_thread_cannot_choose_between_two_scopes(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    other = await store.start_rollout(input="other")
    opened, done = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with tracer.trace_context("other", **ids(other)):
            opened.set()
            await done.wait()

    holding = asyncio.create_task(hold())
    await opened.wait()
    async with tracer.trace_context("trace", **ids(rollout)):
        with ThreadPoolExecutor(1) as pool:
            nowhere = contextvars.Context()  # as in a thread that was started before both
            error = await asyncio.to_thread(lambda: nowhere.run(pool.submit, emit_message, "whose?").exception())
    done.set()
    await holding
    assert isinstance(error, RuntimeError)
    assert "copy_context" in str(error)


async def test_a_left_over_task_cannot_write_into_the_next_rollout(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    go = asyncio.Event()

    async def late() -> None:
        await go.wait()
        emit_message("late")

    async with tracer.trace_context("first", **ids(rollout)):
        left_over = asyncio.create_task(late())
    other = await store.start_rollout(input="other")
    async with tracer.trace_context("second", **ids(other)):
        go.set()
        with pytest.raises(RuntimeError, match="No active tracer found"):
            await left_over
    assert await messages(store, other) == set()


class _OwnRun(threading.Thread):
    """A thread whose work is a method, as in libraries."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        self._work()


def _by_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _by_subclass(work: Callable[[], object]) -> threading.Thread:
    thread = _OwnRun(work)
    thread.start()
    return thread


def _by_timer(work: Callable[[], object]) -> threading.Thread:
    timer = threading.Timer(0.0, work)
    timer.start()
    return timer


def _by_thread_of_thread(work: Callable[[], object]) -> threading.Thread:
    return _by_thread(lambda: _by_thread(work).join())


def _by_pool(work: Callable[[], object]) -> threading.Thread:
    pool = ThreadPoolExecutor(1)
    pool.submit(work)
    pool.shutdown(wait=False)
    return _by_thread(lambda: pool.shutdown(wait=True))


def _by_context(work: Callable[[], object]) -> threading.Thread:
    return _by_thread(lambda: contextvars.copy_context().run(work))


def _by_bare_thread(work: Callable[[], object]) -> threading.Thread:
    ended = _thread.allocate_lock()
    ended.acquire()

    def run(work: Callable[[], object], *, then: Callable[[], None]) -> None:
        work()
        then()

    _thread.start_new_thread(run, (work,), {"then": ended.release})
    return _by_thread(lambda: ended.acquire(timeout=30))


@pytest.mark.parametrize(
    "start",
    [_by_thread, _by_subclass, _by_timer, _by_thread_of_thread, _by_pool, _by_context, _by_bare_thread],
    ids=lambda f: f.__name__,
)
async def test_a_left_over_thread_cannot_write_into_the_next_rollout(
    store: InMemoryLightningStore,
    tracer: OtelTracer,
    rollout: AttemptedRollout,
    start: Callable[[Callable[[], object]], threading.Thread],
    caplog: pytest.LogCaptureFixture,
) -> None:
    go, raised = threading.Event(), list[Exception]()

    def late() -> None:
        go.wait(20)
        trace.get_tracer("a library").start_span("late").end()
        for emit in (lambda: emit_reward(100.0), lambda: emit_message("late")):
            try:
                emit()
            except RuntimeError as error:
                raised.append(error)

    async with tracer.trace_context("first", **ids(rollout)):
        left_over = start(late)
    other = await store.start_rollout(input="other")
    async with tracer.trace_context("second", **ids(other)):
        emit_reward(0.5)
        go.set()
        await asyncio.to_thread(left_over.join)
    assert [
        span.attributes.get("agentlightning.reward.0.value") for span in await store.query_spans(other.rollout_id)
    ] == [0.5]
    assert list(await store.query_spans(rollout.rollout_id)) == []
    assert [rollout.rollout_id in str(error) for error in raised] == [True, True]
    assert caplog.text.count("still emits") == 1


async def test_a_long_lived_pool_works_for_whoever_submits(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    with ThreadPoolExecutor(1) as pool:  # its thread is started by the first rollout
        for number in range(3):
            rollout = await store.start_rollout(input=number)
            async with tracer.trace_context("trace", **ids(rollout)):
                await asyncio.to_thread(lambda text=str(number): pool.submit(emit_message, text).result())
            assert await messages(store, rollout) == {str(number)}


async def test_jobs_of_one_pool_find_their_rollout_among_many(
    store: InMemoryLightningStore, tracer: OtelTracer
) -> None:
    meet = asyncio.Barrier(4)
    with ThreadPoolExecutor(2) as pool:

        async def run_rollout(rollout: AttemptedRollout) -> None:
            async with tracer.trace_context("trace", **ids(rollout)):
                await meet.wait()
                await asyncio.wrap_future(pool.submit(emit_message, rollout.rollout_id))
                await meet.wait()

        rollouts = [await store.start_rollout(input=i) for i in range(4)]
        await asyncio.gather(*(run_rollout(rollout) for rollout in rollouts))
    for rollout in rollouts:
        assert await messages(store, rollout) == {rollout.rollout_id}


async def test_a_context_inside_a_context_is_refused_and_the_outer_one_goes_on(tracer: OtelTracer) -> None:
    async with tracer.trace_context("outer"):
        with pytest.raises(ValueError, match="An active tracer is already set"):
            async with tracer.trace_context("inner"):
                pass
        emit_message("still here")
    assert len(tracer.get_last_trace()) == 1


async def test_each_task_sees_its_own_last_trace(tracer: OtelTracer) -> None:
    async def trace(count: int) -> int:
        async with tracer.trace_context():
            for _ in range(count):
                emit_message("x")
                await asyncio.sleep(0)
        return len(tracer.get_last_trace())

    assert await asyncio.gather(*(trace(count) for count in (1, 2, 3))) == [1, 2, 3]


def test_the_active_tracer_is_set_once_and_cleared_any_number_of_times() -> None:
    tracer = DummyTracer()
    assert get_active_tracer() is None
    set_active_tracer(tracer)
    assert get_active_tracer() is tracer
    with pytest.raises(ValueError, match=r"An active tracer is already set. Cannot set a new one\."):
        set_active_tracer(tracer)
    clear_active_tracer()
    clear_active_tracer()
    assert get_active_tracer() is None


def test_one_thread_does_not_see_the_active_tracer_of_another_loop() -> None:
    set_active_tracer(DummyTracer())
    try:

        async def look() -> Tracer | None:
            return get_active_tracer()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(asyncio.run, look()).result() is None
    finally:
        clear_active_tracer()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_is_not_in_the_scope_of_its_parent(tracer: OtelTracer) -> None:
    async with tracer.trace_context():
        child = os.fork()
        if child == 0:
            os._exit(7 if get_active_tracer() is None else 1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


async def test_a_reward_lies_between_the_calls_before_and_after_it(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    call = rollout.rollout_id, rollout.attempt.attempt_id
    async with tracer.trace_context("trace", **ids(rollout)):
        before = await store.get_next_span_sequence_id(*call)
        emit_reward(0.5)
        after = await store.get_next_span_sequence_id(*call)
        emit_message("numbered at the end")
    reward, message = await store.query_spans(rollout.rollout_id)
    assert before < reward.sequence_id < after < message.sequence_id


async def test_a_reward_emitted_in_a_thread_lies_between_its_calls_too(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    call = rollout.rollout_id, rollout.attempt.attempt_id
    loop = asyncio.get_running_loop()

    def agent() -> tuple[int, int]:
        def ask() -> int:
            return asyncio.run_coroutine_threadsafe(store.get_next_span_sequence_id(*call), loop).result(10)

        before = ask()
        emit_reward(0.5)
        return before, ask()

    async with tracer.trace_context("trace", **ids(rollout)):
        before, after = await asyncio.to_thread(agent)
    (reward,) = await store.query_spans(rollout.rollout_id)
    assert before < reward.sequence_id < after
