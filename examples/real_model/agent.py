"""The agent: pydantic-ai asks a model what kind of thing a word names. The right kind gets reward 1."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# The framework is in a separate environment (constraints.txt), where its types are known.

from __future__ import annotations

import openai
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

import agentlightning as agl
from bench.pretrained.agent import is_right
from bench.pretrained.words import Item

agent = Agent(instructions="Answer with one word.")


def history(task: Item) -> list[ModelMessage]:
    """Return the examples before the question as messages of the framework."""
    shown: list[ModelMessage] = []
    for message in task["messages"][1:-1]:
        if message["role"] == "user":
            shown.append(ModelRequest(parts=[UserPromptPart(message["content"])]))
        else:
            shown.append(ModelResponse(parts=[TextPart(message["content"])]))
    return shown


@agl.rollout
async def names_kind(task: Item, llm: agl.LLM) -> float:
    url, key = llm.get_base_url(), llm.api_key or "unused"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=1800) as client:  # seconds; a CPU is slow
        result = await agent.run(
            task["messages"][-1]["content"],
            model=OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=client)),
            message_history=history(task),
            model_settings=ModelSettings(**llm.sampling_parameters),
        )
    return float(is_right(result.output, task["answer"]))
