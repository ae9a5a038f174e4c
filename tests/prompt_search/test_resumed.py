"""Weak point 14: a search that is killed or interrupted, and goes on; on a store of files, with runner processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.prompt_search.parts import RULES, asked
from tests.stubs.model_server import ModelServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with asked() as opened:
        yield opened


def start(server: ModelServer, folder: Path, strategy: str, *point: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.prompt_search.resumed", server.base_url, str(folder), strategy, *point]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("strategy", "points"), [("shm", ["record 2"]), ("cs", ["played 1", "record 2", "choice 1", "round 2", "record 3"])]
)
def test_a_killed_run_goes_on_and_neither_plays_nor_pays_again(
    server: ModelServer, tmp_path: Path, strategy: str, points: list[str]
) -> None:
    """Killed with SIGKILL in a round's calls, after playing, after a choice and after a round."""
    whole = finish(start(server, tmp_path / "whole", strategy))
    expected = len(server.calls)
    assert all(rule in whole["best"] for rule in RULES)
    assert whole["same"]
    server.calls.clear()
    for point in points:
        killed = start(server, tmp_path / "killed", strategy, point)
        killed.communicate(timeout=100)
        assert killed.returncode == -signal.SIGKILL, point
    resumed = finish(start(server, tmp_path / "killed", strategy))
    assert resumed["states"] == whole["states"]
    assert resumed["best"] == whole["best"]
    assert resumed["rollouts"] == whole["rollouts"], "what had been played is not played again"
    under_way = 2 * 4  # kills amid the calls of a round; each may lose both calls of the branches at work
    assert expected <= len(server.calls) <= expected + 2 * under_way
    assert resumed["calls"] == expected, "the bill has what earlier starts have used"


@pytest.mark.heavy
@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_ctrl_c_keeps_the_best_so_far(server: ModelServer, tmp_path: Path, strategy: str) -> None:
    answer = server.answer

    def waits_in_the_second_round(request: dict[str, Any]) -> Any:
        if len(server.calls) > 8:
            server.hold()
        return answer(request)

    server.answer = waits_in_the_second_round
    process = start(server, tmp_path, strategy)
    server.wait_until(lambda calls: len(calls) >= 10, timeout=60)
    os.kill(process.pid, signal.SIGINT)
    report = finish(process)
    assert RULES[0] in report["interrupted"]
    written = json.loads((tmp_path / "history.json").read_text())
    assert (written["best"], written["stop_reason"]) == ("v1", "interrupted")
