"""One connection to PostgreSQL for the store. Statements are prepared and sent without waiting (pipeline mode), and
errors are classified. The password of the URI is used only here: no error or log line contains it.
Source: https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import psycopg
from psycopg import conninfo, errors, sql
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper

from agentlightning.errors import BadRequestError, StoreUnreachableError
from agentlightning.store.sql import link
from agentlightning.store.sql.dialect import POSTGRES, Columns

_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Defaults for options that the URI does not set. A lost connection is detected within half a minute."""

_SETTINGS = (
    "SET jit = off",
    "SET enable_seqscan = off",
    "SET lock_timeout = '250ms'",
    "SET idle_in_transaction_session_timeout = '30s'",
)
"""Every statement has an index. If another transaction holds a lock for longer than its timeout, the script is run
again later. A process that is paused during a transaction loses its locks."""

_PLANS_KEPT_SECONDS = 1.0
"""Seconds for which a plan is kept. A plan for an empty table may use any index, so it must not be kept for long."""


Cursor = psycopg.Cursor[Columns]
Database = psycopg.Connection[Columns]


class Place:
    """The address of a store: the URI for the connection, and a text without the password for messages."""

    def __init__(self, uri: str) -> None:
        if not uri.startswith(("postgresql://", "postgres://")):
            raise BadRequestError(
                "The URI of a PostgreSQL store (not shown: it may contain a password) must be of the form "
                "postgresql://user:password@host:5432/database"
            )
        try:
            parts = conninfo.conninfo_to_dict(uri)
        except psycopg.Error:
            raise BadRequestError(
                "The URI of the PostgreSQL store cannot be read (not shown: it may contain a password); expected "
                "postgresql://user:password@host:5432/database?option=value with %-escapes for special characters"
            ) from None  # the cause quotes the URI
        self._conninfo = conninfo.make_conninfo(
            uri,
            client_encoding="utf8",
            fallback_application_name="agentlightning",
            **{name: value for name, value in _DEFAULTS.items() if name not in parts},
        )
        user, port = parts.get("user"), parts.get("port")
        host = parts.get("host") or parts.get("hostaddr") or ""
        self._text = (
            f"postgresql://{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}/{parts.get('dbname', '')}"
        )

    def __repr__(self) -> str:
        return self._text

    def connect(self) -> Database:
        """Return a connection in autocommit mode.

        Raises:
            psycopg.OperationalError: the server does not respond, or rejects the user.
        """
        return psycopg.connect(self._conninfo, autocommit=True)

    def unreachable(self, error: psycopg.Error, remedy: str) -> StoreUnreachableError:
        """Return the error for the callers if there is no connection."""
        return StoreUnreachableError(f"The PostgreSQL store {self!r} cannot be reached: {reason(error)}. {remedy}")


@dataclass(slots=True)
class _Statement:
    """A frequent statement. The driver is fastest with the cursor that executed the same text before."""

    text: bytes
    free: list[Cursor] = field(default_factory=list[Cursor])


