"""The differences between the SQL of SQLite and of PostgreSQL, as a table of words.

Each statement is written once. `@rollouts` is a table, `@here` is true for the rows of a store (a partition in
PostgreSQL, the complete file in SQLite), `?` is a value, and other words with `@` are in `Dialect.words`. An empty word
also removes the comma after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.store.rules.durable import DAMAGED, INDEXED
from agentlightning.store.summaries.facts import Facts

Columns = tuple[Any, ...]
"""One row of a result."""
Condition = tuple[str, tuple[object, ...]]
_WORD = re.compile(r"(\w+\.)?@(\w+)(, )?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words of one database, and the differences that words cannot express."""

    mark: str
    tables: str
    """Prefix of the names of tables."""
    columns: tuple[str, ...]
    """Columns in the row of a rollout that repeat fields of its record."""
    among: Callable[[str, Sequence[str] | Sequence[int]], Condition]
    row_of: Callable[[Facts], Columns]
    facts_of: Callable[[Columns], Facts]
    """Converts columns of a summary to facts. `row_of` does the reverse."""
    of_run_key: Callable[[str | None], Condition]
    """Returns the condition for the summaries of a run."""
    words: dict[str, str]
    by_status: bool = False
    """True if the indexes order rollouts by start only within each status."""
    count_change: str = ""
    """Statement sent before each change. The number of the change is the word `@change`."""
    in_order: tuple[str, ...] = ()
    """Statements sent before a page of run records, so that it is read in the order of an index."""

    def one_of(self, column: str, values: Sequence[str] | Sequence[int]) -> Condition:
        """Return the test that a column has one of these values. A single value keeps the order of an index."""
        if not values:
            return "false", ()
        return (f"{column} = ?", (values[0],)) if len(values) == 1 else self.among(column, values)

    def render(self, text: str, partition: str = "") -> str:
        """Return a statement in the SQL of this database. `partition` is a literal."""

        def word(match: re.Match[str]) -> str:
            alias, name, comma = match.groups(default="")
            value = self.words.get(name)
            if value is None:
                return f"{alias}{self.tables}{name}{comma}"
            value = _WORD.sub(word, value.replace("{alias}", alias))
            return value + comma if value else ""

        return _WORD.sub(word, text).replace("?", self.mark).replace("{partition}", partition)


def of_run(run_id: str | None, column: str = "run_id") -> Condition:
    """Return the test for a run, in a form that can use an index."""
    return (f"{column} IS NULL", ()) if run_id is None else (f"{column} = ?", (run_id,))


_RUN = Facts._fields.index("run_id")


def _run_key(run_id: str | None) -> str:
    return "" if run_id is None else f"/{run_id}"


def _with_run_key(facts: Facts) -> Columns:
    return (*facts[:_RUN], _run_key(facts.run_id), *facts[_RUN + 1 :])


def _without_run_key(row: Columns) -> Facts:
    return Facts._make((*row[:_RUN], row[_RUN][1:] or None, *row[_RUN + 1 :]))


def _in_json(column: str, values: Sequence[object]) -> Condition:
    return f"{column} IN (SELECT value FROM json_each(?))", (json.dumps(list(values)),)


def _without_nulls(facts: Facts) -> Columns:
    return tuple(value.replace("\0", " ") if type(value) is str and "\0" in value else value for value in facts)


def _in_array(column: str, values: Sequence[object]) -> Condition:
    kind = "bigint" if type(values[0]) is int else "text"
    return f"{column} = ANY(?::{kind}[])", (list(values),)


SQLITE = Dialect(
    "?", "", INDEXED, _in_json, _with_run_key, _without_run_key, lambda run_id: ("s.run = ?", (_run_key(run_id),)),
    {
        "here": "true", "partition": "", "own": "",
        "version": "", "first_version": "", "next_version": "", "seen_version": "0", "unchanged": "? NOT NULL",
        "change": "(SELECT value FROM counters WHERE name = 'change')",
        "lock": "", "instr": "instr",
        "unindexed": "+",  # before a column: its index is not used, which could be long
        "readable": f"+status <> '{DAMAGED}'",
        "attempt_id": "(SELECT s.attempt_id FROM summaries s WHERE s.run = coalesce('/' || run_id, '') AND"
        " s.number = rollouts.number)",
        "run_key": "{alias}run",
        "of_rollout": "(run, number) = (SELECT coalesce('/' || run_id, ''), number FROM rollouts WHERE rollout_id = ?)",
        "input_of_rollout": "number = (SELECT number FROM rollouts WHERE rollout_id = ?)",
        "has_bytes": "instr(body, ?) > 0",
        "input_key": "number", "input_key_of": "(SELECT number FROM rollouts WHERE rollout_id = ?)",
        "with_input": "s.number IN (SELECT number FROM inputs WHERE instr(searched, ?) > 0)",
        "with_spans": "rollouts r CROSS JOIN summaries s ON s.run = coalesce('/' || r.run_id, '')"
        " AND s.number = r.number",  # an index of rollouts has them, which is read beside this table
        "page_key": "s.run AS run",
        "of_page": "JOIN summaries s ON s.run = p.run AND s.number = p.number JOIN rollouts r ON r.number = p.number"
        " JOIN inputs i ON i.number = p.number",
    },
    by_status=True,
    count_change="UPDATE counters SET value = value + 1 WHERE name = 'change'",
)  # fmt: skip
POSTGRES = Dialect(
    "%s", "agl_", (*INDEXED, "attempt_id"), _in_array, _without_nulls, Facts._make,
    lambda run_id: of_run(run_id, "s.run_id"),
    {
        "here": "{alias}partition = {partition}", "partition": "partition", "own": "{partition}",
        "version": "version", "first_version": "1", "next_version": "version = agl_rows.version + 1",
        "seen_version": "version", "unchanged": "version = ?",
        "change": "pg_current_xact_id()", "lock": " FOR UPDATE SKIP LOCKED",
        "instr": "strpos",
        "unindexed": "", "readable": f"status <> '{DAMAGED}'", "attempt_id": "attempt_id",
        "run_key": "{alias}run_id",
        "of_rollout": "@here AND rollout_id = ?", "input_of_rollout": "@here AND rollout_id = ?",
        "has_bytes": "position(?::bytea in body) > 0",
        "input_key": "rollout_id", "input_key_of": "?",
        "with_input": "(s.rollout_id IN (SELECT rollout_id FROM agl_inputs WHERE @here AND strpos(searched, ?) > 0))"
        " IS TRUE",  # read once and hashed, and not as a join
        "with_spans": "agl_summaries s JOIN agl_rollouts r ON r.@here AND r.rollout_id = s.rollout_id",
        "page_key": "s.rollout_id",
        "of_page": "JOIN agl_summaries s ON s.@here AND s.rollout_id = p.rollout_id"
        " JOIN agl_rollouts r ON r.@here AND r.rollout_id = p.rollout_id"
        " JOIN agl_inputs i ON i.@here AND i.rollout_id = p.rollout_id",
    },
    in_order=("SET LOCAL enable_bitmapscan = off", "SET LOCAL enable_sort = off"),
)  # fmt: skip
