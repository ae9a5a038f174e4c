"""A SQLite database of the world's airports, and questions about it, each with a query that answers it.

The airports are those of the package `airportsdata`. A question is made of a kind and a country. Each such pair belongs
to exactly one of three parts: training, held out, or shown to the first model.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypedDict
from zlib import crc32

import airportsdata

Part = Literal["train", "held_out", "shown"]

KINDS: Final = {
    "How many airports has {}?": "SELECT count(*) FROM airports WHERE country = '{}'",
    "How many cities of {} have an airport?": "SELECT count(DISTINCT city) FROM airports WHERE country = '{}'",
    "Which airport of {} is the highest?": (
        "SELECT iata FROM airports WHERE country = '{}' ORDER BY elevation DESC LIMIT 1"
    ),
    "Which airport of {} is the lowest?": "SELECT iata FROM airports WHERE country = '{}' ORDER BY elevation LIMIT 1",
    "Which airport of {} lies most northern?": (
        "SELECT iata FROM airports WHERE country = '{}' ORDER BY lat DESC LIMIT 1"
    ),
    "Which airport of {} lies most southern?": "SELECT iata FROM airports WHERE country = '{}' ORDER BY lat LIMIT 1",
}
"""Question, with a place for the country, and its query."""
_FEWEST: Final = 3
_ROWS: Final = 20


class Task(TypedDict):
    """A question, the query with the right rows, and the file of the database."""

    question: str
    query: str
    database: str


def make_database(file: Path) -> None:
    """Write the airports that have an IATA code to a new file."""
    airports = airportsdata.load("IATA").values()
    with sqlite3.connect(file) as database:
        database.execute(
            "CREATE TABLE airports (iata TEXT, name TEXT, city TEXT, country TEXT, elevation REAL, lat REAL)"
        )
        rows = [
            tuple(one[column] for column in ("iata", "name", "city", "country", "elevation", "lat")) for one in airports
        ]
        database.executemany("INSERT INTO airports VALUES (?, ?, ?, ?, ?, ?)", rows)
    database.close()


def run_query(file: str, query: str) -> list[tuple[object, ...]] | str:
    """Return the first rows of a read-only query; the text of the error if it fails."""
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)  # bytes per value
    database.set_authorizer(_allowed)
    steps = iter(range(100))
    database.set_progress_handler(lambda: next(steps, None) is None, 100_000)  # stop an endless query
    try:
        return database.execute(query).fetchmany(_ROWS)
    except (sqlite3.Error, sqlite3.Warning) as error:
        return f"error: {error}"
    finally:
        database.close()


def _allowed(action: int, *_: object) -> int:
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


def is_right(task: Task, query: str) -> bool:
    """Return whether the query has the same rows as the right one."""
    return run_query(task["database"], query) == run_query(task["database"], task["query"])


def countries() -> list[str]:
    """Return the codes of the countries that have three airports or more."""
    counts = Counter(one["country"] for one in airportsdata.load("IATA").values())
    return sorted(country for country, count in counts.items() if count >= _FEWEST)


def tasks(part: Part, database: Path) -> list[Task]:
    """Return the tasks of one part, shuffled."""
    chosen = [Task(question=question, query=query, database=str(database)) for question, query in _questions(part)]
    random.Random(part).shuffle(chosen)
    return chosen


def _questions(part: Part) -> Iterator[tuple[str, str]]:
    for question, query in KINDS.items():
        for country in countries():
            digit = crc32(f"{question}{country}".encode()) % 10
            if part == ("train" if digit < 4 else "held_out" if digit < 6 else "shown"):
                yield question.format(country), query.format(country)
