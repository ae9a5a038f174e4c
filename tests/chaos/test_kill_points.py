"""`kill -9` of the store server under load: nothing acknowledged is missing, nothing is there twice, clients go on.

`make test-chaos` kills five hundred times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kill import HEADER, Point, Server, Trap, database_victim, kill_points
from tests.chaos.running import count, program_of
from tests.chaos.stores import Place

POINTS = int(os.environ.get("AGL_KILL_POINTS", "30"))
SEED = int(os.environ.get("AGL_CHAOS_SEED", "4"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 4 * POINTS)]


def test_what_was_acknowledged_survives_kill_9_at_any_point_of_the_write_path(durable: Place) -> None:
    judge(kill_points(Server(durable), POINTS, SEED), POINTS)


def test_what_was_acknowledged_survives_the_death_of_the_database_under_a_store_that_stays_up() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'agl-framework[postgres]')")
    with database_victim() as victim:
        judge(kill_points(victim, POINTS // 5, SEED), POINTS // 5)


def judge(killed: Iterator[Point], expected: int) -> None:
    print(f"AGL_CHAOS_SEED={SEED}", HEADER, sep="\n")
    points: list[Point] = []
    for point in killed:
        print(point, flush=True)
        points.append(point)
    assert len(points) == expected + 1
    assert [point for point in points if point.found] == []
    assert points[-1].acknowledged > points[0].acknowledged


def test_a_training_run_goes_on_while_its_store_is_killed_and_restarted(durable: Place, tmp_path: Path) -> None:
    server, chance, kills = Server(durable), random.Random(SEED), 0
    server.start_with(Trap("after commit", 3))
    program = program_of(server.endpoint, rollouts=60, runners=2, folder=tmp_path)
    try:
        while program.code is None:
            if not server.is_alive():
                kills += 1
                server.start_with(Trap.draw(chance, "before commit", "after commit", "primitive"))
            time.sleep(0.05)
    finally:
        program.kill()
        server.kill()
    assert program.code == 0, program.said
    assert kills >= 5
    assert asyncio.run(count(durable.spec, 60, json.loads(program.said.splitlines()[-1]))) == []
