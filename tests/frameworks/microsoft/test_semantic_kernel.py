"""Semantic Kernel: its chat agent and its kernel, its responses agent; tools, streams, threads, parsed answers."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, both_ways, calculator, thinking
from tests.frameworks.suite import STYLES, Maker, Model, Product, address, explaining, keeps, needs

openai = needs("openai")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it overrides a method of pydantic's that is to go
    needs("semantic_kernel", "semantic-kernel")
    from semantic_kernel import Kernel
    from semantic_kernel.agents import (
        ChatCompletionAgent,
        ChatHistoryAgentThread,
        OpenAIResponsesAgent,
        ResponsesAgentThread,
    )
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.functions import KernelArguments, kernel_function


class Arithmetic:
    """A plugin."""

    @kernel_function
    def multiply(self, a: int, b: int) -> str:
        """Return a times b."""
        return str(a * b)


def service_of(llm: agl.LLM) -> Any:
    return OpenAIChatCompletion(ai_model_id=llm.model, async_client=openai.AsyncOpenAI(**address(llm)))


HELPER: Json = {"name": "helper", "instructions": "Use the tool."}


def over_chat(llm: agl.LLM) -> tuple[Any, Any]:
    return ChatCompletionAgent(service=service_of(llm), plugins=[Arithmetic()], **HELPER), ChatHistoryAgentThread()


def over_responses(llm: agl.LLM, **settings: Any) -> tuple[Any, Any]:
    client = openai.AsyncOpenAI(**address(llm))
    made = {"ai_model_id": llm.model, "client": client, "plugins": [Arithmetic()]}
    agent = OpenAIResponsesAgent(**made, **HELPER, **settings)
    return agent, ResponsesAgentThread(client=client, enable_store=agent.store_enabled)


def over_responses_without_store(llm: agl.LLM) -> tuple[Any, Any]:
    return over_responses(llm, store_enabled=False)


REMEMBERED = {"chat": over_chat, "responses": over_responses}
DIALECTS = {**REMEMBERED, "responses without store": over_responses_without_store}


def as_plugin(model: Model) -> Model:
    """Name the tool as the library does: plugin and function."""

    def named(request: Json) -> str | Json:
        answer = model(request)
        for made in () if isinstance(answer, str) else answer.get("tool_calls", ()):
            made["function"]["name"] = "Arithmetic-multiply"
        return answer

    return named


async def with_tool(task: str, llm: agl.LLM, maker: Maker) -> str:
    helper, thread = maker(llm)
    return str((await helper.get_response(task, thread=thread)).message)


test_an_agent_with_a_tool = keeps(suite.TOOL_LOOP, on=DIALECTS, model=as_plugin(calculator))(with_tool)
test_several_tools_at_once = keeps(suite.SEVERAL_TOOLS, on=DIALECTS, model=as_plugin(both_ways))(with_tool)
test_remembered_responses_keep_thoughts = keeps(
    suite.THOUGHTS_KEPT, on={"responses": over_responses}, model=as_plugin(thinking)
)(with_tool)
test_others_drop_thoughts = keeps(
    suite.THOUGHTS_DROPPED,
    on={"chat": over_chat, "responses without store": over_responses_without_store},
    model=as_plugin(thinking),
)(with_tool)


@keeps(suite.WORDS, on=DIALECTS, model=as_plugin(calculator))
async def test_a_streamed_run(task: str, llm: agl.LLM, maker: Maker) -> list[str]:
    helper, thread = maker(llm)
    return [str(piece.message) async for piece in helper.invoke_stream(task, thread=thread)]


async def conversation(task: str, llm: agl.LLM, maker: Maker) -> list[str]:
    helper, thread = maker(llm)
    first = await helper.get_response(task, thread=thread)
    then = await helper.get_response("And why?", thread=first.thread)
    return [str(first.message), str(then.message)]


test_a_thread_keeps_the_conversation = keeps(suite.CONVERSATION, on=REMEMBERED, model=as_plugin(explaining))(
    conversation
)
# it leaves the call of the tool out of the history
test_a_thread_without_store = keeps(
    suite.CONVERSATION,
    on={"responses without store": over_responses_without_store},
    model=as_plugin(explaining),
    rows=[1, 2],
)(conversation)


@keeps(suite.PARSED, on={"chat": True, "responses": False})
async def test_structured_output(task: str, llm: agl.LLM, over_chat: bool) -> Product:
    if over_chat:
        arguments = KernelArguments(settings=OpenAIChatPromptExecutionSettings(response_format=Product))
        helper: Any = ChatCompletionAgent(service=service_of(llm), arguments=arguments, **HELPER)
    else:
        response_format = OpenAIResponsesAgent.configure_response_format(Product)
        client = openai.AsyncOpenAI(**address(llm))
        helper = OpenAIResponsesAgent(ai_model_id=llm.model, client=client, text=response_format)
    return Product.model_validate_json(str((await helper.get_response(task)).message))


@keeps(suite.IN_STYLES)
async def test_prompts_of_a_kernel_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    kernel = Kernel(services=service_of(llm))

    async def ask(style: str) -> str:
        arguments = KernelArguments(question=task, style=style)
        return str(await kernel.invoke_prompt("{{$question}} Answer {{$style}}.", arguments=arguments))

    return list(await asyncio.gather(*map(ask, STYLES)))
