"""Tags, links, exceptions, and the provider in use."""

from __future__ import annotations

import logging

import pytest

from agentlightning.types import Span
from agentlightning.utils.otel import (
    format_exception_attributes,
    full_qualified_name,
    tell_emitted,
)
from tests.stubs.processes import run_program


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
    run_program("python", "-W", "error", "-c", PROVIDER)


def test_spans_go_past_the_handlers_of_a_program_only_where_the_variable_asks_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="agentlightning")
    source = logging.Logger("of a program", logging.DEBUG)
    source.addHandler(logging.NullHandler(logging.INFO))
    monkeypatch.delenv("AGL_EMITTER_DEBUG", raising=False)
    tell_emitted(source, "n", {"a": 1})
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("AGL_EMITTER_DEBUG", "1")
    tell_emitted(source, "n", {"a": 1})
    assert "Emitting span n: {'a': 1}" in capsys.readouterr().err
