"""The Claude Agent SDK with its real command: the user's tools, streams, sessions, subagents, structured output."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.integrations import claude_agent_options
from tests.frameworks.conftest import Listener
from tests.frameworks.engine import Json, both_ways, calculator, last, numbers, offered, said
from tests.frameworks.harness import run_agent

sdk = pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed: make test-frameworks")

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
WAITING = {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}
"""Subagents are waited for."""
MULTIPLY = "mcp__arithmetic__multiply"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account and no settings, as on a fresh machine, and a folder to work in."""
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def arithmetic() -> dict[str, Any]:
    """Return the options that offer one tool of the user's, which runs in this process, and no other."""

    async def run(given: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": str(given["a"] * given["b"])}]}

    multiply = sdk.tool("multiply", "Return a times b.", {"a": int, "b": int})(run)
    server = sdk.create_sdk_mcp_server("arithmetic", tools=[multiply])
    return {
        "mcp_servers": {"arithmetic": server},
        "allowed_tools": [MULTIPLY],
        "tools": [],
        "system_prompt": "Use the tool.",
    }


def named(answer: str | Json) -> str | Json:
    """Name the tool as the command does: server and tool."""
    if not isinstance(answer, str):
        for made in answer["tool_calls"]:
            made["function"]["name"] = MULTIPLY
    return answer


async def result_of(task: str, options: Any) -> Any:
    """Return the last message of a run: its result."""
    messages = [message async for message in sdk.query(prompt=task, options=options)]
    assert not messages[-1].is_error, messages[-1]
    return messages[-1]


@agl.rollout
async def helper(task: str, llm: agl.LLM) -> str:
    return (await result_of(task, claude_agent_options(llm, **arithmetic()))).result


def test_an_agent_with_a_tool_is_one_row() -> None:
    results = run_agent(helper, lambda request: named(calculator(request)), direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]
    for one in results:
        assert offered(one.exchanges[0].request) == {MULTIPLY}


def test_several_tool_calls_at_once_are_one_row() -> None:
    results = run_agent(helper, lambda request: named(both_ways(request)), direct=False)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_a_run_gives_its_words_as_they_come() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        options = claude_agent_options(llm, include_partial_messages=True, **arithmetic())
        events = [one.event async for one in sdk.query(prompt=task, options=options) if hasattr(one, "event")]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return [delta["text"] for delta in deltas if delta["type"] == "text_delta"]

    for result, answer in zip(
        run_agent(agent, lambda request: named(calculator(request)), direct=False), SAID, strict=True
    ):
        assert "".join(result.output) == answer
        assert len(result.output) == len(answer.split())
        assert len(result.record.samples) == 1


def test_a_session_keeps_the_conversation_in_one_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        answers: list[str] = []
        async with sdk.ClaudeSDKClient(claude_agent_options(llm, **arithmetic())) as client:
            for question in (task, "And why?"):
                await client.query(question)
                answers += [one.result async for one in client.receive_response() if hasattr(one, "result")]
        return answers

    def model(request: Json) -> str | Json:
        return "It is so." if "And why?" in said(last(request)) else named(calculator(request))

    results = run_agent(agent, model, direct=False)
    assert [one.output for one in results] == [[answer, "It is so."] for answer in SAID]
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_thoughts_go_back_to_the_model_in_one_row() -> None:
    def model(request: Json) -> Json:
        answer = named(calculator(request))
        return {"reasoning_content": "Let me see.", **({"content": answer} if isinstance(answer, str) else answer)}

    results = run_agent(helper, model, direct=False)
    assert [one.output for one in results] == SAID
    assert [one.exchanges[1].request["messages"][-2]["reasoning_content"] for one in results] == ["Let me see."] * 2
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_structured_output_is_parsed() -> None:
    names = ("a", "b", "value")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(names)}

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Any:
        wanted = {"type": "json_schema", "schema": schema}
        return (await result_of(task, claude_agent_options(llm, tools=[], output_format=wanted))).structured_output

    def model(request: Json) -> str | Json:
        if last(request)["role"] == "tool":
            return "Done."
        (tool,) = request["tools"]
        assert tool["function"]["parameters"]["required"] == list(names)
        found = numbers(request)
        arguments = json.dumps({**found, "value": found["a"] * found["b"]})
        function = {"name": tool["function"]["name"], "arguments": arguments}
        return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}

    results = run_agent(agent, model, direct=False)
    assert [one.output for one in results] == [{"a": 6, "b": 7, "value": 42}, {"a": 8, "b": 9, "value": 72}]
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_runs_side_by_side_are_each_a_row() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        async def ask(style: str) -> str:
            return (await result_of(f"{task} Answer {style}.", claude_agent_options(llm, tools=[]))).result

        return list(await asyncio.gather(*map(ask, ("tersely", "in verse", "in French"))))

    def model(request: Json) -> str:
        question = next(said(message) for message in request["messages"] if message["role"] == "user")
        return f"You asked: {question}"

    for result in run_agent(agent, model, in_order=False, direct=False):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French."]
        assert len(result.record.samples) == 3


