"""The check of a partition in PostgreSQL, in one snapshot; see `sql/check.py`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import psycopg

from agentlightning.errors import ConflictError
from agentlightning.store.postgres.link import Place, renderer
from agentlightning.store.postgres.schema import check_version
from agentlightning.store.rules.durable import SCHEMA_VERSION, FileReport
from agentlightning.store.sql.check import problems
from agentlightning.store.sql.dialect import POSTGRES, Columns
from agentlightning.store.sql.link import Link


class _Reading(Link):
    """A link that holds only a few rows of a long answer in memory."""

    def each(self, text: str, values: Sequence[object] = ()) -> Iterator[Columns]:
        with self.db.cursor(name=f"check_{uuid.uuid4().hex}") as cursor:
            cursor.execute(self._render(text), values)
            yield from cursor


def check_partition(uri: str, partition: str) -> FileReport:
    """Check the data of the partition.

    Raises:
        ConflictError: there is no store, or one of a newer program.
        StoreUnreachableError: the server does not answer.
    """
    place = Place(uri)
    try:
        db = place.connect()
    except psycopg.OperationalError as error:
        raise place.unreachable(error, "Is the server running there?") from error
    with db, db.transaction():
        db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        version = check_version(db, repr(place))
        if version == 0:
            raise ConflictError(f"There is no store in {place!r}")
        link = _Reading(db, POSTGRES, renderer(db, partition))
        rollouts, spans = (
            link.fetch(f"SELECT count(*) FROM {table} WHERE @here")[0][0] for table in ("@rollouts", "@spans")
        )
        return FileReport.of(version, rollouts, spans, problems(link) if version == SCHEMA_VERSION else iter(()))
