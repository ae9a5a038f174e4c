"""Tags, links, exceptions, and the provider in use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentlightning.semconv import LinkPydanticModel
from agentlightning.types import Span
from agentlightning.utils.otel import (
    extract_links_from_attributes,
    extract_tags_from_attributes,
    format_exception_attributes,
    full_qualified_name,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
)


def test_tags_come_back_in_order() -> None:
    assert extract_tags_from_attributes({**make_tag_attributes(["fast", "good"]), "other": 1}) == ["fast", "good"]


def test_no_tags_is_no_error() -> None:
    assert extract_tags_from_attributes({"other": 1}) == []


def test_a_tag_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match="Tags must be strings"):
        extract_tags_from_attributes({"agentlightning.tag.0": 1})


def test_links_come_back() -> None:
    attributes = make_link_attributes({"gen_ai.response.id": "chatcmpl-7", "trace_id": "ab"})
    assert attributes["agentlightning.link.0.key_match"] == "gen_ai.response.id"
    assert extract_links_from_attributes(attributes) == [
        LinkPydanticModel(key_match="gen_ai.response.id", value_match="chatcmpl-7"),
        LinkPydanticModel(key_match="trace_id", value_match="ab"),
    ]
    assert extract_links_from_attributes({}) == []


def test_a_link_to_something_else_than_text_is_refused() -> None:
    with pytest.raises(ValueError, match="Link value must be a string, got: int"):
        make_link_attributes({"k": 1})  # type: ignore[dict-item] -- the mistake under test


def test_linked_spans_satisfy_every_link() -> None:
    right = Span.from_attributes(attributes={"id": "x", "turn": "1"}, span_id="a" * 16)
    wrong = Span.from_attributes(attributes={"id": "x"}, span_id="b" * 16)
    by_attribute = extract_links_from_attributes(make_link_attributes({"id": "x", "turn": "1"}))
    by_id = extract_links_from_attributes(make_link_attributes({"span_id": "b" * 16}))
    assert query_linked_spans([right, wrong], by_attribute) == [right]
    assert query_linked_spans([right, wrong], by_id) == [wrong]
    assert query_linked_spans([right, wrong], []) == [right, wrong]


def test_an_exception_carries_its_stack() -> None:
    try:
        raise KeyError("gone")
    except KeyError as error:
        attributes = format_exception_attributes(error)
    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.message"] == "'gone'"
    assert attributes["exception.escaped"] is True
    assert 'raise KeyError("gone")' in attributes["exception.stacktrace"]


def test_names_of_classes() -> None:
    assert full_qualified_name(int) == "int"
    assert full_qualified_name(Span) == "agentlightning.types.tracer.Span"


PROVIDER = """
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from agentlightning.utils import otel

try:
    otel.get_tracer_provider()
except RuntimeError as error:
    assert "Tracer is not initialized" in str(error)
else:
    raise SystemExit("there was a provider")

class Seen(SpanProcessor):
    count = 0
    def on_end(self, span):
        self.count += 1

provider, seen = TracerProvider(), Seen()
provider.add_span_processor(seen)
trace.set_tracer_provider(provider)
assert otel.get_tracer_provider() is provider
assert otel.get_span_processors(provider, Seen) == [seen]
otel.get_tracer().start_span("heard").end()
otel.get_tracer(use_active_span_processor=False).start_span("unheard").end()
assert seen.count == 1
"""


def test_the_provider_of_the_program_is_found() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", PROVIDER], check=True, timeout=60)
