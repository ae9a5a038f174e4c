"""`agl rollouts retry`, `cancel` and `export`: change rollouts by hand, or take them elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.cli.support.output import say
from agentlightning.cli.support.store_access import STORE, existing_rollout, with_store
from agentlightning.private_files import open_private
from agentlightning.terminal import json_text

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import Rollout, RolloutStatus

_IDS = typer.Argument(metavar="ID...", help="Which rollouts.")
_ANY_IDS = typer.Argument(None, metavar="ID...", help="Which rollouts.")
_PAGE = 100


class Form(StrEnum):
    """What a line of an export holds."""

    RECORDS = "records"
    """A rollout with its attempts and spans."""
    MESSAGES = "messages"
    """One model call as OpenAI chat messages with its tools, the reward and the ids."""


def retry(ids: list[str] = _IDS, store: str = STORE) -> int:
    """Put rollouts that have ended back into the queue of their run, for one more attempt.

    Exit code 1 if one has not ended. Example: agl rollouts retry ro-1a2b3c ro-4d5e6f --store http://127.0.0.1:4747
    """
    return with_store(store, lambda opened: _set_each(opened, ids, store, "requeuing"))


def cancel(
    ids: list[str] = _ANY_IDS,
    run: str | None = typer.Option(None, help="All rollouts of this run that have not ended."),
    store: str = STORE,
) -> int:
    """Cancel rollouts: a queued one is not claimed, the result of a running one does not count.

    Exit code 1 if one has ended already. Example: agl rollouts cancel ro-1a2b3c --store http://127.0.0.1:4747
    """
    from agentlightning.errors import BadRequestError

    if bool(ids) == (run is not None):
        raise BadRequestError("Say which rollouts: their ids, or --run RUN_ID for all of a run that are open; not both")

    async def cancel_each(opened: LightningStore) -> int:
        from agentlightning.store.base import QUEUING, RUNNING

        if run is None:
            return await _set_each(opened, ids, store, "cancelled")
        page = await opened.query_rollouts(run_id=run, status_in=sorted(QUEUING | RUNNING))
        return await _set_each(opened, [rollout.rollout_id for rollout in page], store, "cancelled")

    return with_store(store, cancel_each)


def export(
    store: str = STORE,
    out: Path | None = typer.Option(None, help="File to write; the standard output by default."),
    form: Form = typer.Option(Form.RECORDS, "--format", help="records: everything; messages: a chat for each call."),
    status: list[str] = typer.Option([], help="Only those with this status; may be repeated."),
    run: str | None = typer.Option(None, help="Only those of this run."),
) -> int:
    """Write rollouts as JSON Lines, the oldest first. API keys are not in it.

    Example: agl rollouts export --store run.db --status succeeded --format messages --out chats.jsonl
    """
    written = with_store(store, lambda opened: _export(opened, out, form, status, run))
    say(f"{written} lines", to_stderr=True)
    return 0


# --- changes ---------------------------------------------------------------------------------------------------------


async def _set_each(store: LightningStore, ids: list[str], place: str, status: RolloutStatus) -> int:
    """Set the status of each rollout that allows it, tell what was done, and return the exit code."""
    from agentlightning.store.base import is_finished

    found = [await existing_rollout(store, rollout_id, place) for rollout_id in ids]
    refused = 0
    for rollout in found:
        if is_finished(rollout) == (status == "requeuing"):
            changed = await store.update_rollout(rollout.rollout_id, status=status)
            say(f"{changed.rollout_id}: {rollout.status} -> {changed.status}")
        else:
            refused += 1
            why = "has ended already" if is_finished(rollout) else "has not ended; cancel it first"
            say(f"{rollout.rollout_id}: {rollout.status}, unchanged: it {why}", to_stderr=True)
    return 1 if refused else 0


# --- export ----------------------------------------------------------------------------------------------------------


async def _export(store: LightningStore, out: Path | None, form: Form, status: list[str], run: str | None) -> int:
    from pydantic_core import to_jsonable_python

    written = 0
    with nullcontext(sys.stdout) if out is None else open_private(out, "w") as file:
        async for rollout in _pages(store, status, run):
            for record in await _records(store, rollout, form):
                file.write(json_text(json.dumps(to_jsonable_python(record), ensure_ascii=False)) + "\n")
                written += 1
    return written


async def _pages(store: LightningStore, status: list[str], run: str | None) -> AsyncIterator[Rollout]:
    filters: dict[str, Any] = {"status_in": status or None} | ({} if run is None else {"run_id": run})
    offset = 0
    while True:
        page = await store.query_rollouts(**filters, sort_by="start_time", limit=_PAGE, offset=offset)
        for rollout in page:
            yield rollout
        offset += len(page)
        if len(page) < _PAGE:
            return


async def _records(store: LightningStore, rollout: Rollout, form: Form) -> list[dict[str, object]]:
    from agentlightning.adapter.messages import TraceToMessages
    from agentlightning.algorithm.collect import evidence
    from agentlightning.store.http.redaction import hide_secrets
    from agentlightning.types import PaginatedResult

    found = await evidence(store, rollout)
    if form is Form.RECORDS:
        page = PaginatedResult(items=found.spans, limit=-1, offset=0, total=len(found.spans))
        spans = list(hide_secrets("query_spans", page))
        return [{"rollout": found.rollout, "attempts": found.attempts, "spans": spans}]
    about = {"rollout_id": rollout.rollout_id, "reward": found.reward}
    return [{**about, **call} for call in TraceToMessages().adapt(found.counted)]
