"""Baseline: runs every task, logs what happened, and sums up."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import agentlightning as agl


@agl.rollout
def agent(task: int) -> float | None:
    if task < 0:
        raise LookupError("a negative task")
    return None if task == 0 else float(task)


def run(baseline: agl.Baseline, *, initial_resources: Any = None, **datasets: Any) -> Any:
    resources: dict[str, Any] = {} if initial_resources is None else initial_resources
    trainer = agl.Trainer(algorithm=baseline, strategy="shm", initial_resources=resources)
    trainer.fit(agent, **datasets)
    return trainer.result


def test_rewards_come_back_in_order_with_the_outcomes() -> None:
    result = run(agl.Baseline(max_queue_length=2), train_dataset=[1, -1, 3], val_dataset=[0])
    assert result.rewards == [1.0, None, 3.0, None]
    assert result.outcomes == {"scored": 2, "infrastructure_fault": 1, "unscored": 1}
    assert result.mean_reward == 2.0
    assert len(result.seconds) == 4
    assert str(result) == "4 rollouts (1 infrastructure_fault, 2 scored, 1 unscored), mean reward 2.000"


def test_epochs_repeat_both_datasets() -> None:
    assert run(agl.Baseline(n_epochs=2), train_dataset=[1], val_dataset=[2]).rewards == [1.0, 2.0, 1.0, 2.0]


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match="Baseline needs tasks"):
        run(agl.Baseline(), train_dataset=[])


@pytest.mark.parametrize(
    ("verbosity", "shown", "hidden"),
    [
        ("keys", "['agentlightning.reward", "{'agentlightning"),
        ("key_values", ": 1.0", "]["),
        ("none", "scored", "Span "),
    ],
)
def test_the_log_says_as_much_of_each_span_as_asked(
    verbosity: Any, shown: str, hidden: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "agentlightning.algorithm.fast"):
        run(agl.Baseline(span_verbosity=verbosity), train_dataset=[1])
    text = "\n".join(r.getMessage() for r in caplog.records if r.name == "agentlightning.algorithm.fast")
    assert shown in text
    assert hidden not in text
    assert "[Rollout ro-" in text
    assert "| Attempt at-" in text


def test_a_failed_attempt_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentlightning.algorithm.fast"):
        run(agl.Baseline(), train_dataset=[-1])
    assert "LookupError: a negative task" in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_epochs": 0}, "n_epochs"),
        ({"max_queue_length": 0}, "max_queue_length"),
        ({"span_verbosity": "all"}, "span_verbosity"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        agl.Baseline(**settings)


@pytest.mark.parametrize("settings", [{"train_split": 0.5}, {"polling_interval": 5.0}])
def test_settings_without_an_effect_say_so(settings: dict[str, Any]) -> None:
    with pytest.warns(DeprecationWarning, match="has no effect"):
        agl.Baseline(**settings)


def test_baseline_is_fast() -> None:
    assert issubclass(agl.Baseline, agl.FastAlgorithm)
