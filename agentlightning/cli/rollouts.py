"""`agl rollouts`: show, retry, cancel and export the rollouts of a store."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.base.private_files import open_private
from agentlightning.base.terminal import counted, cut, json_text
from agentlightning.cli.output import (
    JSON,
    STORE,
    existing_rollout,
    moment,
    number,
    say,
    shortened,
    show_json,
    show_table,
    with_store,
)
from agentlightning.store.cursors import pages_of

if TYPE_CHECKING:
    from agentlightning.adapter.messages import Message
    from agentlightning.store.base import LightningStore
    from agentlightning.training.rollouts import Evidence
    from agentlightning.types import Attempt, AttemptedRollout, Rollout, RolloutStatus, Span

_ID = typer.Argument(metavar="ID", help="Id of the rollout")
_IDS = typer.Argument(metavar="ID...", help="Ids of the rollouts")
_ANY_IDS = typer.Argument(None, metavar="ID...", help="Ids of the rollouts")
_PAGE = 100
_MOST_CONTENT = 1_000
"""Maximum number of characters of a span's content, before it is cut to the width of the output."""
_NO_CONTENT = ("object.type", "exception.message", "exception.stacktrace", "exception.escaped")
_REWARD = re.compile(r"reward\.\d+\.(name|value)$")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def rollouts() -> None:
    """Show, explain, retry, cancel and export rollouts.

    Example: agl rollouts explain ro-1a2b3c --store runs/20260101-120000
    """


@app.command("pairs")
def pairs(
    out: Path = typer.Option(..., help="New JSON Lines file to write"),
    margin: float = typer.Option(0.0, help="Minimum difference between the rewards of a pair, exclusive"),
    store: str = STORE,
) -> None:
    """Write the best and the worst rollout of each task as a preference pair in TRL's format.

    The fields are prompt, chosen, rejected and tools. Rollouts that failed or have no reward are excluded. Prints the
    number of excluded rollouts by reason.

    Example: agl rollouts pairs --out pairs.jsonl --margin 0.5 --store runs/20260101-120000
    """
    from agentlightning.training.preferences import preference_pairs, write_pairs

    result = with_store(store, lambda connection: preference_pairs(connection, margin=margin))
    write_pairs(result, out)
    reasons = ", ".join(f"{count} {reason}" for reason, count in result.excluded.most_common()) or "nothing"
    say(f"{out}: {counted(len(result.pairs), 'pair')}; excluded: {reasons}")


@app.command("retry")
def retry(ids: list[str] = _IDS, store: str = STORE) -> int:
    """Requeue rollouts that have ended, for one more attempt in their run.

    Exit code 1 if one of them has not ended. Example: agl rollouts retry ro-1a2b3c ro-4d5e6f --store http://127.0.0.1:4747
    """
    return with_store(store, lambda connection: _set_each(connection, ids, store, "requeuing"))


@app.command("cancel")
def cancel(
    ids: list[str] = _ANY_IDS,
    run: str | None = typer.Option(None, help="Cancel all rollouts of this run that have not ended"),
    store: str = STORE,
) -> int:
    """Cancel rollouts. Queued rollouts are not claimed, and results of running rollouts are ignored.

    Exit code 1 if one of them has already ended. Example: agl rollouts cancel ro-1a2b3c --store http://127.0.0.1:4747
    """
    from agentlightning.errors import BadRequestError

    if bool(ids) == (run is not None):
        raise BadRequestError("Name either rollout ids, or --run RUN_ID to cancel all rollouts of a run")

    async def cancel_each(connection: LightningStore) -> int:
        from agentlightning.store.base import QUEUING, RUNNING

        if run is None:
            return await _set_each(connection, ids, store, "cancelled")
        page = await connection.query_rollouts(run_id=run, status_in=sorted(QUEUING | RUNNING))
        return await _set_each(connection, [rollout.rollout_id for rollout in page], store, "cancelled")

    return with_store(store, cancel_each)


