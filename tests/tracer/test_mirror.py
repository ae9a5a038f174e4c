"""The mirror: a copy of what is stored reaches a collector, and no collector costs a rollout anything."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from agentlightning.emitter import emit_message, emit_reward
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer import mirror as mirror_module
from agentlightning.tracer.collector import Collector as Address
from agentlightning.tracer.delivery import TraceDeliveryError
from agentlightning.tracer.mirror import Mirror, close_mirror, mirror_counts, mirror_spans, open_mirror
from agentlightning.tracer.otel import OtelTracer
from agentlightning.tracer.senders import sender_to
from agentlightning.types import Span
from tests.stubs.processes import run_program
from tests.stubs.running import serving

from .collector import Collector, Reply
from .test_otel import ids

Point = Callable[[str], None]


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Iterator[Point]:
    """Point the environment at a collector; a clean mirror before and after."""
    monkeypatch.setattr(mirror_module, "_process", mirror_module._Process())
    monkeypatch.setattr(mirror_module, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(mirror_module, "_FIRST_PAUSE", 0.01)
    yield lambda url: monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", url)
    mirror_module._close_at_exit()


def mirror_to(url: str, **bounds: int) -> Mirror:
    return Mirror(sender_to(Address(f"{url}/v1/traces")), url, **bounds)


def some_spans(count: int, name: str = "span", size: int = 0) -> list[Span]:
    return [
        Span.from_attributes(
            name=f"{name} {number}",
            rollout_id="ro-1",
            attempt_id="at-1",
            sequence_id=number,
            attributes={"text": "x" * size},
            start_time=1700000000.0 + number,
            end_time=1700000001.0 + number,
        )
        for number in range(count)
    ]


async def trace(store: InMemoryLightningStore | LightningStoreClient, *messages: str) -> str:
    """Run one attempt that says these messages and return its rollout."""
    rollout = await store.start_rollout(input="x")
    tracer = OtelTracer()
    with tracer.lifespan(store):
        async with tracer.trace_context("trace", **ids(rollout)):
            for message in messages:
                emit_message(message)
            emit_reward(1.0)
    return rollout.rollout_id


# --- what arrives ------------------------------------------------------------------------------------------------


async def test_what_is_stored_is_mirrored_with_the_numbers_of_the_store(
    store: InMemoryLightningStore, point: Point
) -> None:
    with Collector() as collector:
        point(collector.url)
        rollout_id = await trace(store, "one", "two")
        stored = await store.query_spans(rollout_id)
        assert sorted(span.span_id for span in collector.spans) == sorted(span.span_id for span in stored)
        assert {(span.span_id, span.sequence_id, span.rollout_id, span.attempt_id) for span in collector.spans} == {
            (span.span_id, span.sequence_id, span.rollout_id, span.attempt_id) for span in stored
        }
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["content-type"] == "application/x-protobuf"
    assert collector.headers[0]["content-encoding"] == "gzip"


async def test_the_store_server_of_another_machine_is_a_collector_too(
    store: InMemoryLightningStore, point: Point
) -> None:
    far = InMemoryLightningStore()
    async with serving(far) as server:
        point(server.endpoint)
        rollout = await far.start_rollout(input="known there")
        near = await store.start_rollout(input="x")
        assert open_mirror()
        spans = [
            Span.from_attributes(attributes={"k": [1, 2]}, name="mirrored", sequence_id=7, **ids(rollout)),
            Span.from_attributes(attributes={}, name="unknown there", sequence_id=1, **ids(near)),
        ]
        mirror_spans(spans)
        mirror = mirror_module._process.mirror
        assert mirror is not None
        await asyncio.to_thread(close_mirror)
        (span,) = await far.query_spans(rollout.rollout_id)
        assert (span.name, span.attributes["k"], span.sequence_id) == ("mirrored", [1, 2], 7)
        assert (mirror.counts.sent, mirror.counts.lost) == (1, 1)
    await far.close()


async def test_a_trace_that_no_store_gets_is_not_mirrored(point: Point) -> None:
    with Collector() as collector:
        point(collector.url)
        tracer = OtelTracer()
        with tracer.lifespan():
            async with tracer.trace_context("local"):
                emit_message("mine")
    assert collector.paths == []


async def test_spans_that_the_store_refused_are_mirrored_all_the_same(
    store: InMemoryLightningStore, point: Point
) -> None:
    with Collector() as collector:
        point(collector.url)
        tracer = OtelTracer()
        with tracer.lifespan(store), pytest.raises(TraceDeliveryError):
            async with tracer.trace_context("trace", rollout_id="ro-none", attempt_id="at-none"):
                emit_message("x")
        assert [span.rollout_id for span in collector.spans] == ["ro-none"]


async def test_without_the_variable_there_is_no_mirror(store: InMemoryLightningStore, point: Point) -> None:
    await trace(store, "x")
    assert mirror_counts().offered == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "agentlightning-mirror"]


def test_many_spans_go_in_batches_and_in_order() -> None:
    with Collector() as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(1200))
        mirror.close(20)
        assert [span.sequence_id for span in collector.spans] == list(range(1200))
        assert len(collector.bodies) == 3


def test_large_spans_go_in_smaller_batches() -> None:
    with Collector() as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(4, size=2 * 1024 * 1024))
        mirror.close(20)
        assert len(collector.bodies) == 4


def test_the_headers_of_opentelemetry_are_sent_along(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s%20cret,tenant=a")
    with Collector() as collector:
        point(collector.url)
        open_mirror()
        mirror_spans(some_spans(1))
        close_mirror(20)
    assert (collector.headers[0]["api-key"], collector.headers[0]["tenant"]) == ("s cret", "a")


# --- collectors that misbehave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_collector_gets_the_batch_again(point: Point, status: int) -> None:
    with Collector(Reply(status), Reply(status)) as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(3))
        collector.wait_until(lambda: len(collector.names) == 3)
        mirror.close()
    assert (mirror.counts.sent, mirror.counts.lost) == (3, 0)


def test_a_collector_that_hangs_up_gets_the_batch_again(point: Point) -> None:
    with Collector(Reply(hang_up=True)) as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(1))
        collector.wait_until(lambda: len(collector.names) == 1)
        mirror.close()


def test_retry_after_is_waited_for(point: Point) -> None:
    with Collector(Reply(503, (("retry-after", "1"),))) as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(1))
        collector.wait_until(lambda: len(collector.paths) == 1)
        start = time.monotonic()
        collector.wait_until(lambda: len(collector.names) == 1)
        assert time.monotonic() - start > 0.9
        mirror.close()


def test_at_the_end_a_retry_after_beyond_the_time_left_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with Collector(Reply(429, (("retry-after", "600"),))) as collector, caplog.at_level(logging.WARNING):
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(2))
        collector.wait_until(lambda: len(collector.paths) == 1)
        mirror.close(30)
    assert (mirror.counts.sent, mirror.counts.lost) == (0, 2)
    assert "HTTP 429" in caplog.text


def test_a_refusal_is_final_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with Collector(*[Reply(401, (("content-type", "text/plain"),), b"who \x1b[31mare you?")] * 3) as collector:
        mirror = mirror_to(collector.url)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                mirror.offer(some_spans(512))
            mirror.close(20)
    assert len(collector.paths) == 3
    assert mirror.counts.lost == 3 * 512
    (record,) = caplog.records
    assert "512 spans not mirrored to http://127.0.0.1" in record.message
    assert "HTTP 401 Unauthorized: who [31mare you?" in record.message


def test_a_redirect_is_a_refusal_that_names_the_target(caplog: pytest.LogCaptureFixture) -> None:
    with Collector(Reply(308, (("location", "https://elsewhere/v1/traces"),))) as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(1))
        mirror.close(20)
    assert "set the address to https://elsewhere/v1/traces" in caplog.text


def test_what_a_collector_did_not_keep_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="no such tenant")
    body = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    with Collector(Reply(body=body)) as collector:
        mirror = mirror_to(collector.url)
        mirror.offer(some_spans(5))
        mirror.close(20)
    assert (mirror.counts.sent, mirror.counts.lost) == (3, 2)
    assert "no such tenant" in caplog.text


def test_spans_that_no_collector_could_read_do_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken = some_spans(1, "broken")[0]
    broken.trace_id = "no hexadecimal"
    with Collector() as collector:
        mirror = mirror_to(collector.url)
        mirror.offer([*some_spans(1), broken, *some_spans(1)])
        mirror.close(20)
    assert collector.names == ["span 0", "span 0"]
    assert mirror.counts.lost == 1
    assert "broken" in caplog.text


def test_the_queue_is_bounded_in_spans_and_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector:
        collector.gate.clear()
        mirror = mirror_to(collector.url, most_spans=100)
        mirror.offer(some_spans(150))
        assert mirror.counts.lost == 50
        heavy = mirror_to(collector.url, most_bytes=10_000)
        heavy.offer(some_spans(5, size=3000))
        assert heavy.counts.lost == 3
        collector.gate.set()
        mirror.close(20)
        heavy.close(20)
    assert len(collector.names) == 102
    assert caplog.text.count(" not mirrored to") == 2


async def test_a_collector_that_never_answers_holds_up_no_rollout(
    store: InMemoryLightningStore, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts go on while its answer is held back; only the end of the worker waits, for as long as it may."""
    monkeypatch.setattr("agentlightning.tracer.mirror.close_mirror.__defaults__", (0.2,))
    with Collector() as collector:
        collector.gate.clear()
        point(collector.url)
        tracer = OtelTracer()
        with tracer.lifespan(store):
            for _ in range(5):
                rollout = await store.start_rollout(input="x")
                async with tracer.trace_context("trace", **ids(rollout)):
                    emit_message("x")
                assert len(await store.query_spans(rollout.rollout_id)) == 1
            mirror = mirror_module._process.mirror
        assert mirror is not None
        assert (mirror.counts.offered, mirror.counts.sent, mirror.counts.lost) == (5, 0, 5)


