"""Runners and the store server are killed while a run continues: every task ends once, with its expected reward."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.running import under_fire


def test_every_task_ends_once_though_runners_and_server_are_killed(tmp_path: Path) -> None:
    losses = under_fire(400, 4, server_kills=2, pause=0.5, seed=7, folder=tmp_path)
    assert losses.problems == []
    assert losses.runners >= 2
    assert losses.servers == 2
