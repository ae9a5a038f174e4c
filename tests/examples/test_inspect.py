"""examples/inspect: the real package evaluates a served model, and its scorer is the reward of a rollout."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import EXAMPLES, ROOT, run
from tests.frameworks.engine import Engine, Json, last, said
from tests.stubs.ports import free_port
from tests.stubs.processes import Process, Terminal, clean_environment, run_program, terminal

__all__ = ["terminal"]
package = pytest.importorskip("inspect_ai", reason="inspect-ai is not installed: make test-example NAMES=inspect")

PROGRAM = "python examples/inspect/evaluate.py"
PAGE = (ROOT / "docs/how-to/inspect.md").read_text()


def adds_small_numbers(request: Json) -> str:
    a, b = map(int, re.findall(r"\d+", said(last(request))))
    return f"{a} plus {b} is {a + b}." if a < 50 else f"I do not know, {a} is too large."


def test_a_served_model_is_evaluated_as_the_page_shows(tmp_path: Path) -> None:
    [shown] = re.findall(r"```text\n(last_number.*?)```", PAGE, re.DOTALL)
    with Engine(adds_small_numbers) as engine:
        assert run(f"{PROGRAM} --endpoint {engine.base_url} --log-dir {tmp_path}") == shown
        sampling = {(call.request["model"], call.request["temperature"]) for call in engine.calls}
        assert (len(engine.calls), sampling) == (20, {("policy", 0.0)})
    assert len(list(tmp_path.glob("*_sums_*.eval"))) == 1


def test_the_command_of_inspect_evaluates_it_too(tmp_path: Path) -> None:
    [command] = re.findall(r"^inspect (eval .*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
    with Engine(adds_small_numbers) as engine:
        words = command.replace("\\\n", " ").replace("http://127.0.0.1:8000/v1", engine.base_url).split()
        environment = {**clean_environment(), "SERVED_API_KEY": "unused", "INSPECT_LOG_DIR": str(tmp_path)}
        inspect = Path(sys.executable).with_name("inspect")
        printed = run_program(inspect, *words, "--display", "plain", folder=ROOT, environment=environment).stdout
    assert re.search(r"accuracy:?\s+0\.35", printed), printed


@pytest.mark.timeout(240)
def test_a_server_that_is_down_gives_no_score(tmp_path: Path) -> None:
    command = [
        "--endpoint",
        f"http://127.0.0.1:{free_port()}/v1",
        "--size",
        "1",
        "--log-dir",
        tmp_path,
        "--max-retries",
        "1",
    ]
    done = run_program("python", ROOT / "examples/inspect/evaluate.py", *command, code=1, timeout=200)
    assert "The evaluation ended as error" in done.stderr
    assert done.stdout == ""


def test_a_checkpoint_that_agl_serves_is_evaluated(tmp_path: Path, terminal: Terminal) -> None:
    model = save_untrained_model(tmp_path / "model")
    port = free_port()
    server: Process = terminal(["agl", "serve", str(model), "--port", str(port)])
    server.until(rf"http://127\.0\.0\.1:{port}/v1")
    printed = run(f"{PROGRAM} --endpoint http://127.0.0.1:{port}/v1 --size 2 --log-dir {tmp_path / 'logs'}")
    assert printed.splitlines()[0] == "last_number accuracy: 0.000 (2 samples)"


def test_the_scorer_is_the_reward_of_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "inspect"))
    import agent  # type: ignore[import-not-found]

    tasks: list[Any] = agent.tasks(size=8, seed=2)
    with Engine(adds_small_numbers) as engine:
        llm = agl.LLM(endpoint=engine.base_url, model="policy")
        trainer = agl.Trainer(strategy="shm", initial_resources={"llm": llm})
        result = trainer.evaluate(agent.answers, tasks)
    small = [int(re.findall(r"\d+", task["question"])[0]) < 50 for task in tasks]
    assert result.rewards == [float(one) for one in small]
    assert len(set(small)) == 2
    held_out = {sample.input for sample in agent.samples(size=20, seed=1)}
    assert len(agent.tasks(size=100, seed=2)) == 99
    assert not held_out & {task["question"] for task in agent.tasks(size=100, seed=2)}, "the tasks of the page"