async def _set_each(store: LightningStore, ids: list[str], place: str, status: RolloutStatus) -> int:
    """Set the status of each rollout that allows it, print the changes, and return the exit code."""
    from agentlightning.store.base import is_finished

    rollouts = [await existing_rollout(store, rollout_id, place) for rollout_id in ids]
    refusals = 0
    for rollout in rollouts:
        if is_finished(rollout) == (status == "requeuing"):
            update = await store.update_rollout(rollout.rollout_id, status=status)
            say(f"{update.rollout_id}: {rollout.status} -> {update.status}")
        else:
            refusals += 1
            why = "it has already ended" if is_finished(rollout) else "it has not ended. Cancel it first"
            say(f"{rollout.rollout_id}: {rollout.status}, unchanged: {why}", to_stderr=True)
    return 1 if refusals else 0


class Form(StrEnum):
    """Content of each line of an export."""

    RECORDS = "records"
    """A rollout with its attempts and spans."""
    MESSAGES = "messages"
    """One model call as OpenAI chat messages with its tools, the reward and the ids."""


@app.command("export")
def export(
    store: str = STORE,
    out: Path | None = typer.Option(None, help="File to write; standard output by default"),
    form: Form = typer.Option(Form.RECORDS, "--format", help="records: all data; messages: one chat per model call"),
    status: list[str] = typer.Option([], help="Only rollouts with this status; may be repeated"),
    run: str | None = typer.Option(None, help="Only rollouts of this run"),
) -> None:
    """Write rollouts as JSON Lines without API keys, oldest first.

    Example: agl rollouts export --store run.db --status succeeded --format messages --out c.jsonl
    """
    count = with_store(store, lambda connection: _export(connection, out, form, status, run))
    say(counted(count, "line"), to_stderr=True)


async def _export(store: LightningStore, out: Path | None, form: Form, status: list[str], run: str | None) -> int:
    from pydantic_core import to_jsonable_python

    filters = _filters(status, run)
    count = 0
    with nullcontext(sys.stdout) if out is None else open_private(out, "w") as file:
        async for page in pages_of(store.query_rollouts, **filters, sort_by="start_time", limit=_PAGE):
            for rollout in page:
                for record in await _records(store, rollout, form):
                    file.write(json_text(json.dumps(to_jsonable_python(record), ensure_ascii=False)) + "\n")
                    count += 1
    return count


async def _records(store: LightningStore, rollout: Rollout, form: Form) -> list[dict[str, object]]:
    from agentlightning.adapter.messages import TraceToMessages
    from agentlightning.store.http.redaction import hidden
    from agentlightning.training.rollouts import evidence

    rollout_data = await evidence(store, rollout)
    if form is Form.RECORDS:
        parts = {"rollout": rollout_data.rollout, "attempts": rollout_data.attempts, "spans": rollout_data.spans}
        return [{name: hidden(part) for name, part in parts.items()}]
    about = {"rollout_id": rollout.rollout_id, "reward": rollout_data.reward}
    return [{**about, **call} for call in TraceToMessages().adapt(rollout_data.counted)]


@app.command("list")
def list_rollouts(
    store: str = STORE,
    status: list[str] = typer.Option([], help="Only rollouts with this status; may be repeated"),
    contains: str | None = typer.Option(None, help="Only rollouts with this text in their id"),
    run: str | None = typer.Option(None, help="Only rollouts of this run"),
    limit: int = typer.Option(100, min=1, help="Maximum number of rollouts"),
    as_json: bool = JSON,
) -> None:
    """Show rollouts, newest first.

    Example: agl rollouts list --store run.db --status failed
    """
    from agentlightning.store.http.redaction import hidden

    filters = _filters(status, run) | {"rollout_id_contains": contains}
    shown: list[AttemptedRollout | Rollout] = hidden(
        with_store(store, lambda connection: _newest(connection, filters, limit))
    )
    if as_json:
        show_json(shown)
        return
    header = ("rollout", "status", "mode", "last attempt", "reward", "run", "started", "input")
    show_table(header, [_line(each) for each in shown])
    say(counted(len(shown), "rollout"))


async def _newest(store: LightningStore, filters: dict[str, Any], limit: int) -> Sequence[AttemptedRollout | Rollout]:
    """Return the newest rollouts. Summaries order rollouts that were enqueued together; `query_rollouts` does not."""
    from agentlightning.store.rules.query import check_choices
    from agentlightning.store.summaries.plan import LARGEST_PAGE, filter_of
    from agentlightning.types.core import AnyRolloutStatus

    check_choices("status_in", filters["status_in"], AnyRolloutStatus)
    chosen = filter_of({name: value for name, value in filters.items() if value is not None})
    ids: list[str] = []
    async for page in pages_of(store.query_rollout_summaries, filter=chosen, limit=min(limit, LARGEST_PAGE)):
        ids += [summary.rollout_id for summary in page]
        if len(ids) >= limit:
            break
    rollouts = {each.rollout_id: each for each in await store.query_rollouts(rollout_id_in=ids[:limit])}
    return [rollouts[rollout_id] for rollout_id in ids[:limit] if rollout_id in rollouts]


