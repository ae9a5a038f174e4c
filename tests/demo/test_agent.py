"""The demo's agent as an ordinary agent: it calls any OpenAI-shaped server and scores its answers."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.demo.agent import calc_agent, is_right
from agentlightning.demo.settings import MAX_TURNS
from agentlightning.types import LLM
from tests.stubs.model_server import ModelServer

TASK: Any = {"question": "What is 34 plus 5?", "answer": 39}


def uses_the_tool(request: dict[str, Any]) -> str | dict[str, Any]:
    """Call the calculator, then give what it said."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return last["content"]
    function = {"name": "calculator", "arguments": '{"expression": "34 + 5"}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def llm_of(server: ModelServer, **sampling: Any) -> LLM:
    return LLM(endpoint=server.base_url, model="policy", sampling_parameters=sampling)


def test_it_runs_the_calculator_and_is_rewarded_for_the_right_answer() -> None:
    with ModelServer(uses_the_tool) as server:
        assert calc_agent(TASK, llm_of(server, temperature=0.5, max_tokens=9)) == 1.0
    first, second = (call.request for call in server.calls)
    assert (first["temperature"], first["max_tokens"]) == (0.5, 9)
    assert first["tools"][0]["function"]["name"] == "calculator"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "39"


def test_a_wrong_answer_at_once_has_no_reward() -> None:
    with ModelServer(lambda _: "40") as server:
        assert calc_agent(TASK, llm_of(server)) == 0.0
    assert len(server.calls) == 1


def test_it_gives_up_on_a_model_that_never_answers() -> None:
    def for_ever(request: dict[str, Any]) -> str | dict[str, Any]:
        return uses_the_tool({"messages": request["messages"][:1]})

    with ModelServer(for_ever) as server:
        assert calc_agent(TASK, llm_of(server)) == 0.0
    assert len(server.calls) == MAX_TURNS


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("39", 39, True),
        (" 39. ", 39, True),
        ("39.0", "39", True),
        ("2.5", 2.5, True),
        ("Paris", "paris.", True),
        ("390", 39, False),
        ("39 apples", 39, False),
        ("", 0, False),
        ("nan", 39, False),
    ],
)
def test_a_reply_is_right_if_it_is_the_same_number_or_text(reply: str, answer: Any, right: bool) -> None:
    assert is_right(reply, answer) is right
