"""Rates of tasks: what counts, what is run again, what a file keeps, and the filter by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.trainer.difficulty import name_of_agent, read_samples
from tests.algorithm.parts import ask, say

MODEL = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters={"temperature": 1.0})
TASKS = [{"name": name} for name in ("never", "always", "half", "broken", "silent")]
RAN: list[str] = []


def sometimes(task: dict[str, Any], main_llm: agl.LLM) -> float | None:
    """Earn a reward by the name of the task; `half` alternates."""
    RAN.append(task["name"])
    match task["name"]:
        case "broken":
            raise KeyError("broken")
        case "silent":
            return None
        case "half":
            return float(RAN.count("half") % 2)
        case "graded":
            return 0.3 * (RAN.count("graded") % 2)
        case name:
            return float(name == "always")


@pytest.fixture
def trainer() -> agl.Trainer[Any]:
    RAN.clear()
    return agl.Trainer(strategy="shm", progress="none")


def measure(trainer: agl.Trainer[Any], tasks: Any = TASKS, agent: Any = sometimes, **more: Any) -> list[agl.TaskRate]:
    return agl.task_rates(agent, tasks, **{"model": MODEL, "trainer": trainer, "n_samples": 4, **more})


def test_a_rate_is_the_share_of_solved_samples_and_a_failure_is_no_unsolved_one(trainer: agl.Trainer[Any]) -> None:
    never, always, half, broken, silent = measure(trainer)
    assert [rate.mean_reward for rate in (never, always, half, broken, silent)] == [0.0, 1.0, 0.5, None, None]
    assert always.solve_rate is not None
    assert (always.solve_rate.mean, round(always.solve_rate.low, 3)) == (1.0, 0.510)
    assert half.solve_rate is not None
    assert (round(half.solve_rate.low, 3), round(half.solve_rate.high, 3)) == (0.15, 0.85)
    assert (broken.solve_rate, broken.failures, broken.failed) == (None, {"KeyError": 4}, 4)
    assert (silent.solve_rate, silent.failures) == (None, {"no_reward": 4})


def test_a_second_call_keeps_the_solve_rates_of_graded_rewards(trainer: agl.Trainer[Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache": tmp_path / "rates.jsonl", "solved_above": 0.2}
    for _ in range(2):
        measure(trainer, [{"name": "graded"}], **settings)
        assert json.loads(settings["cache"].read_text())["solve_rate"] == 0.5


def right(task: dict[str, Any], answer: str) -> float:
    return 1.0


def wrong(task: dict[str, Any], answer: str) -> float:
    return 0.0


def test_agents_with_other_functions_or_values_are_other_agents() -> None:
    def agent(grade: Any, **more: Any) -> str:
        return name_of_agent(agl.tasks_from([{"question": "a"}], grade, **more).agent)

    names = [agent(right), agent(wrong), agent(right, system="b"), agent(right, prompt="{question}")]
    assert len(set(names)) == 4
    assert names[0] == agent(right)


@pytest.mark.parametrize("text", ['{"question": "precious"}', "no JSON"])
def test_a_file_of_something_else_is_kept(trainer: agl.Trainer[Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(agl.BadRequestError, match="line 1 is not a line of task rates"):
        measure(trainer, cache=tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text() == text
    with pytest.raises(agl.NotFoundError, match=r"none.jsonl' does not exist"):
        agl.tasks_between(TASKS, tmp_path / "none.jsonl", 0.1, 0.9)


def test_a_second_call_runs_only_what_is_missing(trainer: agl.Trainer[Any], tmp_path: Path) -> None:
    cache = tmp_path / "rates.jsonl"
    first = measure(trainer, TASKS[:3], n_samples=2, cache=cache)
    assert len(RAN) == 6
    assert measure(trainer, TASKS[:3], n_samples=2, cache=cache) == first
    assert len(RAN) == 6
    more = measure(trainer, [*TASKS, TASKS[0]], cache=cache)
    assert sorted(RAN[6:]) == sorted(["never", "always", "half"] * 2 + ["broken", "silent"] * 4)
    assert more[0] == more[5]  # equal tasks are one
    lines = [json.loads(line) for line in cache.read_text().splitlines()]
    assert [(line["n"], line["failed"]) for line in lines] == [(4, 0)] * 3 + [(0, 4)] * 2
    assert lines[2]["solve_rate"] == 0.5
    assert lines[2]["low"] < 0.5 < lines[2]["high"]
    measure(trainer, TASKS[3:], cache=cache)
    assert len(RAN) == 6 + 14 + 8, "samples without a reward are run again"


@pytest.mark.parametrize("change", ["model", "sampling", "resources", "agent"])
def test_what_another_policy_or_agent_earned_does_not_count(
    trainer: agl.Trainer[Any], tmp_path: Path, change: str
) -> None:
    cache, more = tmp_path / "rates.jsonl", dict[str, Any]()
    measure(trainer, TASKS[:1], cache=cache)
    match change:
        case "model":
            more["model"] = MODEL.model_copy(update={"model": "n"})
        case "sampling":
            more["model"] = MODEL.model_copy(update={"sampling_parameters": {"temperature": 0.5}})
        case "resources":
            prompt = agl.PromptTemplate(template="Hello", engine="f-string")
            trainer = agl.Trainer(strategy="shm", progress="none", initial_resources={"prompt": prompt})
        case _:
            more["agent"] = lambda task, llm: sometimes(task, llm)
    measure(trainer, TASKS[:1], cache=cache, **more)
    assert len(RAN) == 8
    assert len(cache.read_text().splitlines()) == 2
    with pytest.raises(agl.BadRequestError, match="samples of 2 pairs of agent and model; expected one"):
        agl.tasks_between(TASKS[:1], cache, 0, 1)


def test_an_interrupted_file_is_read_without_its_last_line(trainer: agl.Trainer[Any], tmp_path: Path) -> None:
    cache = tmp_path / "rates.jsonl"
    measure(trainer, TASKS[:2], n_samples=1, cache=cache)
    key = {name: json.loads(cache.read_text().splitlines()[1])[name] for name in ("task", "agent", "model")}
    with cache.open("a") as file:
        file.write(json.dumps({**key, "rewards": [0.0]}) + "\n" + json.dumps({**key, "rewards": [0.0]})[:-9])
    assert [rate.rewards for rate in measure(trainer, TASKS[:2], n_samples=2, cache=cache)] == [(0.0, 0.0), (1.0, 0.0)]
    assert RAN == ["never", "always", "never"]
    cache.write_text("{}\n" + cache.read_text())
    with pytest.raises(agl.BadRequestError, match=r"rates.jsonl', line 1 is not a line of task rates: KeyError"):
        measure(trainer, cache=cache)


def test_graded_rewards_need_a_limit_for_a_rate(trainer: agl.Trainer[Any]) -> None:
    tasks = [{"name": "graded"}]
    [rate] = measure(trainer, tasks)
    assert (rate.mean_reward, rate.solve_rate) == (0.15, None)
    with pytest.raises(agl.BadRequestError, match="set solved_above"):
        agl.tasks_between(tasks, [rate], 0, 1)
    [rate] = measure(trainer, tasks, solved_above=0.2)
    assert agl.tasks_between(tasks, [rate], 0.5, 0.5) == tasks


@pytest.mark.parametrize(
    ("low", "high", "names"),
    [(0, 1, ["never", "always", "half"]), (0.1, 0.9, ["half"]), (0.5, 1, ["always", "half"]), (0, 0, ["never"])],
)
def test_tasks_are_selected_by_their_rate_in_their_order(
    trainer: agl.Trainer[Any], tmp_path: Path, low: float, high: float, names: list[str]
) -> None:
    cache = tmp_path / "rates.jsonl"
    rates = measure(trainer, cache=cache)
    for source in (rates, cache):
        assert [task["name"] for task in agl.tasks_between(TASKS, source, low, high)] == names
        with pytest.raises(agl.BadRequestError, match="1 of 6 tasks were not measured"):
            agl.tasks_between([*TASKS, "new"], source, low, high)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1), (0.6, 0.4), (0, 1.1)])
def test_limits_that_cannot_be_are_refused(low: float, high: float) -> None:
    with pytest.raises(agl.BadRequestError, match="must be between 0 and 1, the lower one first"):
        agl.tasks_between([], [], low, high)


def test_wrong_input_is_refused_before_anything_runs(trainer: agl.Trainer[Any], tmp_path: Path) -> None:
    for more, text in (
        ({"tasks": []}, "the dataset is empty"),
        ({"n_samples": 0}, "n_samples"),
        ({"model": tmp_path}, "is not a checkpoint"),
        ({"cache": tmp_path}, "Cannot read"),
        ({"cache": tmp_path / "no" / "file"}, "Cannot write"),
    ):
        with pytest.raises(ValueError, match=text):
            measure(trainer, **more)
    assert RAN == []


def test_the_name_of_an_agent_changes_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "agent_of_difficulty.py"
    file.write_text("def run(task): return 1.0\n")
    from agentlightning.cli.plan import load_target
    from agentlightning.litagent.decorator import as_agent

    agent = as_agent(load_target("agent", "agent_of_difficulty:run"))
    before = name_of_agent(agent)
    assert before.startswith("agent_of_difficulty:run ")
    file.write_text("def run(task): return 0.0\n")
    assert name_of_agent(agent) != before


def test_the_samples_reach_the_file_from_any_process(tmp_path: Path) -> None:
    strategy = {"type": "cs", "server_port": 0, "main_process": "runner"}
    trainer = agl.Trainer(strategy=strategy, progress="none")
    first = measure(trainer, TASKS[:2], cache=tmp_path / "rates.jsonl")
    assert [rate.rewards for rate in first] == [(0.0,) * 4, (1.0,) * 4]
    assert measure(trainer, TASKS[:2], cache=tmp_path / "rates.jsonl") == first


class Asks(agl.LitAgent[str]):
    """Earns whether the reply of the model has an even number of characters."""

    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return float(len(str(ask(resources["main_llm"], [say(task)])["content"])) % 2 == 0)


def test_a_model_in_a_folder_is_served(untrained_model: Path, tmp_path: Path) -> None:
    trainer = agl.Trainer(strategy={"type": "cs", "server_port": 0}, runner={"concurrency": 4}, progress="none")
    cache, more = tmp_path / "rates.jsonl", {"model": untrained_model, "max_completion_length": 4}
    first, second = measure(trainer, ["one", "two"], Asks(), cache=cache, **more)
    assert (len(first.rewards), len(second.rewards)) == (4, 4)
    assert not first.failures
    assert len({key[2] for key in read_samples(cache)}) == 1
    assert measure(trainer, ["one", "two"], Asks(), cache=cache, **more) == [first, second]
