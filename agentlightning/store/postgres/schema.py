"""The tables of the PostgreSQL store, and the upgrade of the tables of an earlier version.

Each version adds an entry to `STEPS`; the table `agl_schema` contains the version of a database (see
`rules/durable.py`). Several stores (partitions) use the same tables: the partition is the first column of every key.
Needs PostgreSQL 13 (xid8).
"""

from __future__ import annotations

from collections.abc import Callable

from agentlightning.store.postgres.link import Database, renderer
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer
from agentlightning.store.sql.dialect import POSTGRES
from agentlightning.store.sql.link import Link
from agentlightning.store.sql.summaries import add_all

_LOCK = 0x61676C5F73746F72
"""Number of the advisory lock for creating and changing tables (the text "agl_stor")."""

_FIRST = """
CREATE TABLE agl_rollouts (
    partition text COLLATE "C" NOT NULL,
    number bigint GENERATED ALWAYS AS IDENTITY,
    rollout_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",
    status text COLLATE "C" NOT NULL,
    start_time double precision NOT NULL,
    end_time double precision NOT NULL,
    priority bigint NOT NULL,
    available_at double precision,
    deadline double precision,
    worker_id text COLLATE "C",
    attempt_id text COLLATE "C",
    attempts bigint NOT NULL,
    span_count bigint NOT NULL,
    span_bytes bigint NOT NULL,
    change xid8 NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (partition, rollout_id)
);
CREATE UNIQUE INDEX agl_rollouts_number ON agl_rollouts (partition, number);
CREATE INDEX agl_rollouts_queue ON agl_rollouts (partition, run_id, priority DESC, available_at, number)
    WHERE available_at IS NOT NULL;
CREATE INDEX agl_rollouts_deadline ON agl_rollouts (partition, deadline) WHERE deadline IS NOT NULL;
CREATE INDEX agl_rollouts_worker ON agl_rollouts (partition, worker_id, number) WHERE worker_id IS NOT NULL;
CREATE INDEX agl_rollouts_status ON agl_rollouts (partition, status, start_time, number);
CREATE INDEX agl_rollouts_run ON agl_rollouts (partition, run_id, start_time, number);
CREATE INDEX agl_rollouts_end ON agl_rollouts (partition, run_id, end_time, number);
CREATE INDEX agl_rollouts_change ON agl_rollouts (partition, change, number);
CREATE TABLE agl_spans (
    partition text COLLATE "C" NOT NULL,
    number bigint GENERATED ALWAYS AS IDENTITY,
    rollout_id text COLLATE "C" NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    span_id text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (partition, rollout_id, attempt_id, span_id)
);
CREATE TABLE agl_rows (
    partition text COLLATE "C" NOT NULL,
    number bigint GENERATED ALWAYS AS IDENTITY,
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (partition, kind, key)
);
CREATE INDEX agl_rows_number ON agl_rows (partition, kind, number)
"""
"""A rollout that has not ended has the end infinity, so that an index orders it last. `change` is the transaction that
wrote the row last; `version` is the number of changes of a row."""

_FOURTH = """
CREATE TABLE agl_run_records (
    partition text COLLATE "C" NOT NULL,
    number bigint GENERATED ALWAYS AS IDENTITY,
    run_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    step bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    size bigint NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (partition, run_id, kind, step, name)
);
CREATE UNIQUE INDEX agl_run_records_number ON agl_run_records (partition, number);
CREATE INDEX agl_run_records_step ON agl_run_records (partition, run_id, step, number) INCLUDE (kind, size);
CREATE INDEX agl_run_records_kind ON agl_run_records (partition, run_id, kind, step, number) INCLUDE (size);
CREATE INDEX agl_run_records_name ON agl_run_records (partition, run_id, name, step, number);
ALTER TABLE agl_rows ADD COLUMN change xid8;
CREATE INDEX agl_rows_change ON agl_rows (partition, change, number) WHERE change IS NOT NULL
"""
"""`change` is set for the row of a run, as for a rollout."""

