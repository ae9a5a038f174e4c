"""Runners and the store server are killed while a run continues: every task ends once, with its expected reward."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.running import under_fire

ROLLOUTS = int(os.environ.get("AGL_CHAOS_ROLLOUTS", "400"))


@pytest.mark.timeout(120 + ROLLOUTS)
def test_every_task_ends_once_though_runners_and_server_are_killed(tmp_path: Path) -> None:
    kills, pause, runners = (2, 0.5, 4) if ROLLOUTS < 1000 else (3, 2.0, 8)
    losses = under_fire(ROLLOUTS, runners, server_kills=kills, pause=pause, seed=7, folder=tmp_path)
    assert losses.problems == []
    assert losses.runners >= 2
    assert losses.servers == kills
