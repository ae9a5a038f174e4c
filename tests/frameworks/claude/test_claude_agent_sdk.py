"""The Claude Agent SDK with its real command: the user's tools, streams, sessions, subagents, structured output."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.integrations import claude_agent_options
from tests.frameworks import suite
from tests.frameworks.conftest import Listener
from tests.frameworks.engine import Json, both_ways, calculator, call, last, numbers, offered, said, thinking
from tests.frameworks.harness import TASKS, TaskResult
from tests.frameworks.suite import (
    PRODUCTS,
    SAID,
    Model,
    Promise,
    explaining,
    keeps,
    multiply,
    needs,
    product,
    rollout_of,
)

sdk = needs("claude_agent_sdk", "claude-agent-sdk")

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

    async def run(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": str(multiply(**arguments))}]}

    own = sdk.tool("multiply", "Return a times b.", {"a": int, "b": int})(run)
    server = sdk.create_sdk_mcp_server("arithmetic", tools=[own])
    return {
        "mcp_servers": {"arithmetic": server},
        "allowed_tools": [MULTIPLY],
        "tools": [],
        "system_prompt": "Use the tool.",
    }


def named(model: Model) -> Model:
    """Name the tool as the command does: server and tool."""

    def told(request: Json) -> str | Json:
        answer = model(request)
        for made in () if isinstance(answer, str) else answer.get("tool_calls", ()):
            made["function"]["name"] = MULTIPLY
        return answer

    return told


async def result_of(task: str, options: Any) -> Any:
    """Return the last message of a run: its result."""
    messages = [message async for message in sdk.query(prompt=task, options=options)]
    assert not messages[-1].is_error, messages[-1]
    return messages[-1]


async def helper(task: str, llm: agl.LLM) -> str:
    return (await result_of(task, claude_agent_options(llm, **arithmetic()))).result


async def conversation(llm: agl.LLM, *questions: str) -> list[str]:
    answers: list[str] = []
    async with sdk.ClaudeSDKClient(claude_agent_options(llm, **arithmetic())) as client:
        for question in questions:
            await client.query(question)
            answers += [one.result async for one in client.receive_response() if hasattr(one, "result")]
    return answers


def only_its_tool_is_offered(result: TaskResult) -> None:
    assert offered(result.exchanges[0].request) == {MULTIPLY}


LOOP = suite.TOOL_LOOP.but(model=named(calculator), direct=False, also=only_its_tool_is_offered)
SEVERAL = suite.SEVERAL_TOOLS.but(model=named(both_ways), direct=False)
KEPT = suite.THOUGHTS_KEPT.but(model=named(thinking))


test_an_agent_with_a_tool = keeps(LOOP, SEVERAL, KEPT)(helper)


@keeps(suite.WORDS, model=named(calculator), direct=False)
async def test_a_run_gives_its_words_as_they_come(task: str, llm: agl.LLM) -> list[str]:
    options = claude_agent_options(llm, include_partial_messages=True, **arithmetic())
    events = [one.event async for one in sdk.query(prompt=task, options=options) if hasattr(one, "event")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return [delta["text"] for delta in deltas if delta["type"] == "text_delta"]


@keeps(suite.CONVERSATION, model=named(explaining), direct=False)
async def test_a_session_keeps_the_conversation(task: str, llm: agl.LLM) -> list[str]:
    return await conversation(llm, task, "And why?")


def in_form_then_done(request: Json) -> str | Json:
    if last(request)["role"] == "tool":
        return "Done."
    (tool,) = request["tools"]
    assert tool["function"]["parameters"]["required"] == ["a", "b", "value"]
    return call(tool["function"]["name"], **product(request))


@keeps(suite.PARSED, model=in_form_then_done, outputs=[one.model_dump() for one in PRODUCTS], direct=False)
async def test_structured_output(task: str, llm: agl.LLM) -> Any:
    names = ["a", "b", "value"]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    output_format = {"type": "json_schema", "schema": schema}
    return (await result_of(task, claude_agent_options(llm, tools=[], output_format=output_format))).structured_output


STYLES = ("tersely", "in verse", "in French")


def echo(request: Json) -> str:
    question = next(said(message) for message in request["messages"] if message["role"] == "user")
    return f"Answered {question.rsplit(' ', 1)[1]}"


@keeps(
    Promise("in styles", echo, [["Answered tersely.", "Answered verse.", "Answered French."]] * 2, [1] * 3),
    in_order=False,
    direct=False,
)
async def test_runs_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    async def ask(style: str) -> str:
        return (await result_of(f"{task} Answer {style}.", claude_agent_options(llm, tools=[]))).result

    return list(await asyncio.gather(*map(ask, STYLES)))


def asking_the_expert(request: Json) -> str | Json:
    if "Agent" not in offered(request):
        return named(calculator)(request)
    if last(request)["role"] == "tool":
        return f"The expert says: {re.findall('It is [0-9]+', said(last(request)))[-1]}"
    question = "What is {a} times {b}?".format(**numbers(request))
    return call("Agent", description="Multiply", prompt=question, subagent_type="expert")


ANSWERS = ["The expert says: It is 42", "The expert says: It is 72"]


@keeps(Promise("an agent asks another", asking_the_expert, ANSWERS, [2, 2], direct=False))
async def test_a_subagent_calls_the_same_model(task: str, llm: agl.LLM) -> str:
    expert = sdk.AgentDefinition(description="Multiplies.", prompt="Multiply.", tools=[MULTIPLY], model="haiku")
    own = {**arithmetic(), "tools": ["Agent"], "allowed_tools": [MULTIPLY, "Agent"]}
    return (await result_of(task, claude_agent_options(llm, env=WAITING, agents={"expert": expert}, **own))).result


# --- without the options ---------------------------------------------------------------------------------------------


def titled(request: Json) -> str | Json:
    return named(calculator)(request) if offered(request) else '{"title": "A product"}'


def one_is_a_title(result: TaskResult) -> None:
    assert len([exchange for exchange in result.exchanges if not offered(exchange.request)]) == 1
    assert list(result.record.exclusions.values()).count("helper") == 1


LOOSE: Json = {"in_order": False, "direct": False, "options": {"exact": False}}


@keeps(Promise("title", titled, SAID, [2], also=one_is_a_title), **LOOSE)
async def test_the_call_for_a_sessions_title_is_no_part_of_the_agents_work(task: str, llm: agl.LLM) -> str:
    env = {"ANTHROPIC_BASE_URL": llm.get_base_url(), "ANTHROPIC_API_KEY": llm.api_key or "unused"}
    options = sdk.ClaudeAgentOptions(model=llm.model, env=env, setting_sources=[], **arithmetic())
    return (await result_of(task, options)).result


def summarising(request: Json) -> str | Json:
    if "Respond with TEXT ONLY" in said(last(request)):
        return "<summary>A product was asked for and found.</summary>"
    return "The same." if "Once more" in str(request["messages"]) else named(calculator)(request)


def one_is_a_summary(result: TaskResult) -> None:
    assert list(result.record.exclusions.values()) == ["helper"]


COMPACTED = [[answer, "", "The same."] for answer in SAID]


@keeps(Promise("summary", summarising, COMPACTED, [1, 2], also=one_is_a_summary), **LOOSE)
async def test_the_summary_of_a_session_is_no_part_of_the_agents_work(task: str, llm: agl.LLM) -> list[str]:
    return await conversation(llm, task, "/compact", f"Once more: {task}")


# --- what the options add --------------------------------------------------------------------------------------------


def test_nothing_but_the_agents_own_calls_is_made(outside: Listener) -> None:
    LOOP.check(rollout_of(helper))
    assert outside.asked == []


def test_accounts_of_the_machine_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"):
        monkeypatch.setenv(name, "sk-of-the-machine")
    for name in ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ANTHROPIC_MODEL", "another")
    LOOP.but(tasks=TASKS[:1]).check(rollout_of(helper))


def parameters_are_sent(result: TaskResult) -> None:
    for exchange in result.exchanges:
        settings = {name: exchange.request[name] for name in ("temperature", "max_tokens", "top_p")}
        assert settings == {"temperature": 0.7, "max_tokens": 99, "top_p": 0.9}


@keeps(LOOP, also=parameters_are_sent)
async def test_sampling_parameters_go_with_each_call(task: str, llm: agl.LLM) -> str:
    warm = llm.model_copy(update={"sampling_parameters": {"temperature": 0.7, "max_tokens": 99}})
    env = {"CLAUDE_CODE_EXTRA_BODY": '{"top_p": 0.9}'}
    return (await result_of(task, claude_agent_options(warm, env=env, **arithmetic()))).result


def test_what_comes_from_the_model_cannot_be_set_and_the_rest_can() -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy", api_key="key")
    with pytest.raises(ValueError, match="Remove ANTHROPIC_API_KEY, model: the values come from llm"):
        claude_agent_options(llm, model="opus", env={"ANTHROPIC_API_KEY": "mine"})
    with pytest.raises(ValueError, match=r"CLAUDE_CODE_EXTRA_BODY must be a JSON object .*; got '\[\]'"):
        claude_agent_options(llm, env={"CLAUDE_CODE_EXTRA_BODY": "[]"})
    options = claude_agent_options(llm, max_turns=3, setting_sources=["project"], env={"ENABLE_TOOL_SEARCH": "true"})
    assert (options.max_turns, options.setting_sources, options.model) == (3, ["project"], "policy")
    assert options.env["ENABLE_TOOL_SEARCH"] == "true"
    assert options.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
