"""Spans in memory are kept in several forms; a span is read as it was stored, whatever happens to the objects."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from agentlightning.errors import BadRequestError
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.memory.spans import BULK, KeptSpan
from agentlightning.store.spec import store_from_spec
from agentlightning.types import AttemptedRollout, Span
from agentlightning.types.tracer import Event, SpanContext

FORMS = {"decoded": ({}, 3), "packed": ({"max_decoded_span_bytes": 0}, 3), "bulk": ({}, BULK + 1)}
"""The settings of a store and the number of spans of a call that lead to each form."""


class Word(StrEnum):
    MODEL = "model"


def _span(rollout: AttemptedRollout, number: int = 1, **changes: Any) -> Span:
    span = Span.from_attributes(
        attributes={"text": "näme ☃", "flag": True, "count": 2**70, "share": float("inf"), "ids": [1, 2], "empty": []},
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number,
        name="step",
        parent_id="c" * 16,
        start_time=1.5,
    )
    span.resource.attributes.update({"service.name": "x", "command": ["a", "b"]})
    span.scope = {"name": "library", "version": None}
    span.flags, span.kind = 257, "CLIENT"
    return span.model_copy(update=changes)


def _change(span: Span) -> None:
    """Change every field that can be changed in place."""
    span.name, span.sequence_id, span.kind = "other", 99, None
    span.attributes["ids"].append(3)  # pyright: ignore[reportAttributeAccessIssue]
    span.attributes.pop("text")
    span.resource.attributes["command"].append("c")  # pyright: ignore[reportAttributeAccessIssue]
    span.resource.attributes["service.name"] = "y"
    span.events.append(Event(name="e", attributes={}))
    span.status.status_code, span.status.description = "ERROR", "late"
    assert span.context is not None
    assert span.parent is not None
    span.context.trace_state["k"] = span.parent.trace_state["k"] = "v"
    span.context.is_remote = True
    assert span.scope is not None
    span.scope["version"] = "2"
    span.note = "an extra field"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_read_is_what_was_stored_whoever_changes_it(form: str) -> None:
    settings, count = FORMS[form]
    store = InMemoryLightningStore(**settings)
    rollout = await store.start_rollout("x")
    sent = [_span(rollout, number) for number in range(1, count + 1)]
    as_sent = [span.model_dump() for span in sent]
    await store.add_many_spans(sent)
    read = sent
    for _ in range(3):
        for span in read:
            _change(span)
        read = [*await store.query_spans(rollout.rollout_id)]
        assert [span.model_dump() for span in read] == as_sent
        assert all(type(span) is Span for span in read)
    page = await store.query_spans(rollout.rollout_id, sort_order="desc", limit=2)
    assert [span.sequence_id for span in page] == [count, count - 1]
    assert page[0] == read[-1]


UNUSUAL: dict[str, Callable[[AttemptedRollout], Span]] = {
    "an event": lambda r: _span(r, events=[Event(name="e", attributes={"k": 1}, timestamp=1.5)]),
    "an extra field": lambda r: _span(r, note={"deep": [1, None]}),
    "a trace state": lambda r: _span(
        r, context=SpanContext(trace_id="a", span_id="b", is_remote=True, trace_state={"k": "v"})
    ),
    "another context": lambda r: _span(
        r, context=SpanContext(trace_id="a", span_id="b", is_remote=True, trace_state={})
    ),
    "no context": lambda r: _span(r, context=None, parent=None, parent_id=None),
    "a numpy number": lambda r: _span(r, attributes={"a": np.float64(0.5)}),
    "a numpy text": lambda r: _span(r, attributes={np.str_("a"): np.str_("b")}),
    "a word of an enumeration": lambda r: _span(r, attributes={Word.MODEL: Word.MODEL}, name=Word.MODEL),
    "numpy numbers in a list": lambda r: _span(r, attributes={"a": [np.float64(0.5), np.float64(1.5)]}),
    "a numpy time": lambda r: _span(r, start_time=np.float64(1.5)),
    "a scope with attributes": lambda r: _span(r, scope={"name": "n", "version": "1", "attributes": {"a": [1]}}),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.parametrize("form", FORMS)
async def test_a_span_with_something_unusual_is_read_as_its_json_is(form: str, unusual: str) -> None:
    settings, count = FORMS[form]
    store = InMemoryLightningStore(**settings)
    rollout = await store.start_rollout("x")
    sent = UNUSUAL[unusual](rollout)
    expected = Span.model_validate_json(Span.__pydantic_serializer__.to_json(sent))
    await store.add_many_spans([sent, *(_span(rollout, number) for number in range(2, count + 1))])
    for _ in range(2):
        span = (await store.query_spans(rollout.rollout_id))[0]
        assert span.model_dump() == expected.model_dump()
        assert [*map(type, span.attributes.values())] == [*map(type, expected.attributes.values())]


HALF = "half \ud83d"
BROKEN: dict[str, Callable[[Span], object]] = {
    "name": lambda span: setattr(span, "name", HALF),
    "kind": lambda span: setattr(span, "kind", HALF),
    "description": lambda span: setattr(span.status, "description", HALF),
    "key": lambda span: span.attributes.update({HALF: 1}),
    "value": lambda span: span.attributes.update({"a": HALF}),
    "item": lambda span: span.attributes.update({"a": [HALF]}),
    "resource": lambda span: span.resource.attributes.update({"a": HALF}),
    "schema": lambda span: setattr(span.resource, "schema_url", HALF),
    "scope": lambda span: setattr(span, "scope", {"name": HALF}),
    "context": lambda span: setattr(span.context, "trace_id", HALF),
}


@pytest.mark.parametrize("place", BROKEN)
@pytest.mark.parametrize("form", FORMS)
async def test_half_a_surrogate_pair_is_refused_wherever_it_stands_and_nothing_is_kept(form: str, place: str) -> None:
    settings, count = FORMS[form]
    store = InMemoryLightningStore(**settings)
    rollout = await store.start_rollout("x")
    spans = [_span(rollout, number) for number in range(1, count + 1)]
    BROKEN[place](spans[-1])
    with pytest.raises(BadRequestError, match="cannot be stored"):
        await store.add_many_spans(spans)
    assert (await store.query_spans(rollout.rollout_id)).total == 0
    assert (await store.statistics())["total_span_bytes"] == 0


async def test_only_the_spans_stored_last_are_kept_decoded() -> None:
    store = InMemoryLightningStore(max_decoded_span_bytes=100_000)
    rollouts = [await store.start_rollout(number) for number in range(30)]
    for rollout in rollouts:
        await store.add_many_spans([_span(rollout, number) for number in range(1, 11)])
    stored_spans = [[*store._backend._data.spans[rollout.rollout_id].values()] for rollout in rollouts]  # pyright: ignore
    decoded = [sum(isinstance(span, KeptSpan) and type(span.form) is tuple for span in spans) for spans in stored_spans]
    assert decoded[0] == 0
    assert decoded[-1] == 10
    assert 10 <= sum(decoded) <= 100_000 / 1000
    for rollout in rollouts:
        assert [span.sequence_id for span in await store.query_spans(rollout.rollout_id)] == list(range(1, 11))


LARGE: dict[str, Callable[[AttemptedRollout], Span]] = {
    "a scope": lambda r: _span(r, scope={"name": "x" * 50_000, "version": None}),
    "a context": lambda r: _span(
        r, context=SpanContext(trace_id="a" * 50_000, span_id="b", is_remote=True, trace_state={})
    ),
    "a text": lambda r: _span(r, attributes={"a": "ä" * 25_000}),
    "an integer": lambda r: _span(r, attributes={"a": 10**4000}),
    "integers in a list": lambda r: _span(r, attributes={"a": [number - 10**4000 for number in range(30)]}),
    "integers in many lists": lambda r: _span(r, attributes={str(n): [n + 10**4000] for n in range(20)}),
}


@pytest.mark.parametrize("large", LARGE)
async def test_whatever_is_large_in_a_span_counts_for_the_bound_on_spans(large: str) -> None:
    store = InMemoryLightningStore()
    rollout = await store.start_rollout("x")
    usual = _span(rollout, attributes={})
    await store.add_span(usual)
    before = (await store.statistics()).get("total_span_bytes", 0)
    span = LARGE[large](rollout).model_copy(update={"span_id": "f" * 16})
    await store.add_span(span)
    counted = (await store.statistics()).get("total_span_bytes", 0) - before
    more = len(span.model_dump_json()) - len(usual.model_dump_json())
    assert counted - before > 0.3 * more
    assert (await store.query_spans(rollout.rollout_id, span_id="f" * 16))[0].model_dump() == span.model_dump()


async def test_room_of_deleted_spans_is_given_back() -> None:
    store = InMemoryLightningStore(max_span_bytes=60_000)
    for _ in range(30):
        rollout = await store.start_rollout("x")
        await store.add_many_spans([_span(rollout, number) for number in range(1, 31)])
        await store.add_many_spans([_span(rollout, number) for number in range(1, BULK + 2)])
        assert (await store.statistics())["total_span_bytes"] > 30_000
        await store.delete_rollouts(rollout_ids=[rollout.rollout_id], force=True)
        assert (await store.statistics())["total_span_bytes"] == 0


def test_the_bound_on_decoded_spans_is_a_setting_and_a_negative_one_is_refused() -> None:
    with pytest.raises(BadRequestError, match="max_decoded_span_bytes must not be negative; got -1"):
        InMemoryLightningStore(max_decoded_span_bytes=-1)
    with pytest.raises(BadRequestError, match="max_decoded_span_bytes must not be negative; got -5"):
        store_from_spec("memory?max_decoded_span_bytes=-5")