@app.command("show")
def show(
    rollout_id: str = _ID,
    store: str = STORE,
    attempt: str | None = typer.Option(None, help="Id of the attempt; the latest by default"),
    spans: bool = typer.Option(False, "--spans", help="Also list every span and what the agent emitted"),
    as_json: bool = JSON,
) -> None:
    """Show the task and attempts of a rollout, and the conversation between agent and model.

    Exit code 2 if the rollout or attempt does not exist. Example: agl rollouts show ro-1a2b3c --store run.db
    """
    from agentlightning.store.http.redaction import hidden

    rollout_data = with_store(store, lambda connection: _evidence(connection, rollout_id, store))
    own = _spans_of(rollout_data, attempt)
    conversation = conversation_of(own)
    if as_json:
        head = {"rollout": rollout_data.rollout, "attempts": rollout_data.attempts, "reward": rollout_data.reward}
        show_json({**head, "messages": conversation, **({"spans": hidden(own)} if spans else {})})
        return
    for line in _story(rollout_data, rollout_data.reward):
        say(line, lines=True)
    for each in rollout_data.attempts:
        if each.error is not None and each.error.traceback:
            say(f"--- {each.attempt_id}: traceback\n{each.error.traceback.rstrip()}", lines=True)
    say(f"task: {rollout_data.rollout.input}", lines=True)
    for index, messages in enumerate(conversation, start=1):
        say(f"--- model call {index}", lines=True)
        for text in texts_of(messages):
            say(text, lines=True)
    if spans:
        table: list[tuple[str, ...]] = []
        for span in hidden(own):
            begin, end = span.start_time, span.end_time
            seconds = "-" if begin is None or end is None else f"{end - begin:.3f}"
            status = f"{span.status.status_code} {span.status.description or ''}".strip()
            table.append((str(span.sequence_id), span.name, status, seconds, _content(span)))
        show_table(("span", "name", "status", "seconds", "content"), table, cut_last=True)


@app.command("explain")
def explain(rollout_id: str = _ID, store: str = STORE, as_json: bool = JSON) -> None:
    """Show each model call of a rollout with its recorder, and with its training row or the reason why it has none.

    The reasons are those of the training ledger, for the default adapter. Exit code 2 if the rollout does not exist.

    Example: agl rollouts explain ro-1a2b3c --store run.db
    """
    from agentlightning.adapter.explain import HEADER
    from agentlightning.store.http.redaction import hidden
    from agentlightning.training.ledger import read_rollout

    async def ask(connection: LightningStore) -> tuple[Evidence, str | None]:
        source = await _evidence(connection, rollout_id, store)
        run = None
        with suppress(NotImplementedError):  # of a user's store that has no runs
            run = await connection.get_run_by_id(source.rollout.run_id or "")
        return source, run and run.algorithm

    rollout_data, algorithm = with_store(store, ask)
    record = read_rollout(rollout_data.rollout, rollout_data.attempts, rollout_data.spans)
    explanation = record.explain()
    cells = [tuple(map(hidden, each.cells())) for each in explanation.calls]
    words: str = hidden(explanation.words(rollout_data.rollout.mode, algorithm))
    if as_json:
        calls = [dict(zip(HEADER, line, strict=True)) for line in cells]
        head = {"rollout_id": rollout_id, "status": rollout_data.rollout.status, "reward": record.reward}
        show_json({**head, "attempts": rollout_data.attempts, "calls": calls, "summary": words})
        return
    for line in _story(rollout_data, record.reward):
        say(line, lines=True)
    if cells:
        show_table(HEADER, cells)
    say(words, lines=True)


def _filters(status: list[str], run: str | None) -> dict[str, Any]:
    return {"status_in": status or None} | ({} if run is None else {"run_id": run})


