"""examples/sql_agent: its questions and database, a step that trains the writer alone, and the effect of training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.shown import EXAMPLES, check_learnt, curve, run

pytest.importorskip("langgraph", reason="langgraph is not installed: make test-example NAMES=sql_agent")
pytest.importorskip("airportsdata", reason="airportsdata is not installed: make test-example NAMES=sql_agent")

PROGRAM = "python examples/sql_agent/train.py"


@pytest.fixture
def airports(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "sql_agent")
    import airports  # type: ignore[import-not-found]

    return airports


@pytest.fixture
def database(airports: Any, tmp_path: Path) -> Path:
    file = tmp_path / "airports.db"
    airports.make_database(file)
    return file


def test_no_question_is_in_two_parts_and_each_has_an_answer(airports: Any, database: Path) -> None:
    parts = [airports.tasks(part, database) for part in ("train", "held_out", "shown")]
    questions = [task["question"] for tasks in parts for task in tasks]
    assert len(questions) == len(set(questions)) == len(airports.KINDS) * len(airports.countries())
    for task in parts[1]:
        rows = airports.run_query(task["database"], task["query"])
        assert isinstance(rows, list), rows
        assert rows, task


def test_another_query_with_the_same_rows_is_right_and_one_with_an_error_is_not(airports: Any, database: Path) -> None:
    task = {
        "question": "How many airports has LU?",
        "query": "SELECT count(*) FROM airports WHERE country = 'LU'",
        "database": str(database),
    }
    assert airports.is_right(task, "SELECT sum(country IS 'LU') FROM airports")
    assert not airports.is_right(task, "SELECT count(*) FROM airports")
    assert not airports.is_right(task, "SELECT count(*) FROM airport")


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("DELETE FROM airports", "readonly"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT count(*) FROM airports a, airports b, airports c WHERE a.lat + b.lat < c.lat", "interrupted"),
        ("SELECT hex(zeroblob(1000000))", "too big"),
        ("ATTACH '/nowhere/at/all.db' AS other", "not authorized"),
    ],
)
def test_a_query_cannot_write_or_run_forever(airports: Any, database: Path, query: str, error: str) -> None:
    assert error in airports.run_query(str(database), query)
    assert airports.run_query(str(database), "SELECT count(*) > 1000 FROM airports") == [(1,)]


@pytest.mark.slow
def test_calls_of_the_checker_are_not_trained() -> None:
    printed = run(f"{PROGRAM} --imitation-steps 1 --steps 1 --held-out 4")
    assert curve(printed) == {0: 0}, "a model that knows nothing earns nothing"
    left_out = {reason: int(count) for reason, count in re.findall(r"(not_selected|equal_rewards) (\d+)", printed)}
    assert left_out["not_selected"] >= 128, "each of the 128 rollouts asks the checker once or more"
    assert left_out["equal_rewards"] >= 128, "and the writer"


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_writer_learns() -> None:
    check_learnt(PROGRAM, 1100, at_most=40, gain=20)
