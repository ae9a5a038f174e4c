"""Rollouts without anything to learn change nothing, and a run that cannot go on ends with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentlightning as agl
from agentlightning.errors import NonFiniteLossError, NoScoredRolloutError
from tests.algorithm.parts import ask, say
from tests.training.conformance.cases import (
    AHEAD,
    GRPO,
    OURS,
    POLICIES,
    PPO,
    SFT,
    SMALL,
    TRL,
    Case,
    Digits,
    assert_complete,
    each,
    fit,
    read,
)


def is_as_it_was(case: Case, model: Path, folder: Path) -> bool:
    """Return whether the model of a finished run is the one that it began with."""
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    places = [folder / "run" / "model" / role for role in case.roles]
    models = places if len(places) > 1 else [folder / "run" / "model"]
    after = [AutoModelForCausalLM.from_pretrained(place).state_dict() for place in models]
    return all(torch.equal(before[name], weights[name]) for weights in after for name in before)


class Fails(Digits):
    """Fails after its calls in the given steps; in the others it earns its sample's number."""

    def __init__(self, roles: Any, steps: Any = (1, 2, 3, 4)) -> None:
        super().__init__(roles)
        self._steps = steps

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        super().rollout(task, resources, rollout)
        place = rollout.metadata or {}
        if place["step"] in self._steps:
            raise ConnectionError("the database is down")
        return float(place.get("sample") or 0)


@each(*OURS, TRL)
def test_a_run_without_any_reward_ends_with_the_commonest_cause_and_leaves_the_weights(
    case: Case, untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoScoredRolloutError, match="the database is down"):
        fit(case, Fails(case.roles), untrained_model, tmp_path, max_steps=1, progress="plain")
    printed = capsys.readouterr().out
    assert "none of 16 rollouts has a reward to learn from" in printed
    assert "ConnectionError: the database is down (16 of 16)" in printed
    assert is_as_it_was(case, untrained_model, tmp_path)
    books = read(tmp_path)
    assert books.run.state == "failed"
    assert "the database is down" in str(books.run.error)
    assert books.lines[0]["calls_excluded"] == {"infrastructure_fault": 16 * len(case.roles)}


@each(GRPO, PPO, SFT, TRL)
def test_a_step_whose_rollouts_all_fail_is_an_alarm_until_they_succeed_again(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    result = fit(case, Fails(case.roles, steps=(2,)), untrained_model, tmp_path, max_steps=3)
    books = read(tmp_path)
    assert_complete(books, 3)
    assert [figures.calls_trained > 0 for figures in result.metrics] == [True, False, True]
    alarms = [record for record in books.of("alarm") if record.name == "infrastructure"]
    rewards = [line["mean_reward"] for line in books.lines if line["mean_reward"] is not None]
    assert (books.run.best.name, books.run.best.value) == ("mean_reward", max(rewards)), "there are no held-out tasks"
    assert [(record.data["state"], record.step, record.data["since"]) for record in alarms] == [
        ("raised", 2, 2), ("over", 3, 2),
    ]  # fmt: skip


@each(GRPO, AHEAD, POLICIES, TRL)
def test_groups_of_equal_rewards_teach_nothing_and_take_no_update(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    class Pleased(Digits):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            super().rollout(task, resources, rollout)
            return 0.5

    result = fit(case, Pleased(case.roles), untrained_model, tmp_path, max_steps=2)
    excluded = {"equal_rewards": 16 * len(case.roles)}
    assert [(figures.mean_reward, figures.calls_excluded) for figures in result.metrics] == [(0.5, excluded)] * 2
    assert result.steps == 0
    assert is_as_it_was(case, untrained_model, tmp_path)
    assert {call.weight_version for call in read(tmp_path).calls} == {0}


@each(GRPO, AHEAD, PPO, SFT, TRL)
def test_weights_that_give_no_probabilities_end_the_run_after_three_steps(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(untrained_model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(tmp_path / "broken")
    with pytest.raises(NonFiniteLossError, match="3 steps in a row"):
        fit(case, Digits(case.roles), tmp_path / "broken", tmp_path, tasks=["a"], max_steps=9)
    lines = read(tmp_path).lines
    assert [line["update"]["skipped_steps"] for line in lines] == [1, 1, 1]
    assert all(line["calls_excluded"].keys() == {"upstream_error"} for line in lines)


@each(GRPO, PPO, SFT)
def test_a_learning_rate_that_destroys_the_weights_ends_the_run(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteLossError, match="Reduce learning_rate"):
        fit(case, Fails(case.roles, steps=()), untrained_model, tmp_path, tasks=["a"], max_steps=20, learning_rate=1e30)


@pytest.mark.parametrize(("limit", "held_out"), [(3, ["held out"] * 9), (30, None)])
@each(GRPO, AHEAD, PPO, SFT, TRL)
def test_a_smoke_test_by_max_rollouts_ends_without_an_error(
    case: Case, untrained_model: Path, tmp_path: Path, limit: int, held_out: list[str] | None
) -> None:
    settings: dict[str, Any] = {"max_steps": 20, "trainer_max_rollouts": limit, "held_out": held_out, "eval_steps": 0}
    fit(case, Fails(case.roles, steps=()), untrained_model, tmp_path, **settings)
    books = read(tmp_path)
    ended = [*books.rollouts, *books.held_out]
    assert {rollout.status for rollout in ended} == {"succeeded", "cancelled"}
    assert sum(rollout.status == "succeeded" for rollout in ended) == limit


@each(*OURS, TRL)
def test_max_iterations_are_the_steps_of_a_run(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    settings = {**SMALL, **case.defaults, "eval_steps": 0, "model": untrained_model, "output_dir": tmp_path}
    trainer = agl.Trainer(algorithm=case.make(**settings), strategy="shm", store="memory")

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return float((rollout.metadata or {})["sample"])

    trainer.train(agent, ["one", "two"], max_iterations=2)
    assert [figures.step for figures in trainer.result.metrics] == [1, 2]