_FIFTH = """
CREATE TABLE agl_summaries (
    partition text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    rollout_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C",
    status text COLLATE "C" NOT NULL,
    mode text COLLATE "C",
    step bigint,
    task text COLLATE "C",
    sample bigint,
    start_time double precision NOT NULL,
    end_time double precision,
    resources_id text COLLATE "C",
    resources_version bigint,
    attempts bigint NOT NULL,
    attempt_id text COLLATE "C",
    attempt_status text COLLATE "C",
    worker_id text COLLATE "C",
    outcome text COLLATE "C",
    outcome_reason text COLLATE "C",
    error_type text COLLATE "C",
    reward double precision,
    rewards text COLLATE "C",
    PRIMARY KEY (partition, rollout_id)
) WITH (fillfactor = 80);
CREATE INDEX agl_summaries_step ON agl_summaries (partition, run_id, step);
CREATE INDEX agl_summaries_start ON agl_summaries (partition, start_time, number);
CREATE TABLE agl_inputs (
    partition text COLLATE "C" NOT NULL,
    rollout_id text COLLATE "C" NOT NULL,
    preview text COLLATE "C" NOT NULL,
    searched text COLLATE "C" NOT NULL,
    PRIMARY KEY (partition, rollout_id)
)
"""
"""No index has a column that changes often, so that a changed row is written next to the old one (HOT)."""


def _begin(db: Database) -> None:
    db.execute(_FIRST.encode())


def _add_runs(db: Database) -> None:
    db.execute(_FOURTH.encode())


def _add_summaries(db: Database) -> None:
    db.execute(_FIFTH.encode())
    for (partition,) in db.execute("SELECT DISTINCT partition FROM agl_rollouts").fetchall():
        with db.cursor(name="upgraded", binary=True) as rollouts:
            rollouts.execute(
                b"SELECT rollout_id, body FROM agl_rollouts WHERE partition = %s ORDER BY number", (partition,)
            )
            add_all(Link(db, POSTGRES, renderer(db, partition)), rollouts)


STEPS: list[tuple[int, Callable[[Database], None]]] = [
    (1, _begin),
    (3, lambda db: None),
    (4, _add_runs),
    (5, _add_summaries),
]
"""The upgrade steps, each from one version to the next."""

OTHER_VERSION = "SELECT version FROM agl_schema WHERE version <> %s"
"""Returns no row if the tables have this version. It is sent after the writes of a transaction, which wait for an
upgrade in progress. A later upgrade waits for the end of the transaction."""


def prepare(db: Database, place: str, partition: str) -> None:
    """Create the tables in a new database, or upgrade the tables of an older version, in one transaction.

    `place` names the database in errors; `db` is in autocommit mode. Several processes can do this concurrently.

    Raises:
        ConflictError: a newer version created the tables.
    """
    if check_version(db, place) < SCHEMA_VERSION:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            db.execute("CREATE TABLE IF NOT EXISTS agl_schema (version bigint NOT NULL)")
            version = check_version(db, place)
            if 0 < version < SCHEMA_VERSION:
                db.execute("LOCK TABLE agl_rollouts, agl_spans, agl_rows")
            for number, step in STEPS:
                if number > version:
                    step(db)
            db.execute("DELETE FROM agl_schema")
            db.execute("INSERT INTO agl_schema VALUES (%s)", (SCHEMA_VERSION,))
    # A dump loaded into another server may have transaction numbers that are still in the future there.
    for table in ("agl_rollouts", "agl_rows"):
        db.execute(
            f"UPDATE {table} SET change = pg_current_xact_id()"
            " WHERE partition = %s AND change >= pg_snapshot_xmax(pg_current_snapshot())".encode(),
            (partition,),
        )


def check_version(db: Database, place: str) -> int:
    """Return the version of the tables; 0 if there are none.

    Raises:
        ConflictError: a newer version created the tables.
    """
    if db.execute("SELECT to_regclass('agl_schema') IS NULL").fetchone() == (True,):
        return 0
    row = db.execute("SELECT max(version) FROM agl_schema").fetchone()
    version: int = row[0] or 0 if row else 0
    check_not_newer(place, version)
    return version