def test_a_subagent_is_a_row_of_its_own_and_calls_the_same_model() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        expert = sdk.AgentDefinition(description="Multiplies.", prompt="Multiply.", tools=[MULTIPLY], model="haiku")
        own = {**arithmetic(), "tools": ["Agent"], "allowed_tools": [MULTIPLY, "Agent"]}
        return (await result_of(task, claude_agent_options(llm, env=WAITING, agents={"expert": expert}, **own))).result

    def model(request: Json) -> str | Json:
        if "Agent" not in offered(request):
            return named(calculator(request))
        if last(request)["role"] == "tool":
            return f"The expert says: {re.findall('It is [0-9]+', said(last(request)))[-1]}"
        question = f"What is {numbers(request)['a']} times {numbers(request)['b']}?"
        arguments = {"description": "Multiply", "prompt": question, "subagent_type": "expert"}
        function = {"name": "Agent", "arguments": json.dumps(arguments)}
        return {"content": None, "tool_calls": [{"id": "call_expert", "type": "function", "function": function}]}

    results = run_agent(agent, model, direct=False)
    assert [one.output for one in results] == ["The expert says: It is 42", "The expert says: It is 72"]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2, 2], [2, 2]]


# --- without the options ---------------------------------------------------------------------------------------------


@agl.rollout
async def told_by_variables(task: str, llm: agl.LLM) -> str:
    env = {"ANTHROPIC_BASE_URL": llm.get_base_url(), "ANTHROPIC_API_KEY": llm.api_key or "none"}
    options = sdk.ClaudeAgentOptions(model=llm.model, env=env, setting_sources=[], **arithmetic())
    return (await result_of(task, options)).result


def test_the_call_for_a_sessions_title_is_no_part_of_the_agents_work() -> None:
    def model(request: Json) -> str | Json:
        return named(calculator(request)) if offered(request) else '{"title": "A product"}'

    results = run_agent(told_by_variables, model, in_order=False, exact=False)
    assert [one.output for one in results] == SAID
    for one in results:
        titles = [exchange for exchange in one.exchanges if not offered(exchange.request)]
        assert len(titles) == 1
        assert list(one.record.exclusions.values()).count("helper") == 1
        assert [len(row.call_ids) for row in one.record.samples] == [2]


def test_the_summary_of_a_session_is_no_part_of_the_agents_work() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        answers: list[str] = []
        async with sdk.ClaudeSDKClient(claude_agent_options(llm, **arithmetic())) as client:
            for question in (task, "/compact", f"Once more: {task}"):
                await client.query(question)
                answers += [one.result async for one in client.receive_response() if hasattr(one, "result")]
        return answers

    def model(request: Json) -> str | Json:
        if "Respond with TEXT ONLY" in said(last(request)):
            return "<summary>A product was asked for and found.</summary>"
        asked = "Once more" in str(request["messages"])
        return "The same." if asked else named(calculator(request))

    for result, answer in zip(run_agent(agent, model, in_order=False, exact=False), SAID, strict=True):
        assert result.output == [answer, "", "The same."]
        assert list(result.record.exclusions.values()) == ["helper"]
        assert [len(row.call_ids) for row in result.record.samples] == [2, 1]


# --- what the options add --------------------------------------------------------------------------------------------


def test_nothing_but_the_agents_own_calls_is_made(outside: Listener) -> None:
    results = run_agent(helper, lambda request: named(calculator(request)), direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert outside.asked == []


def test_accounts_of_the_machine_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"):
        monkeypatch.setenv(name, "sk-of-the-machine")
    for name in ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ANTHROPIC_MODEL", "another")
    (result,) = run_agent(
        helper, lambda request: named(calculator(request)), direct=False, tasks=["What is 6 times 7?"]
    )
    assert result.output == SAID[0]


def test_sampling_parameters_go_with_each_call() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> str:
        warm = llm.model_copy(update={"sampling_parameters": {"temperature": 0.7, "max_tokens": 99}})
        env = {"CLAUDE_CODE_EXTRA_BODY": '{"top_p": 0.9}'}
        return (await result_of(task, claude_agent_options(warm, env=env, **arithmetic()))).result

    for result in run_agent(agent, lambda request: named(calculator(request)), direct=False):
        for exchange in result.exchanges:
            asked = {name: exchange.request[name] for name in ("temperature", "max_tokens", "top_p")}
            assert asked == {"temperature": 0.7, "max_tokens": 99, "top_p": 0.9}


def test_what_comes_from_the_model_cannot_be_set_and_the_rest_can() -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy", api_key="key")
    with pytest.raises(ValueError, match="ANTHROPIC_API_KEY, model cannot be set: they come from llm"):
        claude_agent_options(llm, model="opus", env={"ANTHROPIC_API_KEY": "mine"})
    with pytest.raises(ValueError, match=r"CLAUDE_CODE_EXTRA_BODY must be a JSON object .*; got '\[\]'"):
        claude_agent_options(llm, env={"CLAUDE_CODE_EXTRA_BODY": "[]"})
    options = claude_agent_options(llm, max_turns=3, setting_sources=["project"], env={"ENABLE_TOOL_SEARCH": "true"})
    assert (options.max_turns, options.setting_sources, options.model) == (3, ["project"], "policy")
    assert options.env["ENABLE_TOOL_SEARCH"] == "true"
    assert options.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