async def _evidence(store: LightningStore, rollout_id: str, place: str) -> Evidence:
    """Return a rollout with secrets hidden. Its spans are unchanged, because calls are read from them."""
    from agentlightning.store.http.redaction import hidden
    from agentlightning.training.rollouts import evidence

    source = await evidence(store, await existing_rollout(store, rollout_id, place))
    return replace(source, rollout=hidden(source.rollout), attempts=hidden(source.attempts))


def _spans_of(source: Evidence, attempt_id: str | None) -> Sequence[Span]:
    from agentlightning.errors import NotFoundError

    ids = [attempt.attempt_id for attempt in source.attempts]
    if attempt_id is None:
        return source.counted
    if attempt_id not in ids:
        raise NotFoundError(
            f"Rollout {source.rollout.rollout_id!r} has no attempt {attempt_id!r}; it has: {', '.join(ids) or 'none'}"
        )
    return sorted((s for s in source.spans if s.attempt_id == attempt_id), key=lambda span: span.sequence_id)


def conversation_of(spans: Sequence[Span]) -> list[list[Message]]:
    """Return for each model call, in order, the messages that are not part of earlier calls."""
    from agentlightning.adapter.messages import TraceToMessages

    shown: list[Message] = []
    parts: list[list[Message]] = []
    for call in TraceToMessages().adapt(spans):
        messages = call["messages"]
        goes_on = bool(shown) and messages[: len(shown)] == shown
        parts.append(messages[len(shown) :] if goes_on else messages)
        shown = messages
    return parts


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """Yield a text for each content and each tool call of the messages, with the role."""
    for message in messages:
        if content := message.get("content"):
            yield f"{message['role']}: {_text(content)}"
        for call in message.get("tool_calls") or ():
            yield f"{message['role']} calls {call['function']['name']}({call['function']['arguments']})"


def _text(content: str | Sequence[Mapping[str, object]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def _content(span: Span) -> str:
    """Return what the agent emitted with this span: message, object, exception, rewards, attributes; else nothing."""
    from agentlightning.emitter import get_rewards_from_span
    from agentlightning.semconv import AGL_ANNOTATION, AGL_EXCEPTION, AGL_MESSAGE, AGL_OBJECT

    rewards = get_rewards_from_span(span)
    if not rewards and span.name not in (AGL_ANNOTATION, AGL_EXCEPTION, AGL_MESSAGE, AGL_OBJECT):
        return ""
    parts = [f"reward {reward.name}={number(reward.value)}" for reward in rewards]
    for key, value in span.attributes.items():
        name = key.removeprefix("agentlightning.")
        if name in ("message.body", "object.literal", "object.json"):
            parts.append(str(value))
        elif name == "exception.type":
            parts.append(f"{value}: {span.attributes.get('exception.message', '')}")
        elif name not in _NO_CONTENT and not _REWARD.match(name):
            parts.append(f"{name}={value}")
    return cut(", ".join(parts), _MOST_CONTENT)


def _story(rollout_data: Evidence, reward: float | None) -> list[str]:
    from agentlightning.tracer.scope import spans_left_out

    rollout = rollout_data.rollout
    lines = [f"rollout {rollout.rollout_id}: {rollout.status}, mode {rollout.mode or '-'}, reward {number(reward)}"]
    for attempt in rollout_data.attempts:
        error = f", {attempt.error.type}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt {attempt.attempt_id}: {end_of(attempt)}{error}")
        if missing := spans_left_out([span for span in rollout_data.spans if span.attempt_id == attempt.attempt_id]):
            missed = counted(missing, "span")
            lines.append(f"  {missed} not kept: an attempt keeps at most 20,000 spans, and its rewards")
    return lines


def end_of(attempt: Attempt) -> str:
    """Return the status, outcome and reason of an attempt."""
    return " ".join(filter(None, (attempt.status, attempt.outcome, attempt.outcome_reason)))


def _line(rollout: AttemptedRollout | Rollout) -> tuple[str, ...]:
    from agentlightning.training.ledger import attempt_verdict
    from agentlightning.types import AttemptedRollout

    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    reward = None if attempt is None or attempt_verdict(attempt) is not None else attempt.reward  # as in `show`
    return (
        rollout.rollout_id,
        rollout.status,
        rollout.mode or "-",
        "-" if attempt is None else end_of(attempt),
        number(reward),
        rollout.run_id or "-",
        moment(rollout.start_time),
        shortened(rollout.input),
    )
