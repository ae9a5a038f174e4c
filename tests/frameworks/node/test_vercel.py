"""The Vercel AI SDK: generateText, streamText and its agent; over responses, chat, its compatible chat and messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.engine import Json, both_ways, calculator, last, numbers, said
from tests.frameworks.harness import run_agent
from tests.frameworks.node.node_programs import PRODUCTS, needs_node, node_agent, programs

pytestmark = needs_node

__all__ = ["programs"]  # a fixture

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
PROVIDERS = ("responses", "chat", "compatible", "anthropic")
DIRECT = ("chat", "compatible")
"""Those that speak to the model server itself as they do to the gateway."""

each = pytest.mark.parametrize("provider", PROVIDERS)


@each
def test_a_tool_loop_is_one_row(programs: Path, provider: str) -> None:
    results = run_agent(node_agent(programs / "vercel.mjs", "toolLoop", provider), direct=provider in DIRECT)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@each
def test_several_tool_calls_at_once_are_one_row(programs: Path, provider: str) -> None:
    results = run_agent(node_agent(programs / "vercel.mjs", "toolLoop", provider), both_ways, direct=provider in DIRECT)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


@each
def test_a_streamed_run_gives_its_words_and_is_one_row(programs: Path, provider: str) -> None:
    results = run_agent(node_agent(programs / "vercel.mjs", "streams", provider), direct=provider in DIRECT)
    for result, answer in zip(results, SAID, strict=True):
        words = result.output["words"]
        assert "".join(words) == result.output["text"] == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert result.output["used"] == sum(one.reply["usage"]["total_tokens"] for one in result.exchanges)
        assert len(result.record.samples) == 1


def product(request: Json) -> str:
    """A model that answers with a product as JSON."""
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


@each
def test_structured_output_is_parsed(programs: Path, provider: str) -> None:
    results = run_agent(node_agent(programs / "vercel.mjs", "parsed", provider), product, direct=provider in DIRECT)
    assert [one.output for one in results] == PRODUCTS


@each
def test_structured_output_after_a_tool_is_one_row(programs: Path, provider: str) -> None:
    def model(request: Json) -> str | Json:
        return product(request) if last(request)["role"] == "tool" else calculator(request)

    results = run_agent(
        node_agent(programs / "vercel.mjs", "parsedAfterTool", provider), model, direct=provider in DIRECT
    )
    assert [one.output for one in results] == PRODUCTS
    assert [len(one.record.samples) for one in results] == [1, 1]


@each
def test_calls_made_side_by_side_are_each_a_row(programs: Path, provider: str) -> None:
    def model(request: Json) -> str:
        return f"You asked: {said(last(request))}"

    agent = node_agent(programs / "vercel.mjs", "sideBySide", provider)
    for result in run_agent(agent, model, in_order=False, direct=provider in DIRECT):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French.", "length."]
        assert len(result.record.samples) == 4


@each
def test_its_agent_goes_on_with_its_own_conversation_in_one_row(programs: Path, provider: str) -> None:
    def model(request: Json) -> str | Json:
        return "It is so." if said(last(request)) == "And why?" else calculator(request)

    results = run_agent(node_agent(programs / "vercel.mjs", "agent", provider), model, direct=provider in DIRECT)
    assert [one.output for one in results] == [[answer, "It is so."] for answer in SAID]
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [len(one.record.samples) for one in results] == [1, 1]


THOUGHTS_GO_BACK = {"responses": True, "chat": False, "compatible": True, "anthropic": True}


@each
def test_which_provider_gives_thoughts_back_to_the_model(programs: Path, provider: str) -> None:
    def model(request: Json) -> Json:
        answer = calculator(request)
        return {"reasoning_content": "Let me see.", **({"content": answer} if isinstance(answer, str) else answer)}

    for result in run_agent(node_agent(programs / "vercel.mjs", "toolLoop", provider), model, direct=False):
        (said_before,) = [m for m in result.exchanges[1].request["messages"] if m["role"] == "assistant"]
        assert said_before.get("reasoning_content") == ("Let me see." if THOUGHTS_GO_BACK[provider] else None)
        assert len(result.record.samples) == (1 if THOUGHTS_GO_BACK[provider] else 2)


def test_a_refusal_that_the_stream_swallows_is_not_trained(programs: Path) -> None:
    agent = node_agent(programs / "vercel.mjs", "swallowed", "responses")
    for result in run_agent(agent, lambda _: "A large number.", exact=False):
        assert result.output == ["A large number.", ""]
        assert result.evidence.latest is not None
        assert result.evidence.latest.outcome_reason == "refused_call"
        assert list(result.record.exclusions.values()) == ["refused_call", "refused"]
        assert result.record.samples == []
