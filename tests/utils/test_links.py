"""Tags and links: their attributes, and the block that links the span that is open."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import agentlightning as agl
from agentlightning.semconv import LinkPydanticModel
from agentlightning.types import Span
from agentlightning.utils.otel import (
    extract_links_from_attributes,
    extract_tags_from_attributes,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["fast", "good"], ["fast", "good"]),
        ({"accuracy": 0.95, "split": "dev"}, ["accuracy:0.95", "split:dev"]),
        ([], []),
    ],
)
def test_tags_come_back_in_order(tags: Any, expected: list[str]) -> None:
    assert extract_tags_from_attributes({**make_tag_attributes(tags), "other": 1}) == expected


@pytest.mark.parametrize("attributes", [{"agentlightning.tag.0": 1}, {"agentlightning.tag.x": "{a}"}])
def test_a_tag_that_is_no_string_is_refused_as_other_values_of_a_wrong_type_are(attributes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"Tags must be strings with the keys agentlightning\.tag\.0"):
        extract_tags_from_attributes(attributes)


def test_links_come_back() -> None:
    attributes = make_link_attributes({"gen_ai.response.id": "chatcmpl-7", "trace_id": "ab"})
    assert attributes["agentlightning.link.0.key_match"] == "gen_ai.response.id"
    assert extract_links_from_attributes(attributes) == [
        LinkPydanticModel(key_match="gen_ai.response.id", value_match="chatcmpl-7"),
        LinkPydanticModel(key_match="trace_id", value_match="ab"),
    ]
    assert extract_links_from_attributes({}) == []


def test_linked_spans_satisfy_every_link() -> None:
    right = Span.from_attributes(attributes={"id": "x", "turn": "1"}, span_id="a" * 16)
    wrong = Span.from_attributes(attributes={"id": "x"}, span_id="b" * 16)
    by_attribute = extract_links_from_attributes(make_link_attributes({"id": "x", "turn": "1"}))
    by_id = extract_links_from_attributes(make_link_attributes({"span_id": "b" * 16}))
    assert query_linked_spans([right, wrong], by_attribute) == [right]
    assert query_linked_spans([right, wrong], by_id) == [wrong]
    assert query_linked_spans([right, wrong], []) == [right, wrong]


@pytest.mark.parametrize(
    ("tags", "message"), [("fast", "a list of strings or a dict; got the string 'fast'"), ([1], "a string; got int: 1")]
)
def test_what_is_no_tag_is_refused(tags: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tag_attributes(tags)


def test_a_link_to_a_rollout_and_an_attempt_finds_their_spans() -> None:
    right = Span.from_attributes(attributes={}, rollout_id="ro-001", attempt_id="at-001")
    other = Span.from_attributes(attributes={}, rollout_id="ro-001", attempt_id="at-002")
    claiming = Span.from_attributes(attributes={"agentlightning.rollout_id": "ro-009"}, rollout_id="ro-001")
    of_rollout = extract_links_from_attributes(make_link_attributes(linked_rollout_id="ro-001"))
    both = extract_links_from_attributes(make_link_attributes(linked_rollout_id="ro-001", linked_attempt_id="at-001"))
    assert query_linked_spans([right, other, claiming], of_rollout) == [right, other]
    assert query_linked_spans([right, other, claiming], both) == [right]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({}, "At least one link is required"),
        ({"links": {"k": 1}}, "must be a string, got: int for key 'k'"),
        ({"linked_rollout_id": 3}, "must be a string, got: int for key 'agentlightning.rollo"),
    ],
)
def test_a_link_without_its_value_is_refused(links: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_link_attributes(**links)
    assert make_link_attributes({}) == {}


async def test_a_block_links_the_operation_that_is_open_and_leaves_what_is_emitted_in_it_alone() -> None:
    @agl.operation(name="classify")
    def classify(ticket: str) -> str:
        with make_link_attributes(linked_rollout_id="ro-001", linked_attempt_id="at-001"):
            agl.emit_annotation({"seen": ticket})
        with make_link_attributes({"gen_ai.response.id": "chatcmpl-7"}):
            return ticket.upper()

    tracer = agl.OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context("links"):
            assert classify("a") == "A"
        spans = tracer.get_last_trace()
    links = {span.name: extract_links_from_attributes(span.attributes) for span in spans}
    assert [(link.key_match, link.value_match) for link in links["agentlightning.operation"]] == [
        ("agentlightning.rollout_id", "ro-001"),
        ("agentlightning.attempt_id", "at-001"),
        ("gen_ai.response.id", "chatcmpl-7"),
    ]
    assert links["agentlightning.annotation"] == []


def test_a_block_where_no_span_is_open_says_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_link_attributes(linked_rollout_id="ro-001")
    with pytest.raises(RuntimeError, match=r"No span is open.*into an operation"), block:
        raise AssertionError("not reached")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")  # then no span can be open anywhere
    with block as same:
        assert same == block
