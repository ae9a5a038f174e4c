"""`agl rollouts`: look at what a store holds of rollouts. What changes them is in `rollout_changes.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.cli import rollouts_change as rollout_changes
from agentlightning.cli.support.output import JSON, moment, number, say, shortened, show_json, show_table
from agentlightning.cli.support.store_access import STORE, existing_rollout, with_store

if TYPE_CHECKING:
    from agentlightning.adapter.messages import Message
    from agentlightning.algorithm.collect import Evidence
    from agentlightning.store.base import LightningStore
    from agentlightning.types import Attempt, AttemptedRollout, Rollout, Span

_ID = typer.Argument(metavar="ID", help="Which rollout.")

app = typer.Typer(no_args_is_help=True)
app.command("retry")(rollout_changes.retry)
app.command("cancel")(rollout_changes.cancel)
app.command("export")(rollout_changes.export)


@app.callback()
def rollouts() -> None:
    """Look at rollouts and at what became of their model calls; try them again, cancel them, export them.

    Example: agl rollouts explain ro-1a2b3c --store runs/20260101-120000
    """


@app.command("list")
def list_rollouts(
    store: str = STORE,
    status: list[str] = typer.Option([], help="Only those with this status; may be repeated."),
    contains: str | None = typer.Option(None, help="Only those whose id contains this."),
    run: str | None = typer.Option(None, help="Only those of this run."),
    limit: int = typer.Option(100, min=1, help="At most so many, the newest."),
    as_json: bool = JSON,
) -> int:
    """Show rollouts, the newest first.

    Example: agl rollouts list --store run.db --status failed
    """
    filters: dict[str, Any] = {"status_in": status or None} | ({} if run is None else {"run_id": run})
    found = list(
        with_store(
            store,
            lambda opened: opened.query_rollouts(
                **filters, rollout_id_contains=contains, sort_by="start_time", sort_order="desc", limit=limit
            ),
        )
    )
    if as_json:
        show_json(found)
        return 0
    show_table(
        ("rollout", "status", "mode", "attempts end", "run", "started", "input"), [_line(each) for each in found]
    )
    say(f"{len(found)} rollouts")
    return 0


@app.command("show")
def show(
    rollout_id: str = _ID,
    store: str = STORE,
    attempt: str | None = typer.Option(None, help="Of which attempt; the latest one by default."),
    spans: bool = typer.Option(False, "--spans", help="List every span as well."),
    as_json: bool = JSON,
) -> int:
    """Show a rollout: its task, its attempts, and what agent and model said to each other.

    Exit code 2 if there is no such rollout or attempt. Example: agl rollouts show ro-1a2b3c --store run.db
    """
    found = with_store(store, lambda opened: _evidence(opened, rollout_id, store))
    own = _spans_of(found, attempt)
    conversation = _conversation(own)
    if as_json:
        head = {"rollout": found.rollout, "attempts": found.attempts, "reward": found.reward}
        show_json({**head, "messages": conversation, **({"spans": own} if spans else {})})
        return 0
    for line in _story(found, found.reward):
        say(line)
    for each in found.attempts:
        if each.error is not None and each.error.traceback:
            say(f"--- {each.attempt_id} ended in\n{each.error.traceback.rstrip()}", lines=True)
    say(f"task: {found.rollout.input}")
    for line in _conversation_lines(conversation):
        say(line, lines=True)
    if spans:
        show_table(("span", "name", "status", "seconds"), [_span_line(span) for span in own])
    return 0


@app.command("explain")
def explain(rollout_id: str = _ID, store: str = STORE, as_json: bool = JSON) -> int:
    """Say for each model call of a rollout who saw it, and which row it went to or why it is in none.

    The reasons are those of the training ledger, for the default adapter. Exit code 2 if there is no such rollout.

    Example: agl rollouts explain ro-1a2b3c --store run.db
    """
    from agentlightning.adapter.explain import HEADER
    from agentlightning.algorithm.ledger.record import read_rollout

    found = with_store(store, lambda opened: _evidence(opened, rollout_id, store))
    record = read_rollout(found.rollout, found.attempts, found.spans)
    explanation = record.explain()
    cells = [each.cells() for each in explanation.calls]
    if as_json:
        calls = [dict(zip(HEADER, line, strict=True)) for line in cells]
        head = {"rollout_id": rollout_id, "status": found.rollout.status, "reward": record.reward}
        show_json({**head, "attempts": found.attempts, "calls": calls, "summary": explanation.words()})
        return 0
    for line in _story(found, record.reward):
        say(line)
    if cells:
        show_table(HEADER, cells)
    say(explanation.words())
    return 0


# --- what is asked ---------------------------------------------------------------------------------------------------


async def _evidence(store: LightningStore, rollout_id: str, place: str) -> Evidence:
    from agentlightning.algorithm.collect import evidence

    return await evidence(store, await existing_rollout(store, rollout_id, place))


def _spans_of(found: Evidence, attempt_id: str | None) -> Sequence[Span]:
    from agentlightning.errors import NotFoundError

    known = [attempt.attempt_id for attempt in found.attempts]
    if attempt_id is None:
        return found.counted
    if attempt_id not in known:
        raise NotFoundError(
            f"Rollout {found.rollout.rollout_id!r} has no attempt {attempt_id!r}; it has: {', '.join(known) or 'none'}"
        )
    return sorted((s for s in found.spans if s.attempt_id == attempt_id), key=lambda span: span.sequence_id)


def _conversation(spans: Sequence[Span]) -> list[list[Message]]:
    """Return for each model call, in order, the messages that the calls before it have not shown already."""
    from agentlightning.adapter.messages import TraceToMessages

    shown: list[Message] = []
    parts: list[list[Message]] = []
    for call in TraceToMessages().adapt(spans):
        messages = call["messages"]
        goes_on = bool(shown) and messages[: len(shown)] == shown
        parts.append(messages[len(shown) :] if goes_on else messages)
        shown = messages
    return parts


# --- what is shown ---------------------------------------------------------------------------------------------------


def _conversation_lines(parts: Sequence[Sequence[Message]]) -> Iterator[str]:
    """Yield a conversation as lines: a number for each model call, then who said what."""
    for index, messages in enumerate(parts, start=1):
        yield f"--- model call {index}"
        for message in messages:
            content = message.get("content")
            if content:
                yield f"{message['role']}: {_text(content)}"
            for call in message.get("tool_calls") or ():
                yield f"{message['role']} calls {call['function']['name']}({call['function']['arguments']})"


def _text(content: str | Sequence[Mapping[str, object]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)


def _story(found: Evidence, reward: float | None) -> list[str]:
    from agentlightning.tracer.scope import spans_left_out

    rollout = found.rollout
    lines = [f"rollout {rollout.rollout_id}: {rollout.status}, mode {rollout.mode or '-'}, reward {number(reward)}"]
    for attempt in found.attempts:
        error = f", {attempt.error.type}: {attempt.error.message}" if attempt.error else ""
        lines.append(f"attempt {attempt.attempt_id}: {_end_of(attempt)}{error}")
        if missing := spans_left_out([span for span in found.spans if span.attempt_id == attempt.attempt_id]):
            lines.append(f"  {missing} spans of it are not kept: an attempt keeps 20,000 spans, and its rewards")
    return lines


def _end_of(attempt: Attempt) -> str:
    """Return how an attempt ended, or where it is."""
    return " ".join(filter(None, (attempt.status, attempt.outcome, attempt.outcome_reason)))


def _line(rollout: AttemptedRollout | Rollout) -> tuple[str, ...]:
    from agentlightning.types import AttemptedRollout

    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    return (
        rollout.rollout_id,
        rollout.status,
        rollout.mode or "-",
        "-" if attempt is None else _end_of(attempt),
        rollout.run_id or "-",
        moment(rollout.start_time),
        shortened(rollout.input),
    )


def _span_line(span: Span) -> tuple[str, ...]:
    seconds = None if span.start_time is None or span.end_time is None else span.end_time - span.start_time
    status = f"{span.status.status_code} {span.status.description or ''}".strip()
    return str(span.sequence_id), span.name, status, "-" if seconds is None else f"{seconds:.3f}"
