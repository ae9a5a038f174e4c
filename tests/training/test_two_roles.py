"""Two roles of one rollout learn in one run, each by a policy of its own, from a reward that neither earns alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_planner_and_a_solver_learn_together(tmp_path: Path) -> None:
    from bench.learning.two_roles import train_two

    result = train_two(tmp_path, seed=0)
    assert result.before < 0.4
    assert result.after >= 0.85
