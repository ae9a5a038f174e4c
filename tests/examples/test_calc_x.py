"""examples/calc_x: the real AutoGen and the real MCP server; the whole of training among the heavy tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import EXAMPLES, check_learnt, check_untaught, play, run
from tests.frameworks.engine import Json, call, last, said

pytest.importorskip("autogen_ext.tools.mcp", reason="AutoGen is not installed: make test-example NAMES=calc_x")
pytest.importorskip("mcp_server_calculator", reason="its server is not installed: make test-example NAMES=calc_x")

PROGRAM = "python examples/calc_x/train.py"
TASK: Any = {"question": "What is 6 times 7?", "answer": 42}


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> Callable[[agl.LLM], float]:
    monkeypatch.syspath_prepend(EXAMPLES / "calc_x")
    from agent import calculator, solves  # type: ignore[import-not-found]

    async def one(llm: agl.LLM) -> float:
        calculator.cache_clear()  # a server belongs to the event loop that it began in
        try:
            return await solves(TASK, llm=llm)
        finally:
            await calculator().stop()

    return lambda llm: asyncio.run(one(llm))


def asks(expression: str) -> Callable[[Json], str | Json]:
    """A model that has the expression evaluated and then repeats the result."""

    def model(request: Json) -> str | Json:
        has_result = last(request)["role"] == "tool"
        return said(last(request)) if has_result else call("calculator", expression=expression)

    return model


def test_the_answer_of_the_server_is_what_the_model_is_told(solves: Any) -> None:
    reward, requests = play(solves, asks("6 * 7"))
    assert reward == 1.0
    assert [message["role"] for message in requests[1]["messages"]] == ["user", "assistant", "tool"]
    assert said(last(requests[1])) == "42"


def test_an_expression_that_the_server_refuses_is_told_to_the_model_and_earns_nothing(solves: Any) -> None:
    reward, requests = play(solves, asks("six times seven"))
    assert reward == 0.0
    assert "invalid syntax" in said(last(requests[1]))


def test_a_right_result_that_the_model_does_not_say_earns_nothing(solves: Any) -> None:
    reward, requests = play(solves, lambda _: call("calculator", expression="6 * 7"))
    assert reward == 0.0
    assert len(requests) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_whole_and_a_model_that_earns_nothing_learns_nothing(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    printed = run(f"{PROGRAM} --model {model} --steps 1 --held-out 8 --out {tmp_path / 'run'}", timeout=250)
    check_untaught(printed)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_training_makes_the_model_use_the_server() -> None:
    check_learnt(PROGRAM, 800, at_most=35, at_least=70)
