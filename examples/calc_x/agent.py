"""The agent: an assistant of AutoGen whose calculator is an MCP server, a process that it talks to over stdio."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
# The framework is in an environment of its own (constraints.txt), where its types are known.

from __future__ import annotations

import sys
from functools import cache

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.tools import ToolOverride
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

import agentlightning as agl
from agentlightning.demo.tasks import Task

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


@cache
def calculator() -> McpWorkbench:
    """One server for all rollouts of a runner; it ends with the runner, which closes its standard input.

    The server calls its tool `calculate`. The model's few words include `calculator`, so that is what it is told.
    """
    quiet = {"FASTMCP_LOG_LEVEL": "WARNING"}  # else it tells of every request
    server = StdioServerParams(command=sys.executable, args=["-m", "mcp_server_calculator"], env=quiet)
    return McpWorkbench(server, tool_overrides={"calculate": ToolOverride(name="calculator")})


@agl.rollout
async def solves(task: Task, llm: agl.LLM) -> float:
    client = OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.get_base_url(),
        api_key=llm.api_key or "unused",
        model_info=INFO,
        **llm.sampling_parameters,
    )
    assistant = AssistantAgent("assistant", client, workbench=calculator(), system_message=None, max_tool_iterations=2)
    try:
        said = (await assistant.run(task=task["question"])).messages[-1]
    finally:
        await client.close()
    # After its last tool call AutoGen gives the tool's result for an answer; that is not what the model said.
    return float(isinstance(said, TextMessage) and said.content.strip() == str(task["answer"]))
