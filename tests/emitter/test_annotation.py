"""`operation`: a span for a function or a block, without another effect on the program around it."""

from __future__ import annotations

import asyncio
import datetime
import functools
import gc
import inspect
import logging
import pickle
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any

import pytest

from agentlightning.emitter import emit_annotation, emit_message, operation
from agentlightning.emitter.annotation import OperationContext
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Span
from tests.stubs.processes import clean_environment, run_program

NAME = "agentlightning.operation.name"
INPUT = "agentlightning.operation.input"
OUTPUT = "agentlightning.operation.output"


def operations(tracer: OtelTracer) -> list[Span]:
    return [span for span in tracer.get_last_trace() if span.name == "agentlightning.operation"]


@operation
def module_level(a: int, b: int = 2, *rest: int, **more: Any) -> dict[str, int]:
    """A function that is decorated at import time, without a tracer."""
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
    await asyncio.create_task(asyncio.to_thread(module_level, 2))
    assert len(tracer.get_last_trace()) == 2


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


# --- kinds of functions ------------------------------------------------------------------------------------------


class Toolbox:
    """Every kind of method, decorated on either side of the built-in decorators."""

    def __str__(self) -> str:
        return "the toolbox"

    @operation
    def method(self, x: int) -> int:
        return x

    @operation
    async def method_async(self, x: int) -> int:
        return x

    @operation
    @staticmethod
    def static_below(x: int) -> int:
        return x

    @staticmethod
    @operation
    def static_above(x: int) -> int:
        return x

    @operation
    @classmethod
    def class_below(cls, x: int) -> int:
        return x

    @classmethod
    @operation
    def class_above(cls, x: int) -> int:
        return x


async def test_methods_of_every_kind_are_traced_under_their_names(tracer: OtelTracer) -> None:
    box = Toolbox()
    assert box.method(1) == await box.method_async(1) == 1
    assert box.static_below(1) == Toolbox.static_above(1) == 1
    assert box.class_below(1) == Toolbox.class_above(1) == 1
    names = [span.attributes[NAME] for span in operations(tracer)]
    assert names == ["method", "method_async", "static_below", "static_above", "class_below", "class_above"]
    assert operations(tracer)[0].attributes[f"{INPUT}.self"] == "the toolbox"


async def test_objects_that_can_be_called_and_partial_functions_are_traced(tracer: OtelTracer) -> None:
    class Doubling:
        async def __call__(self, x: int) -> int:
            return 2 * x

    assert await operation(Doubling())(4) == 8
    assert operation(functools.partial(module_level, 1))(2) == {"sum": 3}
    first, second, _ = operations(tracer)
    assert (first.attributes[NAME], first.attributes[OUTPUT]) == ("Doubling", 8)
    assert second.attributes[NAME] == "module_level"


def test_a_decorated_function_is_still_what_it_was() -> None:
    assert inspect.iscoroutinefunction(Toolbox.method_async)
    assert inspect.isgeneratorfunction(operation(_count))
    assert inspect.isasyncgenfunction(operation(_count_async))
    assert inspect.signature(module_level).parameters["b"].default == 2
    assert pickle.loads(pickle.dumps(module_level)) is module_level


async def test_arguments_that_do_not_fit_are_recorded_as_they_came_and_the_error_is_pythons_own(
    tracer: OtelTracer,
) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module_level(z=1)  # type: ignore[call-arg] -- the mistake under test
    (span,) = tracer.get_last_trace()
    assert span.attributes == {NAME: "module_level", f"{INPUT}.kwargs.z": 1}
    assert span.status.status_code == "ERROR"


async def test_nothing_and_what_json_cannot_hold_are_outputs_too(tracer: OtelTracer) -> None:
    @operation
    def give(value: Any) -> Any:
        return value

    give(None)
    give([1, 2])
    give({"a": {1, 2}})
    give({7: {"when": datetime.date(2026, 1, 2)}})
    none, numbers, text, keyed = (span.attributes for span in operations(tracer))
    assert none[OUTPUT] == "null"
    assert numbers[OUTPUT] == [1, 2]
    assert text[f"{OUTPUT}.a"] == [1, 2]
    assert keyed[OUTPUT] == '{"7": {"when": "2026-01-02"}}'


