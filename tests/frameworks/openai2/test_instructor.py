"""instructor: modes, what is asked again, partial objects, calls side by side; over chat, responses, messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import field_validator

import agentlightning as agl
from tests.frameworks.engine import Json, call, calls, offered, said
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import PARSED, PRODUCTS, Product, Promise, address, in_form, keeps, needs, product

instructor = needs("instructor")
anthropic = needs("anthropic")
openai = needs("openai")

Mode = instructor.Mode
OBJECTS = [one.model_dump() for one in PRODUCTS]
SWAPPED = [{"a": one["b"], "b": one["a"], "value": one["value"]} for one in OBJECTS]
AN_OBJECT = PARSED.but(outputs=OBJECTS)


def in_markdown(request: Json) -> str | Json:
    """A model that replies in the requested form, JSON in a block of Markdown if so."""
    answer = in_form(request)
    return f"```json\n{answer}\n```" if isinstance(answer, str) and "```" in str(request["messages"]) else answer


def over_chat(llm: agl.LLM, mode: Any = Mode.TOOLS) -> Any:
    return instructor.from_openai(openai.OpenAI(**address(llm)), mode=mode)


def over_messages(llm: agl.LLM) -> Any:
    return instructor.from_anthropic(anthropic.Anthropic(**address(llm)))


def asked(task: str, llm: agl.LLM, **more: Any) -> Json:
    return {"model": llm.model, "messages": [{"role": "user", "content": task}], "response_model": Product, **more}


MODES = {mode.value: mode for mode in (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON)}


@keeps(AN_OBJECT, on=MODES, model=in_markdown)
def test_an_object_in_every_mode(task: str, llm: agl.LLM, mode: Any) -> Json:
    return over_chat(llm, mode).chat.completions.create(**asked(task, llm)).model_dump()


@keeps(
    AN_OBJECT,
    on={
        "responses": (lambda llm: over_chat(llm, Mode.RESPONSES_TOOLS), {}),
        "messages": (over_messages, {"max_tokens": 200}),
    },
)
def test_an_object_over_the_other_dialects(task: str, llm: agl.LLM, dialect: Any) -> Json:
    make, more = dialect
    return make(llm).create(**asked(task, llm, **more)).model_dump()


@keeps(AN_OBJECT)
def test_by_the_name_of_a_provider(task: str, llm: agl.LLM) -> Json:
    client = instructor.from_provider(f"openai/{llm.model}", **address(llm))
    return client.create(messages=[{"role": "user", "content": task}], response_model=Product).model_dump()


class Checked(Product):
    @field_validator("value")
    @classmethod
    def positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("a product of these is positive")
        return value


def wrong_at_first(request: Json) -> Json:
    count = len(request["messages"])
    return call(offered(request).pop(), count, **{**product(request), **({"value": -1} if count == 1 else {})})


def asked_again(result: TaskResult) -> None:
    assert "a product of these is positive" in said(result.exchanges[1].request["messages"][-1])


@keeps(Promise("asked again", wrong_at_first, ["42", "72"], [2], also=asked_again), direct=False)
def test_what_does_not_pass_is_asked_again_in_one_conversation(task: str, llm: agl.LLM) -> str:
    made = over_chat(llm).chat.completions.create(**asked(task, llm, response_model=Checked, max_retries=2))
    return str(made.value)


def is_streamed(result: TaskResult) -> None:
    assert result.exchanges[0].request["stream"] is True


@keeps(AN_OBJECT, also=is_streamed)
def test_partial_objects_of_a_stream(task: str, llm: agl.LLM) -> Json:
    parts = list(over_chat(llm).chat.completions.create_partial(**asked(task, llm)))
    return parts[-1].model_dump()


def both_products(request: Json) -> Json:
    one = product(request)
    return calls(("Product", one), ("Product", {**one, "a": one["b"], "b": one["a"]}))


@keeps(AN_OBJECT, model=both_products, outputs=[list(both) for both in zip(OBJECTS, SWAPPED, strict=True)])
async def test_a_list_of_objects_and_several_tools_at_once(task: str, llm: agl.LLM) -> list[Json]:
    client = over_chat(llm, Mode.PARALLEL_TOOLS)
    arguments = asked(task, llm, response_model=Iterable[Product])
    return [one.model_dump() for one in await asyncio.to_thread(client.chat.completions.create, **arguments)]


@keeps(
    Promise("side by side", in_form, [[one] * 3 for one in OBJECTS], [1] * 3, in_order=False),
    on={"gather": "gather", "threads": "threads"},
)
async def test_calls_side_by_side(task: str, llm: agl.LLM, way: str) -> list[Json]:
    calls = [asked(task, llm, temperature=heat / 10) for heat in range(3)]
    if way == "gather":
        client = instructor.from_openai(openai.AsyncOpenAI(**address(llm)))
        made = await asyncio.gather(*(client.chat.completions.create(**one) for one in calls))
    else:
        client = over_chat(llm)
        with ThreadPoolExecutor() as pool:
            made = list(pool.map(lambda one: client.chat.completions.create(**one), calls))
    return [one.model_dump() for one in made]
