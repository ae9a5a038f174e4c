"""Alarms of whole runs: real conditions are reported once, recorded with advice, and reported as ended."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from tests.algorithm.parts import ask, say, wants_digits
from tests.training.conformance.cases import GRPO, RUN, fit, read


@agl.rollout
def pleased(task: str, llm: agl.LLM) -> float:
    ask(llm, [say(task)])
    return 1.0


@agl.rollout
def graded(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
    ask(llm, [say(task)])
    return 0.5 + (rollout.metadata or {})["sample"] / 100


def told(folder: Path, *names: str) -> list[tuple[str, str, int, int]]:
    """Return the alarm records with these names: name, state, step, since; in the order of their steps."""
    records = [record for record in read(folder).of("alarm") if record.name in names]
    return [(record.name, record.data["state"], record.step, record.data["since"]) for record in records]


def test_an_alarm_is_told_of_once_with_what_to_try_and_a_run_that_goes_on_tells_the_end(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raised = [("nothing_trained", "raised", 2, 2), ("equal_rewards", "raised", 3, 3)]
    with caplog.at_level(logging.INFO):
        fit(GRPO, pleased, untrained_model, tmp_path, max_steps=4)
    assert told(tmp_path, "equal_rewards", "nothing_trained") == raised
    [record] = [record for record in read(tmp_path).of("alarm") if record.name == "equal_rewards"]
    assert (record.data["value"], record.data["threshold"]) == (1.0, 0.9)
    assert record.data["text"] == "all rewards are equal in 4 of 4 groups, mean reward 1 (limit 90%)"
    assert "use harder tasks" in record.data["what_to_try"]
    lines = [r for r in caplog.records if "alarm equal_rewards" in r.getMessage()]
    assert [(line.levelname, line.getMessage().count("\n")) for line in lines] == [("WARNING", 0)]

    fit(GRPO, graded, untrained_model, tmp_path, max_steps=7)
    over = [("nothing_trained", "over", 6, 2), ("equal_rewards", "over", 7, 3)]
    assert told(tmp_path, "equal_rewards", "nothing_trained") == raised + over


def test_a_learning_rate_that_destroys_the_policy_is_told_of_after_its_first_update(
    untrained_model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "num_generations": 8, "learning_rate": 0.3}
    result = fit(GRPO, wants_digits, untrained_model, tmp_path, **settings)
    assert told(tmp_path, "policy_shift") == [("policy_shift", "raised", 1, 1)]
    first = result.metrics[0].update
    assert first["update_kl"] > 1.0 > first["approx_kl"], "before its only optimizer step an update has moved nothing"


def test_a_policy_that_is_driven_to_one_answer_collapses_and_is_told_of(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"max_steps": 16, "save_steps": 0, "num_generations": 8, "learning_rate": 5e-2}
    settings |= {"alarms": {"entropy_collapse": {"share": 0.5}}, "deterministic": False}
    fit(GRPO, wants_digits, untrained_model, tmp_path, **settings)
    _, state, step, _ = told(tmp_path, "entropy_collapse")[0]
    assert state == "raised"
    assert main(["runs", "show", RUN, "--store", str(tmp_path / "store.db")]) == 0
    shown = capsys.readouterr().out
    assert f"alarm entropy_collapse after step {step}, raised: entropy is " in shown
    assert "to try: set entropy_coef" in shown


@pytest.mark.parametrize(("alarms", "expected"), [("none", set[str]()), ({"cut_off": None}, {"nothing_trained"})])
def test_without_alarms_nothing_is_told_of_and_a_rule_can_be_switched_off(
    untrained_model: Path, tmp_path: Path, alarms: Any, expected: set[str]
) -> None:
    fit(GRPO, pleased, untrained_model, tmp_path, max_steps=2, alarms=alarms)
    assert {record.name for record in read(tmp_path).of("alarm")} == expected