# --- generators --------------------------------------------------------------------------------------------------


def _count() -> Generator[int, Any, str]:
    got = yield 1
    while got is None:
        got = yield 2
    yield got
    return "the end"


async def _count_async() -> AsyncGenerator[int, Any]:
    got = yield 1
    while got is None:
        got = yield 2
    yield got


def test_a_generator_takes_what_is_sent_and_returns_what_it_returns() -> None:
    def caller(source: Any) -> Iterator[Any]:
        result = yield from source
        yield result

    for wrapped in (_count, operation(_count), operation(propagate=False)(_count)):
        numbers = caller(wrapped())
        assert [next(numbers), next(numbers), numbers.send(7), next(numbers)] == [1, 2, 7, "the end"]  # type: ignore[attr-defined] -- a generator


async def test_an_async_generator_takes_what_is_sent() -> None:
    for wrapped in (_count_async, operation(_count_async), operation(propagate=False)(_count_async)):
        numbers = wrapped()
        assert [await numbers.__anext__(), await numbers.__anext__(), await numbers.asend(7)] == [1, 2, 7]
        await numbers.aclose()


async def test_a_generator_answers_what_is_thrown_and_is_closed_with_its_caller(tracer: OtelTracer) -> None:
    closed: list[str] = []

    @operation
    def stubborn() -> Iterator[str]:
        try:
            try:
                yield "first"
            except KeyError:
                yield "answer"
        finally:
            closed.append("plain")

    @operation
    async def stubborn_async() -> AsyncIterator[str]:
        try:
            try:
                yield "first"
            except KeyError:
                yield "answer"
        finally:
            closed.append("async")

    plain: Any = stubborn()
    assert (next(plain), plain.throw(KeyError())) == ("first", "answer")
    plain.close()
    other: Any = stubborn_async()
    assert (await other.__anext__(), await other.athrow(KeyError())) == ("first", "answer")
    await other.aclose()
    assert closed == ["plain", "async"]
    assert [span.status.status_code for span in operations(tracer)] == ["UNSET", "UNSET"]


async def test_the_failure_of_a_generator_is_on_its_span(tracer: OtelTracer) -> None:
    @operation
    async def failing() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        async for _ in failing():
            pass
    assert operations(tracer)[0].status.description == "ValueError: no"


async def test_what_runs_between_two_items_is_not_below_the_generator(tracer: OtelTracer) -> None:
    @operation
    def source() -> Iterator[int]:
        for number in range(2):
            emit_message("inside")
            yield number

    @operation
    async def source_async() -> AsyncIterator[int]:
        for number in range(2):
            emit_message("inside")
            yield number

    one, two = source(), source_async()
    for _ in range(2):
        next(one)
        emit_message("between")
        await two.__anext__()
        emit_message("between")
    assert list(one) == []
    assert [item async for item in two] == []
    spans = tracer.get_last_trace()
    of_generators = {span.span_id: 0 for span in operations(tracer)}
    for span in spans:
        body = span.attributes.get("agentlightning.message.body")
        assert (span.parent_id in of_generators) == (body == "inside")
        if span.parent_id in of_generators:
            of_generators[span.parent_id] += 1
    assert list(of_generators.values()) == [2, 2]


