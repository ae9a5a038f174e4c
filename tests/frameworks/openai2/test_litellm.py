"""LiteLLM as a client library: tools, streams, parallel calls, structured output; over chat, responses and messages."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import PARAMETERS, Product, keeps, multiply, needs

litellm = needs("litellm")

TOOL = {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS}}


def told(llm: agl.LLM, provider: str = "openai", **more: Any) -> Json:
    return {
        "model": f"{provider}/{llm.model}",
        "api_base": llm.get_base_url(),
        "api_key": llm.api_key or "unused",
        **more,
    }


def answered(messages: list[Any], message: Any) -> None:
    """Add an answer, and the result of each tool call in it."""
    messages.append(message)
    for call in message.tool_calls or []:
        content = str(multiply(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def tool_loop(task: str, llm: agl.LLM, provider: str = "openai") -> str:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        arguments = told(llm, provider, messages=messages, tools=[TOOL])
        message = litellm.completion(**arguments).choices[0].message
        answered(messages, message)
        if not message.tool_calls:
            return message.content


test_a_tool_loop = keeps(suite.TOOL_LOOP)(tool_loop)
PROVIDERS = {name: name for name in ("openai", "hosted_vllm", "anthropic")}
test_thoughts = keeps(suite.THOUGHTS_KEPT, on=PROVIDERS)(tool_loop)


@keeps(suite.WORDS)
async def test_streams(task: str, llm: agl.LLM) -> Json:
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        arguments = told(llm, messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in await litellm.acompletion(**arguments)]
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        answered(messages, message)
        if not message.tool_calls:
            words = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            return {"words": words, "text": message.content}


def schema_is_sent(result: TaskResult) -> None:
    assert result.exchanges[0].request["response_format"]["type"] == "json_schema"


@keeps(suite.PARSED, also=schema_is_sent)
def test_structured_output(task: str, llm: agl.LLM) -> Product:
    messages = [{"role": "user", "content": task}]
    reply = litellm.completion(**told(llm, messages=messages, response_format=Product))
    return Product.model_validate_json(reply.choices[0].message.content)


@keeps(suite.SIDE_BY_SIDE, on={way: way for way in ("gather", "threads", "batch")})
async def test_calls_side_by_side(task: str, llm: agl.LLM, way: str) -> list[str]:
    question = {"role": "user", "content": task}
    lists = [[{"role": "system", "content": f"You are {name}."}, question] for name in ("Ada", "Emmy")]
    calls = [told(llm, messages=messages) for messages in lists]
    if way == "gather":
        replies = await asyncio.gather(*(litellm.acompletion(**one) for one in calls))
    elif way == "threads":
        with ThreadPoolExecutor() as pool:
            replies = list(pool.map(lambda one: litellm.completion(**one), calls))
    else:
        replies = await asyncio.to_thread(litellm.batch_completion, **told(llm, messages=lists))
    return [reply.choices[0].message.content for reply in replies]


@keeps(suite.ONE_CALL, on={"responses": "openai", "messages": "anthropic"})
async def test_a_call_over(task: str, llm: agl.LLM, provider: str) -> str:
    if provider == "openai":
        return (await litellm.aresponses(**told(llm, input=task))).output[-1].content[0].text
    arguments = told(llm, provider, messages=[{"role": "user", "content": task}])
    return (await litellm.acompletion(**arguments)).choices[0].message.content


@keeps(suite.ONE_CALL, rows=[1, 1])
def test_a_cache_of_the_library_hides_calls_and_no_cache_is_its_default(task: str, llm: agl.LLM) -> str:
    assert litellm.cache is None
    messages = [{"role": "user", "content": task}]
    return [litellm.completion(**told(llm, messages=messages)).choices[0].message.content for _ in "ab"][-1]
