"""instructor: modes, what is asked again, partial objects, calls side by side; over chat, responses, messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

import agentlightning as agl
from tests.frameworks.engine import Json, call, calls, numbers, offered, said
from tests.frameworks.harness import run_agent

instructor = pytest.importorskip("instructor", reason="instructor is not installed: make test-frameworks")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: make test-frameworks")
openai = pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")

Mode = instructor.Mode


class Product(BaseModel):
    """The answer."""

    a: int
    b: int
    value: int


PRODUCTS: list[Json] = [{"a": 6, "b": 7, "value": 42}, {"a": 8, "b": 9, "value": 72}]


def found(request: Json) -> Json:
    given = numbers(request)
    return {**given, "value": given["a"] * given["b"]}


def in_form(request: Json) -> str | Json:
    """A model that answers with the tool that it must use, or else in JSON."""
    names = offered(request)
    if names:
        return call(names.pop(), **found(request))
    text = json.dumps(found(request))
    return f"```json\n{text}\n```" if "```" in str(request["messages"]) else text


def over_chat(llm: agl.LLM, mode: Any = Mode.TOOLS) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key), mode=mode)


def over_chat_async(llm: agl.LLM) -> Any:
    return instructor.from_openai(openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key))


def over_messages(llm: agl.LLM) -> Any:
    client = anthropic.Anthropic(base_url=llm.get_base_url(), api_key=llm.api_key)
    return instructor.from_anthropic(client)


def asked(task: str, llm: agl.LLM, **more: Any) -> Json:
    return {"model": llm.model, "messages": [{"role": "user", "content": task}], "response_model": Product, **more}


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON], ids=lambda mode: mode.value)
def test_an_object_in_every_mode(mode: Any) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Json:
        return over_chat(llm, mode).chat.completions.create(**asked(task, llm)).model_dump()

    results = run_agent(agent, in_form)
    assert [one.output for one in results] == PRODUCTS
    assert [len(one.exchanges) for one in results] == [1, 1]


@pytest.mark.parametrize(
    ("make", "more"),
    [(lambda llm: over_chat(llm, Mode.RESPONSES_TOOLS), {}), (over_messages, {"max_tokens": 200})],
    ids=["responses", "messages"],
)
def test_an_object_over_the_other_dialects(make: Callable[[agl.LLM], Any], more: Json) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Json:
        return make(llm).create(**asked(task, llm, **more)).model_dump()

    assert [one.output for one in run_agent(agent, in_form, direct=False)] == PRODUCTS


def test_by_the_name_of_a_provider() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Json:
        client = instructor.from_provider(f"openai/{llm.model}", base_url=llm.get_base_url(), api_key=llm.api_key)
        return client.create(messages=[{"role": "user", "content": task}], response_model=Product).model_dump()

    assert [one.output for one in run_agent(agent, in_form)] == PRODUCTS


def test_what_does_not_pass_is_asked_again_in_one_conversation() -> None:
    class Checked(Product):
        @field_validator("value")
        @classmethod
        def positive(cls, value: int) -> int:
            if value < 0:
                raise ValueError("a product of these is positive")
            return value

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Json:
        made = over_chat(llm).chat.completions.create(**asked(task, llm, response_model=Checked, max_retries=2))
        return {"value": made.value, "reward": 1.0}

    def model(request: Json) -> str | Json:
        first = len(request["messages"]) == 1
        wanted = found(request)
        number = len(request["messages"])
        return call(offered(request).pop(), number, **{**wanted, "value": -1 if first else wanted["value"]})

    results = run_agent(agent, model, direct=False)
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]
    for one in results:
        assert "a product of these is positive" in said(one.exchanges[1].request["messages"][-1])


def test_partial_objects_of_a_stream() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> list[Any]:
        given = asked(task, llm)
        return [part.model_dump() for part in over_chat(llm).chat.completions.create_partial(**given)]

    for one, wanted in zip(run_agent(agent, in_form), PRODUCTS, strict=True):
        assert one.output[-1] == wanted
        assert one.exchanges[0].request["stream"] is True


def test_a_list_of_objects_and_several_tools_at_once() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[Json]:
        client = over_chat(llm, Mode.PARALLEL_TOOLS)
        given = asked(task, llm, response_model=Iterable[Product])
        return [one.model_dump() for one in await asyncio.to_thread(client.chat.completions.create, **given)]

    def model(request: Json) -> Json:
        one = found(request)
        return calls(("Product", one), ("Product", {**one, "a": one["b"], "b": one["a"]}))

    for one, wanted in zip(run_agent(agent, model), PRODUCTS, strict=True):
        assert one.output == [wanted, {**wanted, "a": wanted["b"], "b": wanted["a"]}]


@pytest.mark.parametrize("way", ["gather", "threads"])
def test_calls_side_by_side_are_each_a_row(way: str) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[Json]:
        wanted = [asked(task, llm, temperature=heat / 10) for heat in range(3)]
        if way == "gather":
            client = over_chat_async(llm)
            made = await asyncio.gather(*(client.chat.completions.create(**one) for one in wanted))
        else:
            client = over_chat(llm)
            with ThreadPoolExecutor() as pool:
                made = list(pool.map(lambda one: client.chat.completions.create(**one), wanted))
        return [one.model_dump() for one in made]

    for result, wanted in zip(run_agent(agent, in_form, in_order=False), PRODUCTS, strict=True):
        assert result.output == [wanted] * 3
        assert len(result.record.samples) == 3
