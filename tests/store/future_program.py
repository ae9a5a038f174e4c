"""The program that comes after this one, as a process: `python -m tests.store.future_program SPEC [KILLED_AT]`.

Its schema version is one higher, with a step that changes tables, rows and indexes on every backend. It opens the store
and prints its version and what it answers, unless it is to be killed (by itself, SIGKILL) at one of the `POINTS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any
from unittest import mock

from agentlightning.store.base import LightningStore
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.rules import durable
from agentlightning.store.spec import store_from_spec
from tests.fixtures.stores import story

VERSION = durable.SCHEMA_VERSION + 1
POINTS = (0, 1, 2, 3)
"""Before the first change, between two, after the last."""


def main(spec: str, killed_at: int | None) -> None:
    """Become the future program and open a store."""
    durable.SCHEMA_VERSION = VERSION  # type: ignore[misc]
    _install(spec.partition(":")[0].removesuffix("ql"), killed_at)
    print(json.dumps(asyncio.run(_ask(spec))))


async def _ask(spec: str) -> Any:
    with mock.patch.object(SharedClock, "set"), mock.patch("time.time", return_value=story.NOW):
        store: LightningStore = store_from_spec(spec)
        answers = await story.answers(store)
        await store.close()
    return answers


def _install(kind: str, killed_at: int | None) -> None:
    def point(number: int) -> None:
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "sqlite":
        from agentlightning.store.sqlite import schema as of_sqlite

        of_sqlite.SCHEMA_VERSION = VERSION  # type: ignore[attr-defined]
        of_sqlite.STEPS.append((VERSION, lambda db: _change_tables(db.execute, "rollouts", point)))
    elif kind == "postgres":
        from agentlightning.store.postgres import schema as of_postgres
        from agentlightning.store.postgres import store

        of_postgres.SCHEMA_VERSION = store.SCHEMA_VERSION = VERSION  # type: ignore[attr-defined]
        of_postgres.STEPS.append((VERSION, lambda db: _change_tables(db.execute, "agl_rollouts", point)))
    else:
        from agentlightning.store.mongo import schema as of_mongo

        of_mongo.SCHEMA_VERSION = VERSION  # type: ignore[attr-defined]
        of_mongo.STEPS.append((VERSION, lambda database: _change_documents(database, point)))


def _change_tables(execute: Any, table: str, point: Any) -> None:
    point(0)
    execute(f"ALTER TABLE {table} ADD COLUMN words text")
    point(1)
    execute(f"UPDATE {table} SET words = status || ' ' || rollout_id, attempts = attempts + 0")
    point(2)
    execute(f"CREATE INDEX future_words ON {table} (words)")
    point(3)


def _change_documents(database: Any, point: Any) -> None:
    point(0)
    for number, document in enumerate(database["agl_rollouts"].find({"words": {"$exists": False}})):
        words = f"{document['status']} {document['rollout_id']}"
        database["agl_rollouts"].update_one({"_id": document["_id"]}, {"$set": {"words": words}})
        if number == 2:
            point(1)
    point(2)
    database["agl_rollouts"].create_index([("words", 1)], name="future_words")
    point(3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
