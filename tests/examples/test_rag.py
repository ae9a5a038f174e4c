"""examples/rag: the real OpenAI Agents SDK and its MCP server, the index, and the effect of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import EXAMPLES, check_learnt, check_untaught, play, run
from tests.frameworks.engine import Json, call, last
from tests.stubs.processes import run_program

pytest.importorskip("agents", reason="openai-agents is not installed: make test-example NAMES=rag")
pytest.importorskip("countryinfo", reason="countryinfo is not installed: make test-example NAMES=rag")

PROGRAM = "python examples/rag/train.py"


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "rag"))
    import facts  # type: ignore[import-not-found]

    return facts


@pytest.fixture
def index(facts: Any, tmp_path: Path) -> Path:
    file = tmp_path / "facts.db"
    facts.make_index(file)
    return file


@pytest.fixture
def answers(facts: Any, index: Path) -> Callable[[agl.LLM], float]:
    import agent  # type: ignore[import-not-found]

    task: Any = {
        "question": "What is the currency of the country whose capital is Paris?",
        "answer": "EUR",
        "named": "capital",
        "name": "Paris",
        "country": "France",
        "asked": "currency",
        "index": str(index),
    }

    async def one(llm: agl.LLM) -> float:
        agent.manager.cache_clear()  # a server belongs to the event loop that it began in
        try:
            return await agent.answers(task, llm=llm)
        finally:
            await agent.manager(str(index)).cleanup_all()

    return lambda llm: asyncio.run(one(llm))


def searching(*queries: str, answer: str) -> Callable[[Json], str | Json]:
    """A model that makes these searches, one after another, and then answers."""

    def model(request: Json) -> str | Json:
        done = sum(message["role"] == "tool" for message in request["messages"])
        return call("search", number=done, query=queries[done]) if done < len(queries) else answer

    return model


def told(request: Json) -> str:
    """Return what the last message says; the SDK sends a tool's result as a list of parts."""
    return "".join(part["text"] for part in last(request)["content"])


def test_no_country_is_in_two_parts_and_no_sentence_has_both_facts(facts: Any, index: Path) -> None:
    train, held_out = (facts.tasks(part, index) for part in ("train", "held_out"))
    assert len(train) > 1000
    assert len(held_out) > 300
    assert not {task["country"] for task in train} & {task["country"] for task in held_out}
    for task in held_out:
        passages = [facts.search(index, query) for query in facts.searches(task)]
        assert task["country"] in passages[0]
        assert task["answer"] in passages[1]
        assert facts.search(index, f"{task['asked']} {task['name']}") != passages[1], task


@pytest.mark.parametrize(
    "query", ["", "?!", '"', "Paris OR Berlin", "NEAR(capital Paris)", "text:Paris", "x" * 1_000_000]
)
def test_a_query_is_words_and_no_syntax(facts: Any, index: Path, query: str) -> None:
    assert facts.search(index, query) == "nothing found"
    assert facts.search(index, 'capital: "Paris" *') == "The capital of France is Paris."


def test_two_searches_over_mcp_answer_a_question(answers: Any) -> None:
    reward, requests = play(answers, searching("capital Paris", "currency France", answer="EUR"))
    assert reward == 1.0
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["search"]
    assert told(requests[1]) == "The capital of France is Paris."
    assert told(requests[2]) == "The currency of France is EUR."


def test_an_answer_is_right_as_a_whole_or_not_at_all(answers: Any) -> None:
    assert play(answers, searching(answer="EUR or FRF"))[0] == 0.0


def test_a_model_that_searches_on_and_on_earns_nothing(answers: Any) -> None:
    reward, requests = play(answers, searching(*["Paris"] * 9, answer="EUR"))
    assert (reward, len(requests)) == (0.0, 4)


def guessing(_: Json) -> Json:
    """A model that calls a tool that it was not given."""
    return call("guess", query="Paris")


def test_a_tool_that_there_is_not_earns_nothing(answers: Any) -> None:
    assert play(answers, guessing)[0] == 0.0


def test_the_server_says_what_it_wants() -> None:
    done = run_program("python", EXAMPLES / "rag/server.py", "no-such-file.db", code=1)
    assert "no-such-file.db" in done.stderr
    assert "usage" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_whole_and_a_model_that_earns_nothing_learns_nothing(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    printed = run(f"{PROGRAM} --model {model} --steps 1 --held-out 8 --out {tmp_path / 'run'}", timeout=250)
    check_untaught(printed)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_training_makes_the_model_search_twice() -> None:
    check_learnt(PROGRAM, 800, at_most=40, gain=30)