class Link(link.Link):
    """One connection in pipeline mode, for one partition. It belongs to the thread that opened it.

    With `keep_plans`, a statement is planned at most once a second, which halves the server's work for a writing
    script. Without it, a statement is planned each time for its values.
    """

    def __init__(self, place: Place, partition: str, *, keep_plans: bool) -> None:
        self._keep_plans = keep_plans
        self._planned = time.monotonic()
        with contextlib.ExitStack() as opening:
            db = opening.enter_context(contextlib.closing(place.connect()))
            self._render: Callable[[str], bytes] = lru_cache(maxsize=1024)(renderer(db, partition))
            super().__init__(db, POSTGRES, self._render)
            self.db: Database = db
            for setting in _SETTINGS:
                self.db.execute(setting.encode())
            kind = "generic" if keep_plans else "custom"
            self.db.execute(f"SET plan_cache_mode = force_{kind}_plan".encode())
            self.db.adapters.register_dumper(int, Int8Dumper)  # one type whatever the value: one prepared statement
            self.db.adapters.register_dumper(int, Int8BinaryDumper)
            self.db.prepare_threshold = 0
            self._pipeline = opening.enter_context(self.db.pipeline())
            self._cursor = self.db.cursor(binary=True)
            self._open = opening.pop_all()
        self._statements: dict[str, _Statement] = {}
        self._under_way: list[tuple[_Statement, Cursor]] = []

    def begin(self, options: str = "") -> None:
        """Begin a transaction without waiting. Earlier results of `send` become invalid."""
        for statement, cursor in self._under_way:
            statement.free.append(cursor)
        self._under_way.clear()
        if self._keep_plans and time.monotonic() - self._planned > _PLANS_KEPT_SECONDS:
            self.send("DISCARD PLANS")
            self._planned = time.monotonic()
        self.send(f"BEGIN{options}")

    def fetch(self, text: str, values: Sequence[object] = (), *, once: bool = False) -> list[Columns]:
        """Execute a statement, wait, and return its rows. Also raises the errors of statements sent before.

        `once`: the statement has many variants and is not prepared.
        """
        cursor = self._cursor.execute(self._render(text), values, prepare=False) if once else self.send(text, values)
        self.sync()  # and not only for its rows: so the server knows when it waits for us
        return cursor.fetchall()

    def send(self, text: str, values: Sequence[object] = ()) -> Cursor:
        """Execute a statement without waiting. The `rowcount` is valid after the next `sync`."""
        statement = self._statements.get(text)
        if statement is None:
            statement = self._statements[text] = _Statement(self._render(text))
        cursor = statement.free.pop() if statement.free else self.db.cursor(binary=True)
        self._under_way.append((statement, cursor))
        return cursor.execute(statement.text, values)

    def send_rollback(self, statement: str = "ROLLBACK") -> None:
        """Roll back without waiting; to a savepoint if the statement names one.

        After a rollback, the driver drops its prepared statements, although the server keeps them, and in pipeline mode
        also the next ones. It does so only while preparing is enabled.
        """
        self.db.prepare_threshold = None
        try:
            self.db.execute(statement.encode())
        finally:
            self.db.prepare_threshold = 0

    def sync(self) -> None:
        """Wait until all sent statements are complete; raise their error."""
        self._flush()
        self._pipeline.sync()

    def _flush(self) -> None:
        """Write everything to the socket. Otherwise the driver would wait for the response to a large value after
        sending only its first part."""
        connection = self.db.pgconn
        while connection.flush():
            with selectors.DefaultSelector() as selector:
                selector.register(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if any(events & selectors.EVENT_READ for _, events in selector.select()):
                    connection.consume_input()  # or neither side would go on reading

    def roll_back(self) -> bool:
        """Leave the transaction, after an error or without one; return False if the connection is unusable."""
        try:
            with contextlib.suppress(psycopg.Error):
                self._pipeline.sync()
            self.send_rollback()
            self._pipeline.sync()
        except psycopg.Error:
            return False
        return not self.lost

    @property
    def lost(self) -> bool:
        """True if the connection was closed by the server or lost."""
        return self.db.closed

    def close(self) -> None:
        """Close the connection. Calling it again does nothing."""
        self.db.close()
        with contextlib.suppress(psycopg.Error):  # the pipeline has no connection left to end on
            self._open.close()


def renderer(db: Database, partition: str) -> Callable[[str], bytes]:
    """Return a function that converts the statements of a partition to the SQL of this database."""
    literal = sql.Literal(partition).as_string(db).replace("%", "%%")
    return lambda text: POSTGRES.render(text, literal).encode(db.info.encoding)


def reason(error: psycopg.Error) -> str:
    """Return the message of an error on one line, without hints."""
    lines = (error.diag.message_primary or str(error)).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def passes(error: psycopg.Error) -> bool:
    """Return True if a retry of the script may succeed: after a deadlock, a lock timeout or a lost race."""
    return isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable))


def is_bad_value(error: psycopg.Error) -> bool:
    """Return True if a value of the caller cannot be stored: an id with a null byte, or too long for an index."""
    return isinstance(error, (psycopg.DataError, errors.ProgramLimitExceeded))
