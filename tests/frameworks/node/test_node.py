"""Node's openai and @anthropic-ai/sdk clients: every dialect; tools, streams, calls side by side, parsed answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.engine import Json, both_ways, calculator, numbers, said
from tests.frameworks.harness import run_agent
from tests.frameworks.node.node_programs import PRODUCTS, needs_node, node_agent, programs

pytestmark = needs_node

__all__ = ["programs"]  # a fixture

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
TOOL_LOOPS = [
    ("openai.mjs", "chat"),
    ("openai.mjs", "responses"),
    ("openai.mjs", "responsesRemembered"),
    ("anthropic.mjs", "tool"),
    ("anthropic.mjs", "toolRunner"),
]
REFUSED = {"toolRunner": 1}
"""Calls that the gateway refuses: this one asks for a server that remembers, once."""


def product(request: Json) -> str:
    """A model that answers in the form that it was told; fails if it was told none."""
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


@pytest.mark.parametrize(("program", "agent"), TOOL_LOOPS)
def test_a_tool_loop_is_one_row(programs: Path, program: str, agent: str) -> None:
    results = run_agent(node_agent(programs / program, agent), direct=agent == "chat", refused=REFUSED.get(agent, 0))
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@pytest.mark.parametrize(("program", "agent"), TOOL_LOOPS)
def test_several_tool_calls_at_once_are_one_row(programs: Path, program: str, agent: str) -> None:
    results = run_agent(
        node_agent(programs / program, agent), both_ways, direct=agent == "chat", refused=REFUSED.get(agent, 0)
    )
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


@pytest.mark.parametrize(
    ("program", "agent"),
    [("openai.mjs", "chatStreams"), ("openai.mjs", "responsesStreams"), ("anthropic.mjs", "streams")],
)
def test_streams_arrive_piece_by_piece_and_are_one_row(programs: Path, program: str, agent: str) -> None:
    results = run_agent(node_agent(programs / program, agent), direct=agent == "chatStreams")
    for result, answer in zip(results, SAID, strict=True):
        words, used = result.output["words"], [one.reply["usage"]["total_tokens"] for one in result.exchanges]
        assert "".join(words) == result.output["text"] == answer
        assert len([word for word in words if word]) == len(answer.split())
        assert result.output["used"] == (sum(used) if agent == "chatStreams" else used[-1])
        assert len(result.record.samples) == 1


@pytest.mark.parametrize(
    ("program", "agent"),
    [("openai.mjs", "chatParsed"), ("openai.mjs", "responsesParsed"), ("anthropic.mjs", "parsed")],
)
def test_structured_output_is_parsed(programs: Path, program: str, agent: str) -> None:
    results = run_agent(node_agent(programs / program, agent), product, direct=agent == "chatParsed")
    assert [one.output for one in results] == PRODUCTS


@pytest.mark.parametrize(("program", "agent"), [("openai.mjs", "chatSideBySide"), ("anthropic.mjs", "sideBySide")])
def test_calls_made_side_by_side_are_each_a_row(programs: Path, program: str, agent: str) -> None:
    def model(request: Json) -> str:
        return f"You asked: {said(request['messages'][-1])}"

    for result in run_agent(
        node_agent(programs / program, agent), model, in_order=False, direct=agent == "chatSideBySide"
    ):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French.", "length."]
        assert len(result.record.samples) == 4


def test_thoughts_go_back_over_messages_and_are_one_row(programs: Path) -> None:
    def model(request: Json) -> Json:
        answer = calculator(request)
        if isinstance(answer, str):
            return {"content": answer, "reasoning_content": "The tool has said it."}
        return {**answer, "reasoning_content": "I shall use the tool."}

    for result, answer in zip(
        run_agent(node_agent(programs / "anthropic.mjs", "thinking"), model, direct=False), SAID, strict=True
    ):
        assert result.output == ["I shall use the tool.", "The tool has said it.", answer]
        assert result.exchanges[1].request["messages"][-2]["reasoning_content"] == "I shall use the tool."
        assert len(result.record.samples) == 1


@pytest.mark.parametrize(("program", "agent"), TOOL_LOOPS)
def test_every_loop_gives_thoughts_back_to_the_model(programs: Path, program: str, agent: str) -> None:
    def model(request: Json) -> Json:
        answer = calculator(request)
        return {"reasoning_content": "Let me see.", **({"content": answer} if isinstance(answer, str) else answer)}

    loop = node_agent(programs / program, agent)
    (result,) = run_agent(loop, model, direct=False, refused=REFUSED.get(agent, 0), tasks=["What is 6 times 7?"])
    assert result.exchanges[1].request["messages"][-2]["reasoning_content"] == "Let me see."
    assert len(result.record.samples) == 1
