"""DSPy: signatures, ReAct with a tool, typed outputs, streams, programs side by side; over chat and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, numbers, said
from tests.frameworks.harness import TASKS, run_agent

dspy = pytest.importorskip("dspy", reason="dspy is not installed: make test-frameworks")


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def fields(**values: str) -> str:
    """Return an answer in the form of DSPy's chat adapter."""
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


def product(request: Json) -> str:
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


def asked_for(request: Json) -> tuple[str, str]:
    """Return the last message in two parts: what is given, and what is demanded of the answer."""
    given, _, wanted = said(request["messages"][-1]).rpartition("Respond with")
    return given, wanted


def predicting(request: Json) -> str:
    return fields(reasoning="They are multiplied.", answer=str(json.loads(product(request))["value"]))


def with_lm(program: Any, llm: agl.LLM, **settings: Any) -> Any:
    program.set_lm(agl.integrations.dspy_lm(llm, **settings))
    return program


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_a_chain_of_thought_is_captured(kind: str) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        program = with_lm(dspy.ChainOfThought("question -> answer"), llm, model_type=kind)
        return program(question=task).answer

    results = run_agent(agent, predicting, direct=kind == "chat")
    assert [one.output for one in results] == ["42", "72"]
    assert [len(one.exchanges) for one in results] == [1, 1]


@pytest.mark.parametrize("adapter", ["chat", "json"])
def test_a_typed_output_is_parsed(adapter: str) -> None:
    class Multiply(dspy.Signature):
        question: str = dspy.InputField()
        product: Product = dspy.OutputField()

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> Product:
        chosen = dspy.ChatAdapter() if adapter == "chat" else dspy.JSONAdapter()
        with dspy.context(lm=agl.integrations.dspy_lm(llm), adapter=chosen):
            return (await dspy.Predict(Multiply).acall(question=task)).product

    def model(request: Json) -> str:
        if adapter == "chat":
            return fields(product=product(request))
        assert "JSON object" in asked_for(request)[1]  # in words: of an unknown model DSPy expects no response_format
        return json.dumps({"product": json.loads(product(request))})

    assert [one.output for one in run_agent(agent, model)] == PRODUCTS


def reacting(request: Json) -> str:
    """A model that calls the tool, then ends, then concludes; in the form that the adapter asks for."""
    given, wanted = asked_for(request)
    if "next_tool_name" not in wanted:
        return predicting(request)
    if "observation_0" not in given:
        arguments = json.dumps(numbers(request))
        return fields(next_thought="I multiply.", next_tool_name="multiply", next_tool_args=arguments)
    return fields(next_thought="I have it.", next_tool_name="finish", next_tool_args="{}")


def test_react_with_a_tool() -> None:
    called: list[tuple[int, int]] = []

    def multiply(a: int, b: int) -> int:
        """Return a times b."""
        called.append((a, b))
        return a * b

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return with_lm(dspy.ReAct("question -> answer", tools=[multiply]), llm)(question=task).answer

    results = run_agent(agent, reacting)
    assert [one.output for one in results] == ["42", "72"]
    assert sorted(called) == [(6, 7)] * 2 + [(8, 9)] * 2, "through the gateway and without it"
    assert [len(one.exchanges) for one in results] == [3, 3]


def test_a_streamed_program() -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> tuple[str, str]:
        listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
        program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=listeners)
        words: list[str] = []
        with dspy.context(lm=agl.integrations.dspy_lm(llm)):
            async for part in program(question=task):
                if isinstance(part, dspy.Prediction):
                    final = part.answer
                elif isinstance(part, dspy.streaming.StreamResponse):
                    words.append(part.chunk)
        return "".join(words).strip(), final

    def model(request: Json) -> str:
        return fields(answer=f"{json.loads(product(request))['value']} it is, and it is no other number")

    results = run_agent(agent, model)
    assert [one.exchanges[0].request["stream"] for one in results] == [True, True]
    for one in results:
        words, final = one.output
        assert words == final
        assert final.endswith("no other number")


@pytest.mark.parametrize("way", ["gather", "parallel", "batch"])
def test_programs_side_by_side_are_each_a_row(way: str) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        program = with_lm(dspy.Predict("name, question -> answer"), llm)
        examples = [dspy.Example(name=name, question=task).with_inputs("name", "question") for name in ("Ada", "Emmy")]
        if way == "gather":
            found = await asyncio.gather(*(program.acall(**one.inputs()) for one in examples))
        elif way == "parallel":
            parallel = dspy.Parallel(num_threads=2, disable_progress_bar=True)
            found = await asyncio.to_thread(parallel, [(program, one) for one in examples])
        else:
            found = await asyncio.to_thread(program.batch, examples, num_threads=2, disable_progress_bar=True)
        return [one.answer for one in found]

    def model(request: Json) -> str:
        name = "Ada" if "Ada" in said(request["messages"][-1]) else "Emmy"
        return fields(answer=f"{name} agrees")

    tasks = TASKS if way == "gather" else TASKS[:1]  # two progress bars of DSPy that begin at once break each other
    for result in run_agent(agent, model, tasks=tasks, in_order=False):
        assert result.output == ["Ada agrees", "Emmy agrees"]
        assert len(result.record.samples) == 2


def test_several_answers_of_one_question_are_several_calls() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> list[str]:
        program = with_lm(dspy.Predict("question -> answer"), llm)
        return [program(question=task).answer for _ in range(3)]

    for result in run_agent(agent, predicting):
        assert len(result.exchanges) == 3
        assert len(set(result.output)) == 1


def test_the_helper_refuses_a_cache_and_what_the_attempt_decides() -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters={"temperature": 0.7})
    with pytest.raises(ValueError, match=r"dspy_lm\(cache=True\)"):
        agl.integrations.dspy_lm(llm, cache=True)
    with pytest.raises(ValueError, match="api_key, model"):
        agl.integrations.dspy_lm(llm, model="other", api_key="other")
    made = agl.integrations.dspy_lm(llm, max_tokens=7)
    assert made.cache is False
    assert {**made.kwargs}.items() >= {"temperature": 0.7, "max_tokens": 7}.items()
