"""A runner that is killed in the middle of a training run costs one more attempt, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.heavy
def test_a_killed_runner_does_not_stop_the_run_and_its_rollout_counts_once(
    untrained_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.training.killed", str(untrained_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["steps"] == 3
    assert found["statuses"] == ["succeeded"] * 24
    first, *_, last = found["attempts"]
    assert first == [found["dead"], "failed", "infrastructure_fault", "runner_died"]
    assert last[1:3] == ["succeeded", "scored"]
    assert found["rewards"] == [last[0]]

    assert found["captured"] == found["calls"] == sum(found["trained"]) + _total(found["excluded"])
    assert found["excluded"][1]["superseded_attempt"] >= 1


def _total(excluded: list[dict[str, int]]) -> int:
    return sum(sum(reasons.values()) for reasons in excluded)
