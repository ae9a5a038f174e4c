"""A SQLite full-text index (FTS5) of facts about countries, and questions that need two of them.

The facts are those of the package `countryinfo`, one sentence each. A question names a country by its capital or by its
people and asks for another fact about it. The answer comes from the package, never from the index. A question is used
only if two searches lead to its answer and no sentence has both facts (as for Singapore, its own capital). Its country
decides whether it is a training or a held-out question, so that no training question is about a held-out country.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypedDict
from zlib import crc32

import countryinfo

Part = Literal["train", "held_out"]

SENTENCES: Final = {
    "capital": "The capital of {country} is {value}.",
    "people": "The people of {country} are {value}.",
    "currency": "The currency of {country} is {value}.",
    "calling code": "The calling code of {country} is {value}.",
    "region": "The region of {country} is {value}.",
}
"""The sentence of each kind of fact; a search for its word and a name finds it."""
NAMED: Final = {"capital": "whose capital is {}", "people": "whose people are {}"}
"""The description of a country in a question, by kind of fact."""
KINDS: Final = [(named, asked) for named in NAMED for asked in SENTENCES if asked != named and asked != "people"]
LONGEST_QUERY: Final = 200
"""Characters of a query; the rest is ignored."""


class Task(TypedDict):
    """A question, its answer and the file of the index; `named` and `asked` are the kinds of the two facts."""

    question: str
    answer: str
    named: str
    name: str
    country: str
    asked: str
    index: str


@cache
def facts() -> Mapping[str, Mapping[str, str]]:
    """Return the facts of each country, by kind; a country with two currencies has none here."""
    facts_by_country: dict[str, dict[str, str]] = {}
    for one in countryinfo.all_countries():
        info = one.info()
        several = {"currency": info.get("currencies"), "calling code": info.get("callingCodes")}
        values = {kind: entries[0] for kind, entries in several.items() if entries and len(entries) == 1}
        values |= {"capital": info.get("capital"), "people": info.get("demonym"), "region": info.get("region")}
        facts_by_country[info["name"]] = {kind: str(values[kind]) for kind in SENTENCES if values.get(kind)}
    return facts_by_country


def make_index(file: Path) -> None:
    """Write the sentences to a new file."""
    with sqlite3.connect(file) as database:
        database.execute("CREATE VIRTUAL TABLE passages USING fts5 (text)")
        rows = [
            (SENTENCES[kind].format(country=country, value=value),)
            for country, values in facts().items()
            for kind, value in values.items()
        ]
        database.executemany("INSERT INTO passages VALUES (?)", rows)
    database.close()


def search(file: str | Path, query: str) -> str:
    """Return the sentence that has all words of the query and ranks highest (BM25), or `nothing found`.

    Each word is searched for as it is: FTS5's own syntax (quotes, NOT, *) has no meaning in a query.

    Raises:
        sqlite3.OperationalError: the file is not such an index.
    """
    words = re.findall(r"\w+", query[:LONGEST_QUERY])
    if not words:
        return "nothing found"
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        row = database.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT 1",
            (" ".join(f'"{word}"' for word in words),),
        ).fetchone()
    finally:
        database.close()
    return row[0] if row else "nothing found"


def tasks(part: Part, index: Path) -> list[Task]:
    """Return the tasks of one part, shuffled."""
    chosen: list[Task] = []
    for named, asked in KINDS:
        unique = Counter(values.get(named) for values in facts().values())
        for country, values in facts().items():
            if named not in values or asked not in values or unique[values[named]] > 1:
                continue
            if part != ("held_out" if crc32(country.encode()) % 4 == 0 else "train"):
                continue
            question = f"What is the {asked} of the country {NAMED[named].format(values[named])}?"
            task = Task(
                question=question,
                answer=values[asked],
                named=named,
                name=values[named],
                country=country,
                asked=asked,
                index=str(index),
            )
            if needs_two_searches(task):
                chosen.append(task)
    random.Random(part).shuffle(chosen)
    return chosen


def searches(task: Task) -> tuple[str, str]:
    """Return the two searches that answer a question."""
    return f"{task['named']} {task['name']}", f"{task['asked']} {task['country']}"


def needs_two_searches(task: Task) -> bool:
    """Return whether the two searches find the two sentences, and the name in the question does not find the second."""
    values, country, index = facts()[task["country"]], task["country"], task["index"]
    expected = [SENTENCES[kind].format(country=country, value=values[kind]) for kind in (task["named"], task["asked"])]
    shortcut = search(index, f"{task['asked']} {task['name']}")
    return [search(index, query) for query in searches(task)] == expected and shortcut != expected[1]
