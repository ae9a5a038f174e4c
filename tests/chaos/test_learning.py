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
    found = json.loads(program.succeeded().splitlines()[-1])

    assert set(found["fates"]) == set(FATES)
    assert sum(found["fates"].values()) == STEPS * TASKS * EACH
    ends = {(fate, status) for fate, status in found["ends"]}
    assert {status for fate, status in ends if fate in ("raises", "no network", "cuts", "leaves a call")} == {"failed"}
    assert {status for fate, status in ends if fate == "hangs"} <= {"failed", "cancelled"}
    assert ("good", "succeeded") in ends
    assert ("kills", "succeeded") in ends
    assert "runner_died" in found["killed"]

    assert found["wrong"] == []
    for captured, trained, excluded in zip(
        found["captured_of_steps"], found["trained"], found["excluded"], strict=True
    ):
        assert captured == trained + sum(excluded.values())
        assert trained > 0
    assert sum(found["captured_of_steps"]) + found["late"] == found["captured"] == found["calls"]
    reasons = {reason for excluded in found["excluded"] for reason in excluded}
    assert {"infrastructure_fault", "superseded_attempt", "refused_call"} <= reasons

    assert found["weights"] == found["anew"]
    assert len(set(found["weights"])) == STEPS
