"""`kill -9` of the store server under load: nothing acknowledged is missing, nothing is there twice, clients go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kill import HEADER, Point, Server, Trap, kill_points, victim_of
from tests.chaos.stores import Place

pytestmark = pytest.mark.slow
POINTS = int(os.environ.get("AGL_KILL_POINTS", "30"))
SEED = int(os.environ.get("AGL_CHAOS_SEED", "4"))
ROOT = Path(__file__).parents[2]


def test_what_was_acknowledged_survives_kill_9_at_any_point_of_the_write_path(durable: Place) -> None:
    judge(list(kill_points(Server(durable), POINTS, SEED)), POINTS)


def test_what_was_acknowledged_survives_the_death_of_the_database_under_a_store_that_stays_up() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'agl-framework[postgres]')")
    with victim_of("database") as victim:
        judge(list(kill_points(victim, POINTS // 5, SEED)), POINTS // 5)


def judge(points: list[Point], expected: int) -> None:
    print(f"AGL_CHAOS_SEED={SEED}", HEADER, *points, sep="\n")
    assert len(points) == expected + 1
    assert [point for point in points if point.found] == []
    assert points[-1].acknowledged > points[0].acknowledged


def test_a_training_run_goes_on_while_its_store_is_killed_and_restarted(durable: Place) -> None:
    server, chance, kills = Server(durable), random.Random(SEED), 0
    server.start_with(Trap("after commit", 3))
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.training", server.endpoint],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (_ended(program)):
            if not server.is_alive():
                kills += 1
                server.start_with(Trap.draw(chance, "before commit", "after commit", "primitive"))
        output, complained = program.communicate()
    finally:
        program.kill()
        program.communicate()
        server.kill()
    assert program.returncode == 0, complained
    rows: list[Any] = json.loads(output.splitlines()[-1])
    assert rows == [[task, "succeeded", 1, [task / 10], True] for task in range(60)]
    assert kills >= 5
    assert asyncio.run(_totals(durable)) == (60, 60)


def _ended(program: subprocess.Popen[str]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(0.05)
        return True
    return False


async def _totals(place: Place) -> tuple[int | None, int | None]:
    async with place.opened() as store:
        statistics = await store.statistics()
        return statistics.get("total_rollouts"), statistics.get("total_attempts")