async def test_a_collector_that_is_not_there_costs_a_rollout_nothing(
    store: InMemoryLightningStore, point: Point, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    point(f"http://127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        rollout_id = await trace(store, "x")
    assert len(await store.query_spans(rollout_id)) == 2
    (record,) = caplog.records
    assert "2 spans not mirrored" in record.message
    assert "refused" in record.message


def test_a_collector_that_dies_and_comes_back_gets_what_waited(point: Point) -> None:
    with Collector() as first:
        mirror = mirror_to(first.url)
        mirror.offer(some_spans(1, "before"))
        first.wait_until(lambda: len(first.names) == 1)
    mirror.offer(some_spans(2, "while away"))
    port = int(first.url.rpartition(":")[2])
    second = Collector()
    second._server.server_close()
    second._server = type(second._server)(("127.0.0.1", port), second._server.RequestHandlerClass)
    second._thread = threading.Thread(target=second._server.serve_forever, args=(0.01,), daemon=True)
    with second:
        second.wait_until(lambda: len(second.names) == 2)
        mirror.close()
    assert (mirror.counts.sent, mirror.counts.lost) == (3, 0)


# --- life --------------------------------------------------------------------------------------------------------


async def test_the_last_tracer_to_end_sends_what_waits_and_ends_the_thread(
    store: InMemoryLightningStore, point: Point
) -> None:
    with Collector() as collector:
        point(collector.url)
        one, two = OtelTracer(), OtelTracer()
        one.init_worker(0, store)
        two.init_worker(1, store)
        one.init_worker(0, store)  # repeated, which counts once
        rollout = await store.start_rollout(input="x")
        async with one.trace_context("trace", **ids(rollout)):
            emit_message("x")
        one.teardown_worker(0)
        one.teardown_worker(0)
        assert mirror_module._process.mirror is not None
        two.teardown_worker(1)
        assert mirror_module._process.mirror is None
        assert collector.names == ["agentlightning.message"]
    assert not [thread for thread in threading.enumerate() if thread.name == "agentlightning-mirror"]


FORKED = """
import asyncio, os, sys
from agentlightning.emitter import emit_message
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer

async def trace(tracer, name):
    store = InMemoryLightningStore()
    rollout = await store.start_rollout(input="x")
    async with tracer.trace_context(
        store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
    ):
        emit_message(name)
    await store.close()

tracer = OtelTracer()
tracer.init_worker(0)
asyncio.run(trace(tracer, "parent before"))
child = os.fork()
asyncio.run(trace(tracer, "child" if child == 0 else "parent after"))
if child == 0:
    sys.exit(0)  # the exit handlers send what waits
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_sends_its_own_spans_and_only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        words = ("-W", "ignore::DeprecationWarning", "-c", FORKED)
        run_program("python", *words, AGENT_LIGHTNING_OTLP_ENDPOINT=collector.url)
        bodies = sorted(str(span.attributes["agentlightning.message.body"]) for span in collector.spans)
    assert bodies == ["child", "parent after", "parent before"]


def test_an_interrupted_process_is_not_held_up_by_a_collector_that_never_answers() -> None:
    """It ends within the bound of the mirror, and by the interrupt."""
    program = (
        "import os, signal; from agentlightning.tracer import mirror\n"
        "from agentlightning.types import Span\n"
        "mirror.Mirror.close.__defaults__ = (0.3,)\n"
        "assert mirror.open_mirror()\n"
        "mirror.mirror_spans([Span.from_attributes(attributes={}, rollout_id='r', attempt_id='a')])\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    with Collector() as collector:
        collector.gate.clear()
        address = {"AGENT_LIGHTNING_OTLP_ENDPOINT": collector.url}
        run_program("python", "-c", program, timeout=30, code=-signal.SIGINT, **address)
