"""`operation`: a span for a function or a block, and no more than that to the program around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agentlightning.emitter import emit_annotation, operation
from agentlightning.tracer.otel import OtelTracer


@operation
def module_level(a: int, b: int = 2, *rest: int, **more: Any) -> dict[str, int]:
    """Decorated at import time, when no tracer is there."""
    return {"sum": a + b}


def test_without_a_tracer_the_function_just_runs() -> None:
    assert module_level(1) == {"sum": 3}
    assert module_level.__name__ == "module_level"
    with operation(name="block") as op:
        op.set_output(1)


async def test_arguments_and_result_are_on_the_span(tracer: OtelTracer) -> None:
    module_level(1, 2, 3, z={"deep": 4})
    (span,) = tracer.get_last_trace()
    assert span.name == "agentlightning.operation"
    assert span.attributes == {
        "agentlightning.operation.name": "module_level",
        "agentlightning.operation.input.a": 1,
        "agentlightning.operation.input.b": 2,
        "agentlightning.operation.input.rest": [3],
        "agentlightning.operation.input.more.z.deep": 4,
        "agentlightning.operation.output.sum": 3,
    }


async def test_the_tracer_of_the_call_is_used(tracer: OtelTracer) -> None:
    module_level(1)
    async with asyncio.timeout(5) if hasattr(asyncio, "timeout") else tracer_free():
        await asyncio.create_task(asyncio.to_thread(module_level, 2))
    assert len(tracer.get_last_trace()) == 2


class tracer_free:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


async def test_coroutine_functions_are_awaited_inside(tracer: OtelTracer) -> None:
    @operation(name="slow", flavour="test")
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    assert await double(4) == 8
    (span,) = tracer.get_last_trace()
    assert span.attributes["agentlightning.operation.name"] == "slow"
    assert span.attributes["flavour"] == "test"
    assert span.attributes["agentlightning.operation.output"] == 8


async def test_a_generator_is_one_span_until_its_end(tracer: OtelTracer) -> None:
    @operation
    def count() -> Iterator[int]:
        yield 1
        yield 2

    numbers = count()
    assert next(numbers) == 1
    assert tracer.get_last_trace() == []
    assert list(numbers) == [2]
    assert len(tracer.get_last_trace()) == 1


async def test_a_generator_that_is_left_early_is_no_error(tracer: OtelTracer) -> None:
    @operation
    def count() -> Iterator[int]:
        yield 1
        yield 2

    numbers = count()
    next(numbers)
    numbers.close()  # type: ignore[attr-defined] -- it is a generator
    assert tracer.get_last_trace()[0].status.status_code == "UNSET"


async def test_an_async_generator_is_one_span(tracer: OtelTracer) -> None:
    @operation
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert [number async for number in count()] == [1, 2]
    assert len(tracer.get_last_trace()) == 1


async def test_an_exception_passes_and_is_recorded(tracer: OtelTracer) -> None:
    @operation
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert tracer.get_last_trace()[0].status.status_code == "ERROR"


async def test_values_that_no_span_can_hold_do_not_reach_the_caller_as_errors(tracer: OtelTracer) -> None:
    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no text for you")

    @operation
    def echo(value: Any) -> Any:
        return value

    rude = Rude()
    assert echo(rude) is rude
    assert echo({1: {2: 3}}) == {1: {2: 3}}
    endless: list[Any] = []
    endless.append(endless)
    assert echo(endless) is endless
    assert len(tracer.get_last_trace()) == 3


async def test_a_block_takes_inputs_and_outputs(tracer: OtelTracer) -> None:
    with operation(name="block", extra={"a": 1}) as op:
        op.set_input(1, "two", three=3)
        op.set_output({"ok": True})
        with pytest.raises(RuntimeError, match="Span is not ready yet"):
            op.span()
    assert op.span().attributes == {
        "extra.a": 1,
        "agentlightning.operation.name": "block",
        "agentlightning.operation.input.args.0": 1,
        "agentlightning.operation.input.args.1": "two",
        "agentlightning.operation.input.three": 3,
        "agentlightning.operation.output.ok": True,
    }
    with pytest.raises(RuntimeError, match="not open"):
        op.set_output(1)


def test_without_propagation_the_span_is_only_returned() -> None:
    with operation(propagate=False, name="local") as op:
        op.set_output(5)
    assert op.span().attributes["agentlightning.operation.output"] == 5


def test_mistakes_in_the_use_of_operation() -> None:
    with pytest.raises(ValueError, match="Custom span names are intentionally not supported"):
        operation("name")  # type: ignore[call-overload] -- the mistake under test
    with pytest.raises(ValueError, match="specify both"):
        operation(name="a", **{"agentlightning.operation.name": "b"})


async def test_spans_inside_an_operation_are_its_children(tracer: OtelTracer) -> None:
    with operation(name="outer"):
        emit_annotation({"k": 1})
    inner, outer = tracer.get_last_trace()
    assert inner.parent_id == outer.span_id


def test_an_annotation_is_strict() -> None:
    with pytest.raises(ValueError, match=r"for key 'a\.b'"):
        emit_annotation({"a": {"b": None}}, propagate=False)
