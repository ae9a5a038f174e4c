"""A connection for the shared SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from agentlightning.store.sql.dialect import Columns, Dialect


class Sent(Protocol):
    """A sent statement. `rowcount` is the number of rows that it changed, known after the next `sync`."""

    @property
    def rowcount(self) -> int: ...


class Link:
    """One connection within a transaction. It waits for every statement; `render` converts a statement to the SQL of
    the database."""

    def __init__(self, db: Any, dialect: Dialect, render: Callable[[str], str | bytes]) -> None:
        self.db = db
        self.dialect = dialect
        self._render = render

    def fetch(self, text: str, values: Sequence[object] = (), *, once: bool = False) -> list[Columns]:
        """Execute a statement and return its rows. `once`: the statement has many variants and is not prepared."""
        return self.db.execute(self._render(text), values).fetchall()

    def each(self, text: str, values: Sequence[object] = ()) -> Iterator[Columns]:
        """Execute a statement and yield its rows. There may be many."""
        yield from self.db.execute(self._render(text), values)

    def shown(self, text: str) -> str:
        """Return a statement without values in a form that a user can execute."""
        rendered = self._render(text)
        return (rendered if isinstance(rendered, str) else rendered.decode()).replace("%%", "%")

    def send(self, text: str, values: Sequence[object] = ()) -> Sent:
        """Execute a statement. May return before the result is available."""
        return self.db.execute(self._render(text), values)

    def send_rollback(self, statement: str) -> None:
        """Roll back to a savepoint."""
        self.db.execute(statement)

    def sync(self) -> None:
        """Wait until all sent statements are complete."""
