"""The contract of tracers, and the tracer that keeps nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typing_extensions import override

from agentlightning.emitter import emit_message
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.base import Tracer, get_active_tracer, with_active_tracer_context
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer


class Listening(DummyTracer):
    """A tracer as a user may write one: it collects what is emitted."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.life: list[str] = []

    @override
    def init(self, *args: Any, **kwargs: Any) -> None:
        self.life.append("init")

    @override
    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self.life.append("teardown_worker")

    @override
    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.life.append("teardown")

    @override
    def create_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.heard.append(name)
        return super().create_span(name, *args, **kwargs)

    @override
    @with_active_tracer_context
    @asynccontextmanager
    async def trace_context(self, name: str | None = None, **kwargs: Any) -> AsyncIterator[None]:
        yield


async def test_a_tracer_of_ones_own_hears_the_emitters() -> None:
    tracer = Listening()
    async with tracer.trace_context("x"):
        emit_message("hello")
    assert tracer.heard == ["agentlightning.message"]
    assert get_active_tracer() is None


async def test_the_tracer_is_inactive_after_a_failure() -> None:
    tracer = Listening()
    with pytest.raises(KeyError):
        async with tracer.trace_context("x"):
            raise KeyError
    assert get_active_tracer() is None


def test_lifespan_binds_the_store_and_undoes_what_it_did() -> None:
    tracer, store = Listening(), InMemoryLightningStore()
    with tracer.lifespan(store):
        assert tracer.worker_id == 0
        assert tracer._store is store
    assert tracer.life == ["init", "teardown_worker", "teardown"]


async def test_a_coroutine_function_may_still_be_run_in_a_trace() -> None:
    async def double(x: int) -> int:
        return 2 * x

    with pytest.warns(DeprecationWarning, match="use trace_context"):
        assert await Listening().trace_run_async(double, 4) == 8


def test_a_function_may_still_be_run_in_a_trace_on_its_own_thread() -> None:
    async def later() -> str:
        return "said"

    def program(x: int, *, fails: bool = False) -> int:
        emit_message(asyncio.run(later()))
        if fails:
            raise KeyError(x)
        assert threading.current_thread() is threading.main_thread()
        return 2 * x

    tracer = OtelTracer()
    with tracer.lifespan():
        with pytest.warns(DeprecationWarning, match="use trace_context"):
            assert tracer.trace_run(program, 4) == 8
        assert [span.name for span in tracer.get_last_trace()] == ["agentlightning.message"]
        with pytest.warns(DeprecationWarning, match="use trace_context"), pytest.raises(KeyError):
            tracer.trace_run(program, 4, fails=True)
        assert len(tracer.get_last_trace()) == 1
    assert get_active_tracer() is None


async def test_a_function_is_not_run_in_a_trace_where_a_loop_runs() -> None:
    with (
        pytest.warns(DeprecationWarning, match="use trace_context"),
        pytest.raises(RuntimeError, match="Await trace_run_async"),
    ):
        Listening().trace_run(int, 4)


def test_the_base_class_says_which_tracer_can() -> None:
    with pytest.raises(NotImplementedError, match="use OtelTracer"):
        Tracer().trace_context("x")
    with pytest.raises(NotImplementedError, match="DummyTracer has no trace_context"):
        DummyTracer().trace_context("x")


def test_a_dummy_span_is_a_copy_of_what_it_was_given() -> None:
    attributes = {"a": 1}
    span = DummyTracer().create_span("x", attributes, timestamp=5.0)
    attributes["a"] = 2
    assert (span.attributes, span.start_time, span.end_time) == ({"a": 1}, 5.0, 5.0)
    assert span.status.status_code == "OK"


def test_a_dummy_operation_records_its_exception() -> None:
    with pytest.raises(ValueError, match="no"), DummyTracer().operation_context("op") as recording:
        raise ValueError("no")
    span = recording.get_recorded_span()
    assert (span.status.status_code, span.status.description) == ("ERROR", "no")
    assert span.attributes["exception.type"] == "ValueError"


def test_a_dummy_operation_has_no_span_before_its_end() -> None:
    with DummyTracer().operation_context("op") as recording, pytest.raises(ValueError, match="End time is not set"):
        recording.get_recorded_span()
