"""`kill -9` of the store server under load: nothing acknowledged is missing, nothing is there twice, clients go on."""

from __future__ import annotations

import os

import pytest

from tests.chaos.kill import HEADER, Point, Server, kill_points, victim_of
from tests.chaos.stores import Place

pytestmark = pytest.mark.slow
POINTS = int(os.environ.get("AGL_KILL_POINTS", "30"))
SEED = int(os.environ.get("AGL_CHAOS_SEED", "4"))


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
