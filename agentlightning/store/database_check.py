"""The check of a store in a database: decodes every record of one partition and lists those that cannot be read.

The structure of the database is its own server's matter. Nothing is changed, and no older tables are upgraded.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from agentlightning.errors import DamagedRecordError
from agentlightning.store.rules.durable import Stored, check_not_newer, read_record, read_row
from agentlightning.store.rules.tx import KINDS
from agentlightning.store.spec import database_of, public_form
from agentlightning.store.sqlite.check import FileReport
from agentlightning.types import RunRecord, Span


def check_database(spec: str) -> FileReport:
    """Decode every record of a store in PostgreSQL or MongoDB.

    Raises:
        ConflictError: a newer program wrote it.
        StoreUnreachableError: the server does not answer.
    """
    if spec.startswith("postgres"):
        from agentlightning.store.postgres.check import read_all
    else:
        from agentlightning.store.mongo.check import read_all
    with read_all(*database_of(spec)) as stored:
        check_not_newer(public_form(spec), stored.version)
        return FileReport.of(stored.version, stored.rollout_count, stored.span_count, _problems(stored))


def _problems(stored: Stored) -> Iterator[str]:
    for rollout_id, body, in_short in stored.rollouts:
        try:
            record = read_record(body, rollout_id)
            if stored.in_short is not None and in_short != stored.in_short(record):
                yield f"rollout {rollout_id}: what is kept of it in short is not what its record says"
        except DamagedRecordError as error:
            removal = f"store.delete_rollouts(rollout_ids=[{rollout_id!r}], force=True)"
            yield f"rollout {rollout_id}: its record cannot be read: {_reason(error)}. Remove it: {removal}"
    for span_id, removal, body in stored.spans:
        try:
            Span.model_validate_json(body)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            yield f"span {span_id} cannot be read: {reason}. Remove its rollout, or it alone: {removal}"
    for name, removal, body in stored.rows:
        kind, _, key = name.partition(" ")
        try:
            if kind in KINDS:
                read_row(kind, key, body)
        except DamagedRecordError as error:
            yield f"the row {key!r} of kind {kind!r} cannot be read: {_reason(error)}. Remove it: {removal}"
    for name, removal, body in stored.run_records:
        try:
            RunRecord.model_validate_json(body)
        except ValidationError as error:
            yield f"{name} cannot be read: {error.errors()[0]['msg']}. Remove it: {removal}"


def _reason(error: DamagedRecordError) -> str:
    return str(error).partition(". This is damage")[0].partition("cannot be read: ")[2] or str(error)
