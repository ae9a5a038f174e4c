"""DSPy: signatures, ReAct with a tool, typed outputs, streams, programs side by side; over chat and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.engine import Json, numbers, said
from tests.frameworks.harness import TASKS, TaskResult
from tests.frameworks.suite import ONE_CALL, PARSED, Product, Promise, keeps, needs, product

dspy = needs("dspy")

VALUES = ["42", "72"]


def fields(**values: str) -> str:
    """Return an answer in the form of DSPy's chat adapter."""
    parts = [f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()]
    return "\n\n".join([*parts, "[[ ## completed ## ]]"])


def asked_for(request: Json) -> tuple[str, str]:
    """Return the last message in two parts: the inputs, and the fields of the answer."""
    inputs, _, fields = said(request["messages"][-1]).rpartition("Respond with")
    return inputs, fields


def predicting(request: Json) -> str:
    return fields(reasoning="They are multiplied.", answer=str(product(request)["value"]))


def with_lm(program: Any, llm: agl.LLM, **settings: Any) -> Any:
    program.set_lm(agl.integrations.dspy_lm(llm, **settings))
    return program


@keeps(ONE_CALL, on={"chat": "chat", "responses": "responses"}, model=predicting, outputs=VALUES)
def test_a_chain_of_thought(task: str, llm: agl.LLM, kind: str) -> str:
    return with_lm(dspy.ChainOfThought("question -> answer"), llm, model_type=kind)(question=task).answer


class Multiply(dspy.Signature):
    question: str = dspy.InputField()
    product: Product = dspy.OutputField()


def in_fields_or_json(request: Json) -> str:
    if "JSON object" in asked_for(request)[1]:  # in words: of an unknown model DSPy expects no response_format
        return json.dumps({"product": product(request)})
    return fields(product=json.dumps(product(request)))


@keeps(PARSED, on={"fields": dspy.ChatAdapter, "json": dspy.JSONAdapter}, model=in_fields_or_json)
async def test_a_typed_output(task: str, llm: agl.LLM, adapter: Any) -> Product:
    with dspy.context(lm=agl.integrations.dspy_lm(llm), adapter=adapter()):
        return (await dspy.Predict(Multiply).acall(question=task)).product


def reacting(request: Json) -> str:
    """A model that calls the tool, then ends, then concludes; in the form of the adapter."""
    inputs, form = asked_for(request)
    if "next_tool_name" not in form:
        return predicting(request)
    if "observation_0" not in inputs:
        arguments = json.dumps(numbers(request))
        return fields(next_thought="I multiply.", next_tool_name="multiply", next_tool_args=arguments)
    return fields(next_thought="I have it.", next_tool_name="finish", next_tool_args="{}")


@keeps(Promise("react", reacting, [("42", [(6, 7)]), ("72", [(8, 9)])], [1] * 3))
def test_react_with_a_tool(task: str, llm: agl.LLM) -> tuple[str, list[tuple[int, int]]]:
    called: list[tuple[int, int]] = []

    def multiply(a: int, b: int) -> int:
        """Return a times b."""
        called.append((a, b))
        return a * b

    return with_lm(dspy.ReAct("question -> answer", tools=[multiply]), llm)(question=task).answer, called


def wordy(request: Json) -> str:
    return fields(answer=f"{product(request)['value']} it is, and it is no other number")


def is_streamed(result: TaskResult) -> None:
    assert result.exchanges[0].request["stream"] is True


WORDY = [(f"{value} it is, and it is no other number",) * 2 for value in VALUES]


@keeps(Promise("streamed", wordy, WORDY, [1], also=is_streamed))
async def test_a_streamed_program(task: str, llm: agl.LLM) -> tuple[str, str]:
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


def agreeing(request: Json) -> str:
    return fields(answer=f"{'Ada' if 'Ada' in said(request['messages'][-1]) else 'Emmy'} agrees")


SIDE_BY_SIDE = Promise("side by side", agreeing, [["Ada agrees", "Emmy agrees"]] * 2, [1, 1], in_order=False)


async def programs_side_by_side(task: str, llm: agl.LLM, way: str) -> list[str]:
    program = with_lm(dspy.Predict("name, question -> answer"), llm)
    examples = [dspy.Example(name=name, question=task).with_inputs("name", "question") for name in ("Ada", "Emmy")]
    if way == "gather":
        predictions = await asyncio.gather(*(program.acall(**one.inputs()) for one in examples))
    elif way == "parallel":
        parallel = dspy.Parallel(num_threads=2, disable_progress_bar=True)
        predictions = await asyncio.to_thread(parallel, [(program, one) for one in examples])
    else:
        predictions = await asyncio.to_thread(program.batch, examples, num_threads=2, disable_progress_bar=True)
    return [one.answer for one in predictions]


test_programs_gathered = keeps(SIDE_BY_SIDE, on={"gather": "gather"})(programs_side_by_side)
# of one task, since two progress bars of DSPy that begin at once break each other
test_programs_in_threads = keeps(SIDE_BY_SIDE, on={"parallel": "parallel", "batch": "batch"}, tasks=TASKS[:1])(
    programs_side_by_side
)


@keeps(Promise("no cache", predicting, [[value] * 3 for value in VALUES], [1] * 3))
def test_several_answers_of_one_question_are_several_calls(task: str, llm: agl.LLM) -> list[str]:
    program = with_lm(dspy.Predict("question -> answer"), llm)
    return [program(question=task).answer for _ in range(3)]


def test_the_helper_refuses_a_cache_and_what_the_attempt_decides() -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters={"temperature": 0.7})
    with pytest.raises(ValueError, match=r"dspy_lm\(cache=True\)"):
        agl.integrations.dspy_lm(llm, cache=True)
    with pytest.raises(ValueError, match="api_key, model"):
        agl.integrations.dspy_lm(llm, model="other", api_key="other")
    made = agl.integrations.dspy_lm(llm, max_tokens=7)
    assert made.cache is False
    assert {**made.kwargs}.items() >= {"temperature": 0.7, "max_tokens": 7}.items()
