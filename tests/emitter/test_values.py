"""Messages, objects and exceptions on a trace."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.emitter import emit_exception, emit_message, emit_object, get_message_value, get_object_value
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Span


async def test_a_message_comes_back(tracer: OtelTracer) -> None:
    emit_message("hello", attributes={"turn": {"n": 1}, "odd": None})
    (span,) = tracer.get_last_trace()
    assert get_message_value(span) == "hello"
    assert span.attributes["turn.n"] == 1
    assert span.attributes["odd"] == "null"
    assert get_message_value(Span.from_attributes(attributes={})) is None


def test_a_message_is_text() -> None:
    with pytest.raises(TypeError, match="Message must be a string, got: int"):
        emit_message(3)  # type: ignore[arg-type] -- the mistake under test


@pytest.mark.parametrize("value", ["x", 3, 2.5, True, False, b"\x00\xff", {"a": [1, None]}, [1, "x"], None])
def test_an_object_comes_back(value: Any) -> None:
    span = Span.from_core_fields(emit_object(value, propagate=False))
    assert get_object_value(span) == value
    assert type(get_object_value(span)) is type(value)


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Object must be JSON serializable, got: set"):
        emit_object({1, 2}, propagate=False)


def test_a_broken_object_is_an_error_of_the_reader() -> None:
    with pytest.raises(RuntimeError, match="is no JSON text"):
        get_object_value(Span.from_attributes(attributes={"agentlightning.object.json": "{"}))
    with pytest.raises(RuntimeError, match="Unsupported object type for literal deserialization: Money"):
        get_object_value(
            Span.from_attributes(
                attributes={"agentlightning.object.type": "Money", "agentlightning.object.literal": "3"}
            )
        )
    assert get_object_value(Span.from_attributes(attributes={})) is None


async def test_an_exception_is_left_on_the_trace(tracer: OtelTracer) -> None:
    emit_exception(ValueError("caught"), attributes={"where": "tool"})
    (span,) = tracer.get_last_trace()
    assert span.name == "agentlightning.exception"
    assert span.status.status_code == "OK"
    assert span.attributes["exception.message"] == "caught"
    assert span.attributes["where"] == "tool"


def test_only_exceptions_are_exceptions() -> None:
    with pytest.raises(TypeError, match="Expected an exception, got: str"):
        emit_exception("oops")  # type: ignore[arg-type] -- the mistake under test


@pytest.mark.parametrize(
    "emit", [lambda: emit_message("x"), lambda: emit_object(1), lambda: emit_exception(KeyError())]
)
def test_without_a_trace_there_is_nowhere_to_emit(emit: Any) -> None:
    with pytest.raises(RuntimeError, match="No active tracer found"):
        emit()
