"""The agent, made with the OpenAI Agents SDK: it searches over MCP, then answers. A correct answer gets reward 1.0."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false
# The framework is in a separate environment (constraints.txt), where its types are known.

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.mcp import MCPServerManager, MCPServerStdio
from facts import Task

import agentlightning as agl

MOST_CALLS = 4
# Otherwise the SDK sends each run's trace to OpenAI, if it finds an API key.
UNTRACED = RunConfig(tracing_disabled=True)


@cache
def manager(index: str) -> MCPServerManager:
    """Return the one server for all rollouts of a runner; it ends with the runner, which closes its standard input."""
    server = MCPServerStdio(
        {"command": sys.executable, "args": [str(Path(__file__).with_name("server.py")), index]},
        cache_tools_list=True,
        client_session_timeout_seconds=60,
    )
    return MCPServerManager([server], connect_timeout_seconds=60, strict=True)


@agl.rollout
async def answers(task: Task, llm: agl.LLM) -> float:
    url, key = llm.get_base_url(), llm.api_key or "unused"
    servers = await manager(task["index"]).connect_all()  # only the first call starts the server
    async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=600) as client:
        agent = Agent(
            name="researcher",
            model=OpenAIChatCompletionsModel(llm.model, client),
            model_settings=ModelSettings(**llm.sampling_parameters),
            mcp_servers=servers,
        )
        try:
            result = await Runner.run(agent, task["question"], max_turns=MOST_CALLS, run_config=UNTRACED)
        except (MaxTurnsExceeded, ModelBehaviorError):  # too many searches, or an unknown tool
            return 0.0
    return float(str(result.final_output).strip() == task["answer"])
