"""Messages, objects and exceptions on a trace."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    get_message_value,
    get_object_value,
)
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Span, SpanCoreFields

EMITTERS: dict[str, Any] = {
    "annotation": lambda **kwargs: emit_annotation({"k": 1}, **kwargs),
    "reward": lambda **kwargs: emit_reward(1.0, **kwargs),
    "message": lambda **kwargs: emit_message("x", **kwargs),
    "object": lambda **kwargs: emit_object(1, **kwargs),
    "exception": lambda **kwargs: emit_exception(KeyError("x"), **kwargs),
}


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
    with pytest.raises(RuntimeError, match="is not valid JSON"):
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


@pytest.mark.parametrize(("name", "emit"), EMITTERS.items())
def test_without_a_trace_there_is_nowhere_to_emit(name: str, emit: Any) -> None:
    what = "annotation" if name == "reward" else name
    with pytest.raises(RuntimeError, match=rf"No active tracer found\. Cannot emit {what} span\."):
        emit()


@pytest.mark.parametrize(("name", "emit"), EMITTERS.items())
def test_without_propagation_no_tracer_is_looked_up(name: str, emit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Any:
        raise AssertionError("looked up")

    module = {"reward": "annotation", "exception": "message"}.get(name, name)
    monkeypatch.setattr(f"agentlightning.emitter.{module}.get_active_tracer", never)
    emit(propagate=False)


@pytest.mark.parametrize(
    ("name", "span_name", "status", "returns"),
    [
        ("annotation", "agentlightning.annotation", "OK", True),
        ("reward", "agentlightning.annotation", "OK", True),
        ("message", "agentlightning.message", "UNSET", False),
        ("object", "agentlightning.object", "OK", True),
        ("exception", "agentlightning.exception", "OK", False),
    ],
)
async def test_each_emitter_has_its_name_its_status_and_what_it_returns(
    tracer: OtelTracer, name: str, span_name: str, status: str, returns: bool
) -> None:
    returned = EMITTERS[name]()
    (span,) = tracer.get_last_trace()
    assert (span.name, span.status.status_code) == (span_name, status)
    assert isinstance(returned, SpanCoreFields) is returns
    if returns:
        assert (returned.name, returned.attributes) == (span.name, span.attributes)
    assert span.start_time == span.end_time


@pytest.mark.parametrize(
    ("emit", "error"),
    [
        (lambda: emit_annotation({"k": None}), ValueError),
        (lambda: emit_reward("x"), TypeError),  # type: ignore[arg-type] -- the mistake under test
        (lambda: emit_message(3), TypeError),  # type: ignore[arg-type] -- the mistake under test
        (lambda: emit_object({1, 2}), RuntimeError),
        (lambda: emit_exception("x"), TypeError),  # type: ignore[arg-type] -- the mistake under test
    ],
)
def test_a_bad_payload_is_refused_before_the_tracer_is_looked_up(emit: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        emit()
    assert "No active tracer" not in str(caught.value)


@pytest.mark.parametrize("leaf", [None, (1, 2), {1, 2}, b"x", object()])
def test_annotations_and_rewards_take_only_what_a_span_can_hold(leaf: Any) -> None:
    for emit in (lambda: emit_annotation({"k": leaf}, propagate=False), lambda: _rewarded({"k": leaf})):
        with pytest.raises(ValueError, match="Attribute value must be a string, int, float, bool, or list of these"):
            emit()


def _rewarded(attributes: dict[str, Any]) -> SpanCoreFields:
    return emit_reward(1.0, attributes=attributes, propagate=False)


def test_the_other_emitters_take_anything_as_attribute() -> None:
    span = emit_object(1, attributes={"none": None, "pair": (1, 2), "deep": {"list": [1, 2]}}, propagate=False)
    assert span.attributes["none"] == "null"
    assert span.attributes["pair"] == "[1, 2]"
    assert span.attributes["deep.list"] == [1, 2]


def test_attributes_of_the_user_go_over_those_of_the_emitter() -> None:
    span = emit_object("mine", attributes={"agentlightning.object.type": "Money"}, propagate=False)
    assert span.attributes == {"agentlightning.object.type": "Money", "agentlightning.object.literal": "mine"}


class Word(str):
    """A string of somebody's own."""


@pytest.mark.parametrize(
    ("value", "kind", "form", "text"),
    [
        ("x", "str", "literal", "x"),
        (3, "int", "literal", "3"),
        (2.5, "float", "literal", "2.5"),
        (True, "bool", "literal", "True"),
        (Word("w"), "Word", "literal", "w"),
        (b"\x00\xff", "bytes", "literal", "AP8="),
        ({"a": [1, None]}, "dict", "json", '{"a": [1, null]}'),
        ((1, 2), "tuple", "json", "[1, 2]"),
        (None, "NoneType", "json", "null"),
    ],
)
def test_the_encoding_of_objects(value: Any, kind: str, form: str, text: str) -> None:
    assert emit_object(value, propagate=False).attributes == {
        "agentlightning.object.type": kind,
        f"agentlightning.object.{form}": text,
    }


def test_an_exception_has_type_message_and_stack_trace(tracer: OtelTracer) -> None:
    try:
        raise ValueError("caught")
    except ValueError as error:
        emit_exception(error)
    (span,) = tracer.get_last_trace()
    assert span.attributes["exception.type"] == "ValueError"
    assert span.attributes["exception.message"] == "caught"
    assert span.attributes["exception.escaped"] is True
    assert 'raise ValueError("caught")' in str(span.attributes["exception.stacktrace"])


def test_a_body_that_is_no_text_is_an_error_of_the_reader() -> None:
    with pytest.raises(TypeError, match="Message body must be a string, got: int"):
        get_message_value(Span.from_attributes(attributes={"agentlightning.message.body": 3}))
