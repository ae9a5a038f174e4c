"""The promises that agents of every framework keep. A test file says how its agent is built and which ones it keeps.

    @keeps(TOOL_LOOP, SEVERAL_TOOLS, on=DIALECTS)
    async def test_an_agent_with_a_tool(task: str, llm: agl.LLM, model_of: Maker) -> str:
        return (await Agent(model_of(llm), tools=[multiply]).run(task)).output

is a test for each promise in each dialect. `harness.run_agent` adds what holds for every run: each call is recorded
once, with its exact tokens, and without the gateway the agent asks and returns the same.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, call, last, numbers, offered, said, thinking, thoughts
from tests.frameworks.harness import TASKS, TaskResult, run_agent

Model = Callable[[Json], str | Json]
Maker = Callable[[agl.LLM], Any]
"""Makes the model object of a framework."""
STYLES = ("tersely", "in verse", "in French", "at length")
WORKERS = [f"worker{number}" for number in range(3)]
SAID = ["It is 42, no doubt.", "It is 72, no doubt."]
SAID_TWICE = ["It is 42 and 42.", "It is 72 and 72."]
PARAMETERS: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
"""The schema of `multiply`."""


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


def multiply(a: int, b: int) -> int:
    """Return a times b.

    Args:
        a: one number
        b: another
    """
    return a * b


def needs(module: str, package: str | None = None) -> Any:
    """Return a module of a framework; skip the test file where it is not installed."""
    return pytest.importorskip(module, reason=f"{package or module} is not installed: make test-frameworks")


def address(llm: agl.LLM) -> dict[str, Any]:
    """Return the gateway and the key of the attempt, as most clients take them."""
    return {"base_url": llm.get_base_url(), "api_key": llm.api_key or "unused"}


# --- models ----------------------------------------------------------------------------------------------------------


def product(request: Json) -> Json:
    """Return the answer that can be parsed."""
    factors = numbers(request)
    return {**factors, "value": factors["a"] * factors["b"]}


def in_form(request: Json) -> str | Json:
    """A model that uses its tool, if it has one, and answers in the form that is asked for: a tool, a schema or words.

    A schema must be that of `Product`.
    """
    forms, schema = offered(request) - {"multiply"}, request.get("response_format") or {}
    if "multiply" in offered(request) and (last(request)["role"] != "tool" or not (forms or schema)):
        return calculator(request)
    if schema.get("type") == "json_schema":
        assert schema["json_schema"]["schema"]["required"] == ["a", "b", "value"]
    return call(forms.pop(), 1, **product(request)) if forms else json.dumps(product(request))


def echo(request: Json) -> str:
    return f"You asked: {said(last(request))}"


def agreeing(request: Json) -> str:
    """A model that agrees in the name that its system message ends with."""
    return f"{said(request['messages'][0]).split()[-1]} agrees."


def explaining(request: Json) -> str | Json:
    return "It is so." if "And why?" in said(last(request)) else calculator(request)


def asking(tool: str, argument: str, **more: str) -> Model:
    """A model of two agents: one asks the other with a tool and says what it heard; the other multiplies."""

    def model(request: Json) -> str | Json:
        if "multiply" in offered(request):
            return calculator(request)
        if last(request)["role"] == "tool":
            return f"The expert says: {said(last(request))}"
        return call(tool, **{argument: said(last(request))}, **more)

    return model


# --- promises --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """The expected results of an agent's runs on the two tasks.

    Attributes:
        model: what the model server says.
        outputs: what the agent returns for each task; of a stream what its words are together. None: not promised.
        rows: the number of calls in each token row. None: not promised.
        streams: whether the agent returns the words as they come, alone or as `words` beside `text`, the whole, and
            `used`, the tokens that it was told of; "last" if those are of the last call only.
        names: the agent of each call, whose system message is "You are <name>."; "*" is an agent without a name.
        environment: variables that are set meanwhile.
        options: for `run_agent`.
        also: what else to check.
    """

    name: str
    model: Model = calculator
    outputs: Sequence[Any] | None = None
    rows: Sequence[int] | None = None
    streams: bool | str = False
    names: Sequence[str] | None = None
    direct: bool = True
    in_order: bool = True
    tasks: Sequence[str] = TASKS
    environment: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None
    also: Callable[[TaskResult], object] | None = None

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def under(self, environments: Mapping[str, Mapping[str, str]]) -> list[Self]:
        """Return the same promise under each environment."""
        return [self.but(name=f"{self.name} {name}", environment=own) for name, own in environments.items()]

    def check(self, agent: Any) -> list[TaskResult]:
        """Run the agent and return what happened, after checking it."""
        options = {"direct": self.direct, "in_order": self.in_order, "tasks": self.tasks, **(self.options or {})}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (self.environment or {}).items():
                patch.setenv(name, value)
            results = run_agent(agent, self.model, **options)
        for number, result in enumerate(results):
            if self.outputs is not None:
                self._check_output(result, self.outputs[number])
            if self.rows is not None:
                assert sorted(len(row.call_ids) for row in result.record.samples) == sorted(self.rows)
            if self.names is not None:
                self._check_names(result, self.names)
            if self.also is not None:
                self.also(result)
        return results

    def _check_output(self, result: TaskResult, expected: Any) -> None:
        if not self.streams:
            assert result.output == expected
            return
        stream = result.output if isinstance(result.output, dict) else {"words": result.output}
        assert "".join(stream["words"]) == stream.get("text", expected) == expected
        assert len([word for word in stream["words"] if word]) == len(expected.split())
        assert result.exchanges[-1].request["stream"] is True
        used = [exchange.reply["usage"]["total_tokens"] for exchange in result.exchanges if exchange.reply]
        assert stream.get("used") in (None, used[-1] if self.streams == "last" else sum(used))

    def _check_names(self, result: TaskResult, names: Sequence[str]) -> None:
        agents = result.agents()
        assert len(result.record.calls) == len(names)
        assert [name for name, _ in (agents if self.in_order else sorted(agents))] == list(names)
        assert [f"You are {name}." in words for name, words in agents if name != "*"].count(False) == 0
        for name in {*names} - {"*"}:
            assert [own for own, _ in result.agents(f"^{name}$")] == [name] * names.count(name)


def _kept(result: TaskResult) -> None:
    (thought,) = thoughts(result.exchanges[1].request)
    assert thought is not None
    assert thought.startswith("Thought")


def _dropped(result: TaskResult) -> None:
    assert thoughts(result.exchanges[1].request) == [None]


ONE_CALL = Promise("one call", lambda _: "It is what it is.", ["It is what it is."] * 2, [1])
TOOL_LOOP = Promise("tool loop", calculator, SAID, [2])
SEVERAL_TOOLS = Promise("several tools at once", both_ways, SAID_TWICE, [2])
WORDS = Promise("words", calculator, SAID, [2], streams=True)
PARSED = Promise("parsed", in_form, PRODUCTS, [1])
SIDE_BY_SIDE = Promise("side by side", agreeing, [["Ada. agrees.", "Emmy. agrees."]] * 2, [1, 1], in_order=False)
IN_STYLES = Promise(
    "in styles", echo, [[f"You asked: {t} Answer {s}." for s in STYLES] for t in TASKS], [1] * 4, in_order=False
)
CONVERSATION = Promise("conversation", explaining, [[answer, "It is so."] for answer in SAID], [3])
THOUGHTS_KEPT = Promise("thoughts kept", thinking, SAID, [2], direct=False, also=_kept)
THOUGHTS_DROPPED = Promise("thoughts dropped", thinking, SAID, [1, 1], direct=False, also=_dropped)
"""The guides state this; if a change of the library ends it, change the guide."""
ASKED = Promise("an agent asks another", outputs=[f"The expert says: {answer}" for answer in SAID], rows=[2, 2])
"""Its model is one of `asking`."""
NAMED_LOOP = TOOL_LOOP.but(name="named loop", names=["solver"] * 2)
NAMED_WORKERS = Promise("named workers", names=sorted(WORKERS * 2), in_order=False)


def rollout_of(run: Callable[..., Any], *arguments: Any) -> Any:
    """Return the agent whose work is a function of task, LLM and the arguments."""
    if inspect.iscoroutinefunction(run):

        @agl.rollout
        async def agent(task: str, llm: agl.LLM) -> Any:
            return await run(task, llm, *arguments)
    else:

        @agl.rollout
        def agent(task: str, llm: agl.LLM) -> Any:
            return run(task, llm, *arguments)

    return agent


def keeps(
    *promises: Promise, on: Mapping[str, Any] | None = None, **changes: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of the work of an agent: it keeps each promise, with `changes`, in each way of `on`.

    The work takes what `on` holds for the way. Over responses and messages no agent is run without the gateway: the
    model server speaks chat completions only.
    """
    cases: list[Any] = []
    for promise in promises:
        for way, arguments in {"": ()}.items() if on is None else ((way, (value,)) for way, value in on.items()):
            own = promise.but(**changes)
            own = own.but(direct=own.direct and not way.startswith(("responses", "messages")))
            cases.append(pytest.param(own, arguments, id="-".join(filter(None, (promise.name, way)))))

    def test_of(run: Callable[..., Any]) -> Any:
        @pytest.mark.parametrize(("promise", "arguments"), cases)
        def test(promise: Promise, arguments: tuple[Any, ...]) -> None:
            promise.check(rollout_of(run, *arguments))

        test.__doc__, test.__module__ = run.__doc__, run.__module__
        return test

    return test_of
