"""`Trainer.evaluate`: rollouts without learning, what comes back, and how two results compare."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.evaluator import SequentialStop
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.evaluation.statistics import t_quantile
from agentlightning.types import AttemptedRollout
from tests.trainer.parts import tenth

STRATEGIES: dict[str, dict[str, Any]] = {
    "shm": {"strategy": "shm", "n_runners": 2},
    "cs": {"strategy": {"type": "cs", "server_port": 0}, "n_runners": 2},
    "cs, runner here": {"strategy": {"type": "cs", "server_port": 0, "main_process": "runner"}},
}


def graded(task: dict[str, Any], prompt: agl.PromptTemplate) -> float | None:
    """Right where the prompt names the task; two tasks fail in ways of their own."""
    if task["name"] == "broken":
        raise KeyError(task["name"])
    if task["name"] == "silent":
        return None
    return float(task["name"] in prompt.template)


TASKS = [{"name": name} for name in ("a", "b", "c", "d", "broken", "silent")]


@pytest.mark.parametrize("batches", [False, True])
def test_a_sample_is_told_when_it_has_ended(batches: bool) -> None:
    told: list[tuple[str, float | None]] = []
    stop = agl.SequentialStop(threshold=0.5, batch=2, significance=1e-6) if batches else None
    result = agl.Trainer(strategy="shm", initial_resources=template("a b")).evaluate(
        graded,
        TASKS,
        n_samples=2,
        stop_early=stop,
        on_sample=lambda task, sample: told.append((task["name"], sample.reward)),  # type: ignore[index]
    )
    assert sorted(told, key=str) == sorted(
        ((task.input["name"], sample.reward) for task in result.tasks for sample in task.rollouts), key=str
    )
    assert len(told) == 12


def template(text: str) -> dict[str, Any]:
    return {"prompt": agl.PromptTemplate(template=text, engine="f-string")}


@pytest.mark.parametrize("where", STRATEGIES)
def test_two_prompts_are_evaluated_and_compared(where: str) -> None:
    trainer = agl.Trainer(initial_resources=template("a"), algorithm="baseline", **STRATEGIES[where])
    before = trainer.evaluate(graded, TASKS, n_samples=2)
    assert before.rewards == [1.0, 0.0, 0.0, 0.0, None, None]
    assert before.mean_reward == 0.25
    assert before.outcomes == {"scored": 8, "infrastructure_fault": 2, "unscored": 2}
    assert before.failures == {"KeyError": 2, "no_reward": 2}
    assert len(before.rollouts) == 12
    assert [task.input for task in before.tasks] == TASKS
    assert set(before.durations) == {"median", "p90", "longest"}

    after = trainer.evaluate(graded, TASKS, n_samples=2, resources=template("a b c d"))
    assert after.mean_reward == 1.0
    compared = before.compare(after)
    assert (compared.gained, compared.lost, compared.pairs, compared.unpaired) == (3, 0, 4, 2)
    assert (compared.p_value, compared.verdict) == (0.25, "no evidence")
    assert before.run_id != after.run_id
    assert trainer.result is None


def test_a_result_prints_as_a_table() -> None:
    trainer = agl.Trainer(initial_resources=template("a b"), strategy="shm")
    text = str(trainer.evaluate(graded, TASKS))
    assert "evaluation: 6 tasks, 6 rollouts" in text
    assert "0.500" in text
    assert "95 % interval 0.150 to 0.850 (Wilson), 4 of 6 tasks" in text
    assert "KeyError" in text
    assert "stored in memory" in text


def test_the_rollouts_of_an_evaluation_are_validation_of_a_run_of_their_own() -> None:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(store=store, strategy="shm", run_id="named")
    results = [trainer.evaluate(tenth, [1, 2]) for _ in range(2)]
    rollouts = asyncio.run(store.query_rollouts())
    assert {rollout.mode for rollout in rollouts} == {"val"}
    assert {rollout.run_id for rollout in rollouts} == {result.run_id for result in results}
    assert len(rollouts) == 4
    assert all((result.run_id or "").startswith("named-") for result in results)


def test_the_limits_of_the_trainer_hold_in_an_evaluation() -> None:
    def agent(task: int, rollout: AttemptedRollout) -> float:
        if rollout.attempt.sequence_id < 3:
            raise ConnectionError("again")
        return 1.0

    config = agl.RolloutConfig(max_attempts=3, retry_condition=["failed"])
    assert agl.Trainer(strategy="shm", rollout_config=config).evaluate(agent, [1]).rewards == [1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dataset": []}, ValueError, "the dataset is empty"),
        ({"dataset": None}, ValueError, "needs tasks"),
        ({"dataset": 3}, TypeError, "dataset must be a list"),
        ({"dataset": [1], "n_samples": 0}, ValueError, "n_samples must be at least 1"),
        ({"dataset": [1], "resources": [1]}, TypeError, "resources must be a dict from names to resources"),
        ({"dataset": [1]}, ValueError, r"pass resources=\{'prompt': agl\.PromptTemplate\(\.\.\.\)\} to evaluate\(\)"),
        ({"dataset": TASKS, "slices": "nmae"}, ValueError, "no task has this field; fields of the first task: name"),
        ({"dataset": TASKS, "slices": 3}, TypeError, "a field, a function or a list of them"),
        ({"dataset": range(200), "slices": str}, ValueError, "has 200 values; the maximum is 100"),
        ({"dataset": TASKS, "stop_early": True}, TypeError, "must be a SequentialStop; got bool"),
        ({"dataset": TASKS, "stop_early": SequentialStop(EvaluationResult())}, ValueError, "has 0 tasks, and this"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        agl.Trainer(strategy="shm").evaluate(graded, **arguments)


# --- parts of a result, and stopping early ---------------------------------------------------------------------------

LEVELS = [{"n": n, "meta": {"level": "hard" if n % 3 == 0 else "easy"} if n != 5 else {}} for n in range(60)]


def several(task: dict[str, Any], prompt: agl.PromptTemplate, rollout: AttemptedRollout) -> None:
    """Right by chance of the task, the prompt and the sample; some tasks fail."""
    if task["n"] == 7:
        raise ConnectionError("gone")
    rng = random.Random(f"{task['n']} {prompt.template} {rollout.rollout_id}")
    right = float(rng.random() < (0.2 if prompt.template == "a" else 0.9))
    agl.emit_reward({"right": right, "brief": 0.5 + task["n"] / 1000}, primary_key="right")


@pytest.mark.parametrize("where", ["shm", "cs"])
def test_slices_dimensions_and_several_samples(where: str) -> None:
    trainer = agl.Trainer(initial_resources=template("a"), **STRATEGIES[where])
    evaluation = trainer.evaluate(several, LEVELS, n_samples=3, slices="meta.level")
    assert {name: len(part.tasks) for name, part in evaluation.slices.items()} == {
        "meta.level=(missing)": 1,
        "meta.level=easy": 39,
        "meta.level=hard": 20,
    }
    assert evaluation.dimensions == ["right", "brief"]
    brief = evaluation.dimension("brief")
    assert brief.rewards[:2] == [pytest.approx(0.5), pytest.approx(0.501)]
    assert brief.rewards[7] is None
    assert "pass@" not in str(brief), "a share needs rewards of 0 and 1, or a threshold"
    with pytest.raises(ValueError, match=r"pass@3 requires threshold= for rewards other than 0 and 1; got 0\.5"):
        brief.pass_at(3)
    assert brief.pass_at(3, threshold=0.55).threshold == 0.55
    assert brief.interval() is not None
    once, thrice = evaluation.pass_at(1), evaluation.pass_at(3)
    assert (thrice.tasks, thrice.left_out) == (59, 1)
    assert once.interval is not None
    assert thrice.interval is not None
    assert once.interval.mean == pytest.approx(evaluation.mean_reward)
    solved = sum(any(reward > 0.5 for reward in task.rewards) for task in evaluation.tasks)
    assert thrice.interval.mean == pytest.approx(solved / 59)
    assert evaluation.variance is not None
    assert evaluation.variance.within == pytest.approx(0.16, abs=0.13)
    text = str(evaluation)
    for phrase in ("brief", "meta.level=hard", "pass@3", "deviation between tasks", "ConnectionError"):
        assert phrase in text


@pytest.mark.parametrize("where", ["shm", "cs, runner here"])
def test_an_evaluation_stops_once_it_is_sure_which_side_is_better(where: str) -> None:
    trainer = agl.Trainer(**STRATEGIES[where])
    tasks = LEVELS * 3
    before = trainer.evaluate(several, tasks, resources=template("a"))
    after = trainer.evaluate(several, tasks, resources=template("b"), stop_early=SequentialStop(before))
    assert after.stopping is not None
    assert (after.stopping.verdict, after.stopping.against) == ("better", "baseline")
    assert after.stopping.tasks_run == len(after.tasks) == 180 - after.stopping.tasks_saved
    assert after.stopping.tasks_saved > 90
    numbers = [tasks.index(task.input) for task in after.tasks]
    assert max(numbers) > 30  # of the whole dataset: the order is random
    compared = before.compare(after)
    assert (compared.verdict, compared.method) == ("better", "sequential test")
    assert f"{after.stopping.tasks_saved} saved" in str(after)


def test_a_reward_out_of_the_range_calls_the_sequential_test_off_and_loses_nothing() -> None:
    def generous(task: int) -> float:
        return 2.0 if task == 3 else 1.0

    rule = SequentialStop(threshold=0.5, batch=40)
    evaluation = agl.Trainer(strategy="shm").evaluate(generous, list(range(40)), stop_early=rule)
    assert evaluation.stopping is not None
    assert (evaluation.stopping.verdict, evaluation.stopping.tasks_saved) == ("no evidence", 0)
    assert "the reward 2 is outside reward_range=(0.0, 1.0)" in str(evaluation.stopping.text())
    assert evaluation.mean_reward == pytest.approx(41 / 40)


@pytest.mark.heavy
def test_ten_thousand_tasks_have_every_figure() -> None:
    rng = random.Random(0)
    rollouts = (EvaluatedRollout("", "scored", rng.random(), 1.0, dimensions={"a": 1.0}) for _ in range(10_000))
    tasks = tuple(EvaluatedTask(n, (rollout,), (f"s={n % 10}",)) for n, rollout in enumerate(rollouts))
    evaluation, other = EvaluationResult(tasks), EvaluationResult(tuple(reversed(tasks)))
    assert "10000 tasks" in str(evaluation)
    assert evaluation.interval(method="bootstrap") is not None
    with pytest.raises(ValueError, match="task 0"):
        evaluation.compare(other)
    assert evaluation.compare(evaluation).p_value == 1.0


# --- figures ---------------------------------------------------------------------------------------------------------


def result(*rewards: float | None) -> EvaluationResult:
    return EvaluationResult(
        tuple(
            EvaluatedTask(number, (EvaluatedRollout(f"ro-{number}", "scored", reward, 1.0),))
            for number, reward in enumerate(rewards)
        )
    )


def test_a_fault_is_not_a_low_reward() -> None:
    assert result(1.0, None, None).mean_reward == 1.0
    assert result(None).mean_reward is None
    assert result(None).interval() is None
    assert "no task has a reward" in str(result(None))


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (100, 1.98397)]
)
def test_the_quantiles_of_students_distribution(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=0.003)


def test_the_comparison_is_paired() -> None:
    before, after = result(*[0.0] * 8, 1.0), result(*[0.5] * 8, 1.0)
    compared = before.compare(after)
    assert (compared.gained, compared.lost, compared.verdict) == (8, 0, "better")
    assert compared.p_value == 2 / 2**8
    assert after.compare(before).verdict == "worse"
    assert compared.difference is not None
    assert compared.difference.mean == pytest.approx(4 / 9)
    counts = "8 tasks gained, 0 lost of 9 pairs (0 unpaired tasks)"
    assert str(compared).startswith(f"better: {counts}, mean difference +0.444")


def test_only_the_same_tasks_compare() -> None:
    with pytest.raises(ValueError, match="the same tasks; got 1 and 2"):
        result(1.0).compare(result(1.0, 1.0))
    other = EvaluationResult((EvaluatedTask("other", ()),))
    with pytest.raises(ValueError, match="task 0 is 0 and 'other'"):
        result(1.0).compare(other)


def test_figures_that_are_not_there_are_refused() -> None:
    evaluation = result(1.0, 0.0)
    with pytest.raises(ValueError, match="Use evaluate\\(n_samples=5\\)"):
        evaluation.pass_at(5)
    with pytest.raises(ValueError, match=r"no reward has a dimension 'right'; expected one of: \(none\)"):
        evaluation.dimension("right")
    with pytest.raises(ValueError, match="must be one of wilson, exact, student, bootstrap"):
        evaluation.interval(method="normal")  # type: ignore[arg-type]
