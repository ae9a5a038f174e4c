"""examples/openenv: a server of the real package, and an agent that talks to it over the network."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import EXAMPLES, ROOT, run
from tests.frameworks.engine import Engine, Json, calls, last
from tests.stubs.ports import free_port
from tests.stubs.processes import Process

if importlib.util.find_spec("openenv") is None:
    pytest.skip("openenv is not installed: make test-example NAMES=openenv", allow_module_level=True)

README = (EXAMPLES / "openenv/README.md").read_text()


def start(folder: Path, app: str = "server:app") -> tuple[Process, str]:
    port = free_port()
    command = ["python", "-m", "uvicorn", "--app-dir", EXAMPLES / "openenv", app, "--port", str(port)]
    process = Process(command, folder, {"PYTHONPATH": str(folder)})
    process.until("Application startup complete")
    return process, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process, address = start(tmp_path_factory.mktemp("server"))
    yield address
    process.kill()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "openenv"))
    import agent  # type: ignore[import-not-found]

    return agent


def evaluate(agent: Any, server: str, model: Callable[[Json], str | Json]) -> tuple[agl.EvaluationResult, list[Json]]:
    """Run one episode and return its result and what the model was asked."""
    with Engine(model) as engine:
        llm = agl.LLM(endpoint=engine.base_url, model="policy")
        trainer = agl.Trainer(strategy="shm", initial_resources={"llm": llm})
        result = trainer.evaluate(agent.plays, [{"server": server, "reset": {"seed": 3}}])
        assert engine.trouble == []
        return result, [exchange.request for exchange in engine.calls]


def guesses(number: object) -> Json:
    return calls(("step", {"number": number}))


def bisects(request: Json) -> Json:
    """A model that halves the range with each guess."""
    low, high, guess = 1, 100, 50
    for message in request["messages"]:
        if message["role"] == "tool":
            low, high = (guess + 1, high) if "larger" in message["content"] else (low, guess - 1)
            guess = (low + high) // 2
    return guesses(guess)


def test_a_model_that_finds_the_number_has_the_reward_of_the_environment(agent: Any, server: str) -> None:
    result, requests = evaluate(agent, server, bisects)
    assert (result.rewards, result.outcomes) == ([1.0], {"scored": 1})
    [tool] = requests[0]["tools"]
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]
    assert json.loads(last(requests[0])["content"])["hint"].startswith("Guess a number between 1 and 100")
    assert json.loads(last(requests[1])["content"]) == {"hint": "The number is smaller."}
    assert not [name for name in sys.modules if name.split(".")[0] == "openenv"], "the agent imports the library"


@pytest.mark.parametrize(("answer", "turns"), [(guesses(99), 7), ("I do not know.", 1)])
def test_a_model_that_does_not_find_it_loses(agent: Any, server: str, answer: str | Json, turns: int) -> None:
    result, requests = evaluate(agent, server, lambda _: answer)
    assert (result.rewards, result.outcomes, len(requests)) == ([0.0], {"scored": 1}, turns)


STRICT = """
from openenv.core.env_server import create_app
from pydantic import field_validator
from pydantic_core import PydanticCustomError
from server import Guess, Guessing, Hint

class Even(Guess):
    @field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number == 1:
            raise ValueError("must be even")
        if number == 3:
            raise PydanticCustomError("odd", "must be even")
        return number

class Broken(Guessing):
    def step(self, action, timeout_s=None, **kwargs):
        return Hint(hint=None) if action.number == 100 else super().step(action)

app = create_app(Broken, Even, Hint, env_name="strict", max_concurrent_envs=8)
"""


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("strict")
    (folder / "strict.py").write_text(STRICT)
    process, address = start(folder, "strict:app")
    yield address
    process.kill()


@pytest.mark.parametrize(("number", "turns"), [(1, 1), ("\ud800", 1), (3, 20)])
def test_an_action_that_a_validator_rejects_is_an_error_of_the_model(
    agent: Any, strict_server: str, number: object, turns: int
) -> None:
    result, requests = evaluate(agent, strict_server, lambda _: guesses(number))
    assert (result.rewards, result.outcomes, len(requests)) == ([0.0], {"scored": 1}, turns)
    assert turns == 1 or "must be even" in last(requests[1])["content"]


def test_an_invalid_observation_of_the_environment_is_no_low_reward(agent: Any, strict_server: str) -> None:
    result, requests = evaluate(agent, strict_server, lambda _: guesses(100))
    assert (result.rewards, result.outcomes, len(requests)) == ([None], {"infrastructure_fault": 1}, 1)


@pytest.mark.parametrize("text", ["not JSON", "7" * 5000, "[" * 100_000], ids=["words", "digits", "brackets"])
def test_an_action_that_is_no_json_is_sent_as_text_which_the_server_rejects(agent: Any, server: str, text: str) -> None:
    call = SimpleNamespace(function=SimpleNamespace(arguments=text))
    assert agent.arguments_of(call) == text
    result, requests = evaluate(agent, server, lambda _: calls(("step", text)))
    assert (result.rewards, result.outcomes, len(requests)) == ([0.0], {"scored": 1}, 20)


@pytest.mark.parametrize("number", [0, "many", None])
def test_a_model_reads_why_its_action_is_invalid(agent: Any, server: str, number: object) -> None:
    result, requests = evaluate(agent, server, lambda _: guesses(number))
    assert (result.rewards, result.outcomes, len(requests)) == ([0.0], {"scored": 1}, 20)
    assert "invalid action" in last(requests[1])["content"]


def test_a_server_that_is_down_is_no_low_reward(agent: Any) -> None:
    result, requests = evaluate(agent, f"http://127.0.0.1:{free_port()}", bisects)
    assert (result.rewards, result.outcomes, requests) == ([None], {"infrastructure_fault": 1}, [])


def test_a_server_that_dies_in_an_episode_is_no_low_reward(agent: Any, tmp_path: Path) -> None:
    process, address = start(tmp_path)

    def kills(request: Json) -> Json:
        process.kill()
        return bisects(request)

    result, requests = evaluate(agent, address, kills)
    assert (result.rewards, result.outcomes, len(requests)) == ([None], {"infrastructure_fault": 1}, 1)


def test_the_program_measures_a_model(server: str) -> None:
    [shown] = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    with Engine(bisects) as engine:
        command = f"python examples/openenv/agent.py --endpoint {engine.base_url} --model m --server {server} --tasks 5"
        assert shown.strip() in run(command, ROOT)


def test_a_small_model_trains_on_episodes(agent: Any, server: str, tmp_path: Path) -> None:
    """One step of GRPO. The gateway records each call."""
    model = save_untrained_model(tmp_path / "model")
    sizes = {"max_steps": 1, "batch_size": 1, "num_generations": 2, "max_completion_length": 4, "seed": 0}
    trainer = agl.Trainer(
        algorithm=agl.GRPO(model=str(model), **sizes),
        strategy="shm",
        rollout_config={"max_attempts": 3, "retry_condition": ["failed"]},
    )
    trainer.fit(agent.plays, train_dataset=[{"server": server, "reset": {"seed": 3}}])
    [step] = trainer.result.metrics
    assert (step.rollouts_done, step.rollouts_failed, step.calls_captured) == (2, 0, 2)
