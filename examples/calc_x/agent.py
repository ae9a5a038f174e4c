"""The agent: an assistant of AutoGen with a calculator, which is an MCP server over stdio in its own process."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false
# The framework is in a separate environment (constraints.txt), where its types are known.

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
    """Return the one server for all rollouts of a runner; it ends with the runner, which closes its standard input.

    The server's tool is called `calculate`. The model's small vocabulary has `calculator`, so the tool is renamed.
    """
    quiet = {"FASTMCP_LOG_LEVEL": "WARNING"}  # otherwise it logs every request
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
        reply = (await assistant.run(task=task["question"])).messages[-1]
    finally:
        await client.close()
    # If the last step is a tool call, AutoGen returns the tool's result, which is not the model's answer.
    return float(isinstance(reply, TextMessage) and reply.content.strip() == str(task["answer"]))
