"""Agents that crash, hang, kill their runner, cut streams or are refused: the books add up, the update is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.algorithm.parts import save_untrained_model
from tests.chaos.learning import EACH, FATES, STEPS, TASKS
from tests.stubs.processes import Terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_the_update_is_the_one_without_the_rollouts_that_went_wrong(tmp_path: Path, terminal: Terminal) -> None:
    model = save_untrained_model(tmp_path / "model")
    program = terminal(["python", "-m", "tests.chaos.learning", model, tmp_path], folder=ROOT, apart=True)
    report = json.loads(program.succeeded().splitlines()[-1])

    assert set(report["fates"]) == set(FATES)
    assert sum(report["fates"].values()) == STEPS * TASKS * EACH
    ends = {(fate, status) for fate, status in report["ends"]}
    assert {status for fate, status in ends if fate in ("raises", "no network", "cuts", "leaves a call")} == {"failed"}
    assert {status for fate, status in ends if fate == "hangs"} <= {"failed", "cancelled"}
    assert ("good", "succeeded") in ends
    assert ("kills", "succeeded") in ends
    assert "runner_died" in report["killed"]

    assert report["wrong"] == []
    for captured, trained, excluded in zip(
        report["captured_of_steps"], report["trained"], report["excluded"], strict=True
    ):
        assert captured == trained + sum(excluded.values())
        assert trained > 0
    assert sum(report["captured_of_steps"]) + report["late"] == report["captured"] == report["calls"]
    reasons = {reason for excluded in report["excluded"] for reason in excluded}
    assert {"infrastructure_fault", "superseded_attempt", "refused_call"} <= reasons

    assert report["weights"] == report["anew"]
    assert len(set(report["weights"])) == STEPS
