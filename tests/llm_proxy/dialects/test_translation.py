"""Tools that only a vendor's server can run, in each dialect: the model sees none, and the record names them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.llm_proxy.harness import REQUESTS, GatewayHarness
from tests.stubs.model_server import ModelServer

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {}}
ADD: dict[str, Json] = {
    "chat/completions": {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    "messages": {"name": "add", "input_schema": SCHEMA},
    "responses": {"type": "function", "name": "add", "parameters": SCHEMA},
}
"""A function of the agent for each route."""
TYPES = {
    "chat/completions": ("web_search", "web_search_preview", "code_interpreter", "mcp"),
    "messages": (
        *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset"),
        *("tool_search_tool_regex_20251119", "tool_search_tool_bm25_20251119"),
    ),
    "responses": (
        *("web_search", "web_search_2025_08_26", "file_search", "code_interpreter", "image_generation"),
        *("computer_use_preview", "local_shell", "mcp", "tool_search"),
    ),
}
CASES = [(route, kind) for route, kinds in TYPES.items() for kind in kinds]


async def ask(harness: GatewayHarness, route: str, tools: list[Json], **fields: Any) -> tuple[int, Json, Json]:
    """Make a call; return status, reply and the typed attributes of its record."""
    status, reply = await harness.post(f"/v1/{route}", {**REQUESTS[route], "tools": tools, **fields})
    return status, reply, (await harness.raw())[-1]


@pytest.mark.parametrize(("route", "kind"), CASES)
async def test_the_model_is_shown_the_others_and_the_call_names_what_was_left_out(
    harness: GatewayHarness, route: str, kind: str
) -> None:
    status, _, call = await ask(harness, route, [{"type": kind, "name": "search"}, ADD[route]])
    assert (status, call["left_out_tools"]) == (200, [kind])
    assert [tool["function"]["name"] for tool in harness.model.calls[-1].request["tools"]] == ["add"]


@pytest.mark.parametrize("route", TYPES)
async def test_where_no_tool_is_left_the_server_is_asked_for_none(harness: GatewayHarness, route: str) -> None:
    auto = {"type": "auto"} if route == "messages" else "auto"
    status, _, _ = await ask(harness, route, [{"type": TYPES[route][0], "name": "search"}], tool_choice=auto)
    assert status == 200
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(harness.model.calls[-1].request)


@pytest.mark.parametrize("route", TYPES)
async def test_a_request_without_such_tools_names_none(harness: GatewayHarness, route: str) -> None:
    status, _, call = await ask(harness, route, [ADD[route]])
    assert (status, "left_out_tools" in call) == (200, False)


@pytest.mark.parametrize(
    ("route", "choice", "others"),
    [
        ("chat/completions", "required", []),
        ("chat/completions", {"type": "function", "function": {"name": "search"}}, [ADD["chat/completions"]]),
        ("chat/completions", {"type": "web_search"}, [ADD["chat/completions"]]),
        ("messages", {"type": "any"}, []),
        ("messages", {"type": "tool", "name": "search"}, [ADD["messages"]]),
        ("responses", "required", []),
        ("responses", {"type": "web_search"}, [ADD["responses"]]),
        ("responses", {"type": "function", "name": "search"}, [ADD["responses"]]),
    ],
)
async def test_a_choice_that_can_no_longer_be_met_is_a_400(
    harness: GatewayHarness, route: str, choice: Any, others: list[Json]
) -> None:
    tools = [{"type": TYPES[route][0], "name": "search"}, *others]
    status, reply, call = await ask(harness, route, tools, tool_choice=choice)
    assert (status, call["state"]) == (400, "refused")
    assert "only a vendor's server can run web_search" in reply["error"]["message"]
    assert harness.model.calls == []


async def test_of_allowed_tools_those_of_the_server_are_left_out(harness: GatewayHarness) -> None:
    names = [{"type": "web_search"}, {"type": "function", "name": "add"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": names}
    status, _, _ = await ask(harness, "responses", [{"type": "web_search"}, ADD["responses"]], tool_choice=choice)
    assert (status, harness.model.calls[-1].request["tool_choice"]) == (200, "required")


@pytest.mark.parametrize("route", TYPES)
async def test_a_policy_can_refuse_them(route: str) -> None:
    policies = {"main": {"kind": "trained", "server_tools": "refuse"}}
    async with GatewayHarness(policies=policies) as harness:
        status, reply, _ = await ask(harness, route, [ADD[route], {"type": TYPES[route][0], "name": "search"}])
        assert status == 400
        assert "'tools[1].type'" in reply["error"]["message"]
        assert (await ask(harness, route, [ADD[route]]))[0] == 200


@pytest.mark.parametrize("policies", [{"bought": {"kind": "external"}}, None])
async def test_a_vendors_server_that_speaks_chat_gets_its_own_tools(policies: Any) -> None:
    with ModelServer() as model:
        entry = model.entry("policy")
        if policies is None:
            entry["litellm_params"]["model"] = "openai/policy"
        async with GatewayHarness(model_list=[entry], policies=policies) as harness:
            status, _, call = await ask(harness, "chat/completions", [{"type": "web_search"}])
            assert (status, "left_out_tools" in call) == (200, False)
            assert model.calls[-1].request["tools"] == [{"type": "web_search"}]