async def test_a_generator_that_is_given_up_disturbs_nobody(
    tracer: OtelTracer, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector and the loop close generators in contexts of their own, where nothing can be restored."""

    @operation
    async def endless() -> AsyncIterator[int]:
        with operation(name="block"):
            while True:
                yield 1

    async def take_one() -> None:
        async for _ in endless():
            break

    with caplog.at_level(logging.WARNING):
        await asyncio.create_task(take_one())
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    emit_message("after")
    assert caplog.text == ""
    (message,) = [span for span in tracer.get_last_trace() if span.name == "agentlightning.message"]
    assert message.parent_id is None


# --- blocks ------------------------------------------------------------------------------------------------------


async def test_a_block_may_be_used_again_and_gives_its_last_span(tracer: OtelTracer) -> None:
    op = operation(name="again", nothing=None, leaf=[1, 2])
    for number in range(2):
        with op:
            op.set_output(number)
    assert op.span().attributes == {NAME: "again", "nothing": "null", "leaf": [1, 2], OUTPUT: 1}
    assert [span.attributes[OUTPUT] for span in operations(tracer)] == [0, 1]


async def test_one_object_serves_blocks_that_run_at_the_same_time_and_within_each_other(tracer: OtelTracer) -> None:
    op = operation(name="shared")

    async def use(number: int) -> None:
        with op:
            await asyncio.sleep(0)
            with op:
                op.set_output(f"{number} inner")
                await asyncio.sleep(0)
            op.set_output(f"{number} outer")

    await asyncio.gather(*(use(number) for number in range(3)))
    spans = {span.attributes[OUTPUT]: span for span in operations(tracer)}
    assert len(spans) == 6
    for number in range(3):
        assert spans[f"{number} inner"].parent_id == spans[f"{number} outer"].span_id


async def test_a_plain_thread_may_record_on_the_block_that_started_it(tracer: OtelTracer) -> None:
    with operation(name="block") as op:
        thread = threading.Thread(target=op.set_output, args=("from the thread",))
        thread.start()
        thread.join()
    assert op.span().attributes[OUTPUT] == "from the thread"


async def test_the_exception_of_a_block_passes_and_is_recorded(tracer: OtelTracer) -> None:
    with pytest.raises(KeyError), operation(name="block") as op:
        raise KeyError("x")
    assert op.span().status.status_code == "ERROR"


def test_without_propagation_the_active_tracer_is_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Any:
        raise AssertionError("looked up")

    monkeypatch.setattr("agentlightning.emitter.annotation.get_active_tracer", never)
    assert operation(propagate=False)(lambda: 5)() == 5
    assert emit_annotation({"k": 1}, propagate=False).attributes == {"k": 1}
    assert isinstance(operation(propagate=False), OperationContext)


# --- AGL_EMITTER_DEBUG -------------------------------------------------------------------------------------------

PROGRAM = """
import agentlightning as agl

@agl.operation(name="classify")
def classify(ticket):
    return "billing"

def agent(task):
    classify(task)
    agl.emit_annotation({"note": "a" * 10_000})
    agl.emit_reward(0.5)

agl.Trainer(strategy="shm").dev(agent, ["ticket-1"])
"""


@pytest.mark.parametrize(
    ("logging_of_the_program", "words"),
    [
        ("", "DEBUG agentlightning.emitter.annotation: Emitting span"),
        (
            "import logging; logging.basicConfig(level='ERROR')",
            "DEBUG agentlightning.emitter.annotation: Emitting span",
        ),
        ("import logging; logging.basicConfig(level='DEBUG', format='own: %(message)s')", "own: Emitting span"),
    ],
)
def test_the_variable_alone_shows_each_emitted_span_once(logging_of_the_program: str, words: str) -> None:
    program = run_program("python", "-c", f"{logging_of_the_program}\n{PROGRAM}", AGL_EMITTER_DEBUG="1")
    lines = [line for line in program.stderr.splitlines() if "Emitting span" in line]
    assert program.stderr.count(words) >= 2
    assert [line.partition("span agentlightning.")[2].partition(":")[0] for line in lines] == [
        *("operation", "annotation", "annotation")
    ]
    assert "'agentlightning.operation.name': 'classify'" in lines[0]
    assert "'billing'" in lines[0]
    assert "characters)" in lines[1]
    assert len(lines[1]) < 5_000
    assert "'agentlightning.reward.0.value': 0.5" in lines[2]


@pytest.mark.heavy
def test_without_the_variable_nothing_is_shown() -> None:
    program = run_program("python", "-c", PROGRAM, environment=clean_environment())
    assert "Emitting span" not in program.stderr
