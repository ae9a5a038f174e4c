"""The program's own OpenTelemetry goes on working beside ours, whether it is set up before, after, or badly."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult
from opentelemetry.util._once import Once
from typing_extensions import override

from agentlightning.emitter import emit_message, emit_reward, operation
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer import provider as provider_module
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout
from tests.stubs.processes import run_program

from .test_otel import ids

REWARD, MESSAGE, OPERATION = (f"agentlightning.{name}" for name in ("annotation", "message", "operation"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nobody has set a provider."""
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace_api, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(provider_module, "_watched", [])


class Theirs:
    """A set-up as programs have it: a provider with a processor and an exporter."""

    def __init__(self, sampler: Sampler = ALWAYS_ON, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False, **settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def set(self) -> Theirs:
        trace_api.set_tracer_provider(self.provider)
        return self

    @property
    def exported(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


def library(name: str = "theirs") -> None:
    """Act as an instrumented library does."""
    with trace_api.get_tracer("library").start_as_current_span(name):
        pass


async def stored(store: InMemoryLightningStore, rollout: AttemptedRollout) -> list[str]:
    return [span.name for span in await store.query_spans(rollout.rollout_id)]


@pytest.fixture
def started(store: InMemoryLightningStore) -> Iterator[OtelTracer]:
    """A tracer that is initialised before the test begins, so before the program sets anything up."""
    tracer = OtelTracer()
    with tracer.lifespan(store):
        yield tracer


async def test_a_provider_set_before_gets_its_spans_and_none_of_ours(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    theirs = Theirs().set()
    for tracer in (OtelTracer(), OtelTracer()):
        with tracer.lifespan(store):
            async with tracer.trace_context("trace", **ids(rollout)) as ours:
                library()
                emit_reward(0.5)
                ours.start_span("by hand").end()
    assert theirs.exported == ["theirs"] * 2
    assert sorted(await stored(store, rollout)) == sorted(["theirs", REWARD, "by hand"] * 2)


async def test_spans_of_libraries_keep_their_place_below_our_operations(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    theirs = Theirs().set()
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            with operation(name="outer"):
                library("child")
            with trace_api.get_tracer("library").start_as_current_span("parent"):
                emit_message("x")
    outer, child, parent, message = await store.query_spans(rollout.rollout_id)
    assert (child.parent_id, child.trace_id) == (outer.span_id, outer.trace_id)
    assert (message.parent_id, message.trace_id) == (parent.span_id, parent.trace_id)
    assert theirs.exported == ["child", "parent"]


async def test_a_provider_set_after_gets_the_spans_of_old_and_new_tracers(
    store: InMemoryLightningStore, started: OtelTracer, rollout: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    old = trace_api.get_tracer("library that was imported early")
    async with started.trace_context("trace", **ids(rollout)):
        library("before")
        with caplog.at_level(logging.WARNING):
            theirs = Theirs().set()
        assert caplog.text == ""
        assert trace_api.get_tracer_provider() is theirs.provider
        with old.start_as_current_span("old"):
            pass
        emit_message("x")
        library("new")
    assert theirs.exported == ["old", "new"]
    assert await stored(store, rollout) == ["before", "old", MESSAGE, "new"]


async def test_a_provider_set_between_two_rollouts_is_seen_by_the_second(
    store: InMemoryLightningStore, started: OtelTracer, rollout: AttemptedRollout
) -> None:
    async with started.trace_context("first", **ids(rollout)):
        library("first")
    theirs = Theirs().set()
    second = await store.start_rollout(input="x")
    async with started.trace_context("second", **ids(second)):
        library("second")
    assert (await stored(store, rollout), await stored(store, second)) == (["first"], ["second"])
    assert theirs.exported == ["second"]


async def test_a_processor_added_to_the_stand_in_sees_the_libraries_and_none_of_ours(
    store: InMemoryLightningStore, started: OtelTracer, rollout: AttemptedRollout
) -> None:
    provider = trace_api.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with started.trace_context("trace", **ids(rollout)):
        library()
        emit_message("x")
    assert [span.name for span in exporter.get_finished_spans()] == ["theirs"]
    assert await stored(store, rollout) == ["theirs", MESSAGE]


async def test_what_their_sampler_drops_is_dropped_below_our_operations_too_and_ours_is_kept(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    theirs = Theirs(ParentBased(ALWAYS_OFF)).set()
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            with operation(name="outer"):
                library()
            emit_reward(1.0)
    assert theirs.exported == []
    assert sorted(await stored(store, rollout)) == [REWARD, OPERATION]


async def test_a_sampler_that_fails_loses_nothing_of_ours(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    class Broken(Sampler):
        @override
        def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
            raise KeyError("sampler")

        @override
        def get_description(self) -> str:
            return "broken"

    Theirs(Broken()).set()
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            emit_reward(1.0)
    assert await stored(store, rollout) == [REWARD]


async def test_processors_that_fail_or_are_shut_down_lose_nothing_of_ours(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    class Broken(SpanProcessor):
        @override
        def on_end(self, span: ReadableSpan) -> None:
            raise KeyError("processor")

    theirs = Theirs().set()
    theirs.provider.add_span_processor(Broken())
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            with operation(name="outer"):
                emit_message("x")
            with pytest.raises(KeyError):  # as it would be without us
                library()
            theirs.provider.shutdown()
            emit_reward(1.0)
    assert sorted(await stored(store, rollout)) == [REWARD, MESSAGE, OPERATION]


async def test_ids_have_the_form_that_the_program_uses(
    store: InMemoryLightningStore, rollout: AttemptedRollout
) -> None:
    class Dated(RandomIdGenerator):
        @override
        def generate_trace_id(self) -> int:
            return (0x66666666 << 96) | (super().generate_trace_id() >> 32)

    Theirs(id_generator=Dated()).set()
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            with operation(name="root"):
                library()
    assert all(span.trace_id.startswith("66666666") for span in await store.query_spans(rollout.rollout_id))


@pytest.mark.parametrize("provider", [False, True], ids=["no provider", "the program's provider"])
async def test_an_agent_that_seeds_random_loses_no_span_and_keeps_its_numbers(
    store: InMemoryLightningStore, rollout: AttemptedRollout, provider: bool
) -> None:
    if provider:
        Theirs().set()
    tracer, drawn = OtelTracer(), list[float]()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            for turn in range(3):
                random.seed(0)
                with operation(name=f"turn {turn}"):
                    emit_message("x")
                emit_reward(1.0)
                drawn.append(random.random())
    assert sorted(await stored(store, rollout)) == sorted([OPERATION, MESSAGE, REWARD] * 3)
    assert drawn == [random.Random(0).random()] * 3


async def test_a_provider_of_another_make_is_told_of_and_ours_goes_on(
    store: InMemoryLightningStore, rollout: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(trace_api.NoOpTracerProvider):
        """Takes no processors."""

    trace_api.set_tracer_provider(Own())
    tracer = OtelTracer()
    with caplog.at_level(logging.WARNING), tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            library()
            emit_reward(1.0)
    assert await stored(store, rollout) == [REWARD]
    assert caplog.text.count("Own does not support span processors") == 1


async def test_a_span_that_a_library_leaves_current_is_not_the_parent_of_the_next_rollout(
    store: InMemoryLightningStore, started: OtelTracer, rollout: AttemptedRollout
) -> None:
    from opentelemetry import context

    async with started.trace_context("first", **ids(rollout)):
        forgotten = trace_api.get_tracer("library").start_span("forgotten")
        context.attach(trace_api.set_span_in_context(forgotten))
    second = await store.start_rollout(input="x")
    async with started.trace_context("second", **ids(second)):
        emit_message("x")
    (message,) = await store.query_spans(second.rollout_id)
    assert message.parent_id is None


def test_a_switched_off_opentelemetry_loses_no_reward() -> None:
    program = (
        "import asyncio\n"
        "from agentlightning.emitter import emit_reward, operation\n"
        "from agentlightning.store.memory import InMemoryLightningStore\n"
        "from agentlightning.tracer.otel import OtelTracer\n"
        "async def main():\n"
        "    store, tracer = InMemoryLightningStore(), OtelTracer()\n"
        "    rollout = await store.start_rollout(input='x')\n"
        "    with tracer.lifespan(store):\n"
        "        ids = {'rollout_id': rollout.rollout_id, 'attempt_id': rollout.attempt.attempt_id}\n"
        "        async with tracer.trace_context(**ids):\n"
        "            with operation(name='x') as op:\n"
        "                op.set_output(1)\n"
        "            emit_reward(0.5)\n"
        "    print([span.name for span in await store.query_spans(rollout.rollout_id)])\n"
        "asyncio.run(main())\n"
    )
    done = run_program("python", "-W", "error", "-c", program, environment={"OTEL_SDK_DISABLED": "true"})
    assert done.stderr == ""
    assert done.stdout == "['agentlightning.annotation']\n"
