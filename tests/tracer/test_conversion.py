"""Spans of OpenTelemetry as values of ours: what no stored span can hold costs no attempt its evidence."""

from __future__ import annotations

import logging
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as trace_api

from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.conversion import span_of
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout

from .test_otel import ids


class Kind(StrEnum):
    TOOL = "tool"


async def test_attributes_that_no_stored_span_can_hold_do_not_fail_the_delivery(
    store: InMemoryLightningStore, tracer: OtelTracer, rollout: AttemptedRollout
) -> None:
    """OpenTelemetry takes None and maps since 1.40, and instrumentations write the null content of a tool call."""
    foreign: dict[str, Any] = {"gen_ai.prompt.2.content": None, "gen_ai.prompt.2.role": "assistant", "n": 3}
    async with tracer.trace_context("trace", **ids(rollout)):
        with trace_api.get_tracer("library").start_as_current_span("call", attributes=foreign) as span:
            span.set_attribute("deep", {"a": [1, {"b": None}]})  # type: ignore[arg-type] -- what libraries do
            span.set_attribute("mixed", ["x", 1])  # type: ignore[arg-type] -- what libraries do
            span.add_event("noted", {"nothing": None, "list": [1, 2]})  # type: ignore[dict-item] -- what libraries do
    (stored,) = await store.query_spans(rollout.rollout_id)
    assert stored.attributes["gen_ai.prompt.2.role"] == "assistant"
    assert stored.attributes["n"] == 3
    assert "gen_ai.prompt.2.content" not in stored.attributes
    assert stored.attributes.get("deep", "{}").startswith("{")  # type: ignore[union-attr] -- text
    assert stored.events[0].attributes["list"] == [1, 2]
    assert "nothing" not in stored.events[0].attributes


def ended(attributes: Any) -> Any:
    """A span as another implementation of OpenTelemetry may make it."""
    context = SimpleNamespace(trace_id=1, span_id=2, is_remote=False, trace_flags=1, trace_state={})
    status = SimpleNamespace(status_code=SimpleNamespace(name="OK"), description=None)
    link = SimpleNamespace(context=context, attributes={"nothing": None, "k": (1, 2)})
    return SimpleNamespace(
        name="foreign",
        status=status,
        parent=None,
        kind=SimpleNamespace(name="CLIENT"),
        start_time=1_700_000_000_000_000_000,
        end_time=1_700_000_001_000_000_000,
        instrumentation_scope=SimpleNamespace(name="lib", version="1", attributes={}, schema_url=""),
        attributes=attributes,
        events=[],
        links=[link],
        resource=SimpleNamespace(attributes={"service.name": None}, schema_url=""),
        dropped_attributes=1,
        dropped_events=0,
        dropped_links=0,
        get_span_context=lambda: context,
    )


def test_what_does_not_fit_becomes_text_and_the_rest_stays_as_it_is() -> None:
    values = {
        "none": None,
        "map": {"a": 1},
        "mixed": ("x", 1),
        "bytes": b"x",
        "enum": Kind.TOOL,
        "ids": (1, 2),
        "ok": True,
    }
    span = span_of(ended(values), "ro-1", "at-1", 7)
    assert (span.rollout_id, span.attempt_id, span.sequence_id, span.kind) == ("ro-1", "at-1", 7, "CLIENT")
    assert span.attributes["map"] == '{"a": 1}'
    assert span.attributes["mixed"] == '["x", 1]'
    assert span.attributes["bytes"] == "eA=="
    assert span.attributes["enum"] == "tool"
    assert (span.attributes["ids"], span.attributes["ok"]) == ([1, 2], True)
    assert "none" not in span.attributes
    assert span.links[0].attributes == {"k": [1, 2]}
    assert span.resource.attributes == {}
    assert (span.end_time, span.dropped and span.dropped.attributes) == (1_700_000_001.0, 1)


def test_of_a_span_beyond_reading_its_name_and_times_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no")

    with caplog.at_level(logging.WARNING):
        span = span_of(ended(Hostile(a=1)), "ro-1", "at-1", 0)
    assert (span.name, span.attributes, span.start_time) == ("foreign", {}, 1_700_000_000.0)
    assert "attributes of span 'foreign' are lost" in caplog.text
