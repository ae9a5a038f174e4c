"""`agl runs`: show, compare and export training runs, and show the use of each model call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, STORE, moment, number, say, show_json, show_table, with_store
from agentlightning.cli.promotion import compare
from agentlightning.cli.run_texts import (
    FIRST,
    LIMIT,
    OFFSET,
    PAGE,
    RUN,
    best_of,
    existing_run,
    figure_text,
    name_of,
    say_rest,
    span,
    state_of,
)
from agentlightning.errors import NotFoundError
from agentlightning.store.cursors import pages_of
from agentlightning.training.ledger_records import LedgerEntry, check_ledger, numbers_of
from agentlightning.training.records import clean_record

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types.runs import Run, RunRecord

_COLUMNS = 6

app = typer.Typer(no_args_is_help=True)


@app.callback()
def runs() -> None:
    """Show the settings, metrics and ledgers of training runs; compare and export runs.

    Example: agl runs show run-1a2b3c --store runs/20260101-120000
    """


@app.command("list")
def list_runs(
    store: str = STORE,
    state: list[str] = typer.Option([], help="Only runs in this state; may be repeated"),
    contains: str | None = typer.Option(None, help="Only runs with this text in their id"),
    limit: int = LIMIT,
    offset: int = OFFSET,
    as_json: bool = JSON,
) -> None:
    """Show runs, newest first.

    Example: agl runs list --store run.db --state failed
    """
    from agentlightning.training.records import clean_run

    filters: dict[str, Any] = {"state_in": state or None, "run_id_contains": contains}
    page = with_store(
        store, lambda connection: connection.query_runs(**filters, sort_order="desc", limit=limit, offset=offset)
    )
    shown = [clean_run(run) for run in page]
    if as_json:
        show_json(shown)
        return
    table = [
        (name_of(run), run.algorithm or "-", state_of(run), number(run.last_step), best_of(run), moment(run.start_time))
        for run in shown
    ]
    show_table(("run", "algorithm", "state", "step", "best", "started"), table)
    say_rest(len(table), offset, page.total, "run")


@app.command("show")
def show(
    run_id: str = RUN,
    store: str = STORE,
    figure: list[str] = typer.Option([], help="Metric of the steps to show, such as update.loss; may be repeated"),
    limit: int = LIMIT,
    offset: int = OFFSET,
    as_json: bool = JSON,
) -> None:
    """Show the state, steps, evaluations, alarms and settings of a run.

    Exit code 2 if the run does not exist. Example: agl runs show run-1a2b3c --figure mean_reward --store run.db
    """
    from agentlightning.evaluation.compare import flat
    from agentlightning.training.records import clean_record

    async def ask(connection: LightningStore) -> tuple[Run, Any, list[RunRecord], list[RunRecord]]:
        run = await existing_run(connection, run_id, store)
        page: dict[str, Any] = {"limit": limit, "offset": offset}
        steps = await connection.query_run_records(run.run_id, kind_in=["step"], sort_order="desc", **page)
        newest: dict[str, Any] = {"sort_order": "desc", "limit": PAGE}
        others = await connection.query_run_records(run.run_id, kind_in=["evaluation", "checkpoint"], **newest)
        alarms = await connection.query_run_records(run.run_id, kind_in=["alarm"], **newest)
        steps = steps.model_copy(update={"items": [clean_record(record) for record in steps]})
        return run, steps, [clean_record(record) for record in others], [clean_record(record) for record in alarms]

    run, steps, others, alarms = with_store(store, ask)
    if as_json:
        newest_first = sorted([*others, *alarms], key=lambda record: record.step, reverse=True)
        show_json({"run": run, "steps": list(steps), "others": newest_first})
        return
    for line in _story(run):
        say(line)
    shown = [(record.step, flat(record.data)) for record in reversed(list(steps))]
    names = figure or _figures([figures for _, figures in shown])
    if shown:
        lines = [(str(step), *(figure_text(figures.get(name)) for name in names)) for step, figures in shown]
        show_table(("step", *names), lines)
        say_rest(len(lines), offset, steps.total, "step", ", counted from the latest")
    for record in reversed(others):
        result = record.data.get("path") or record.data.get("value")
        say(f"{record.kind} {record.name or '-'} after step {record.step}: {figure_text(result)}{_tasks_of(record)}")
    for record in reversed(alarms):
        say(_alarm_line(record))
    show_table(("setting", "value"), [(name, figure_text(value)) for name, value in flat(run.config or {}).items()])


@app.command("ledger")
def ledger(
    run_id: str = RUN,
    store: str = STORE,
    step: int | None = typer.Option(None, min=0, help="Step of the ledger; the latest by default"),
    rollout: str | None = typer.Option(None, help="Only this rollout, in all steps"),
    row: int | None = typer.Option(None, min=0, help="Show the tokens of this row of the step"),
    check: bool = typer.Option(False, "--check", help="Check that every model call of the run has exactly one outcome"),
    limit: int = LIMIT,
    offset: int = OFFSET,
    as_json: bool = JSON,
) -> int:
    """Show for each model call the training row that contains it, or the reason why it was not trained.

    Exit code 2 if the run, step or row does not exist. With --check, exit code 1 if the ledger is inconsistent.

    Example: agl runs ledger run-1a2b3c --step 3 --row 0 --store run.db
    """

    async def ask(connection: LightningStore) -> int:
        run = await existing_run(connection, run_id, store)
        if check:
            return await show_check(connection, run.run_id, as_json=as_json)
        last_or_step = step if step is not None or rollout is not None else run.last_step
        if row is not None:
            return await show_row(connection, run.run_id, last_or_step or 0, row, as_json=as_json)
        counts = await show_calls(connection, run.run_id, last_or_step, rollout, limit, offset, as_json=as_json)
        if not as_json:
            say_rest(counts[0], offset, counts[1], "rollout")
        return 0

    return with_store(store, ask)


app.command("compare")(compare)


@app.command("export")
def export(
    run_id: str = RUN,
    out: Path = typer.Option(..., help="Empty or new folder to write"),
    store: str = STORE,
) -> None:
    """Write a run to a folder: run.json, and a JSON Lines file for each kind of record. Secrets are hidden.

    Exit code 2 if the run does not exist. Example: agl runs export run-1a2b3c --out exported --store run.db
    """
    from agentlightning.training.run_folder import export_run

    async def ask(connection: LightningStore) -> dict[str, int]:
        return await export_run(connection, await existing_run(connection, run_id, store), out)

    lines = with_store(store, ask)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(lines.items())) or "no records"
    say(f"{out}: {summary}")


def _story(run: Run) -> list[str]:
    starts = counted(run.starts, "time")
    lines = [f"run {name_of(run)}: {run.algorithm or '-'}, {state_of(run)}, started {starts}"]
    end_text = (
        "" if run.end_time is None else f", ended {moment(run.end_time)} after {span(run.end_time - run.start_time)}"
    )
    lines.append(f"started {moment(run.start_time)}{end_text}; last heartbeat {moment(run.last_heartbeat_time)}")
    lines.append(f"step {number(run.last_step)}, best {best_of(run)}")
    if run.stop_reason is not None:
        lines.append(f"stop requested {moment(run.stop_time)}: {run.stop_reason}")
    if run.error is not None:
        lines.append(f"failed with {run.error.type}: {run.error.message}")
    if run.versions:
        lines.append("versions " + ", ".join(f"{name} {version}" for name, version in run.versions.items()))
    return lines


def _tasks_of(record: RunRecord) -> str:
    """Return the interval and the number of tasks of an evaluation; empty for other records."""
    from agentlightning.evaluation.statistics import interval_of
    from agentlightning.utils.rewards import as_reward

    rewards = record.data.get("rewards")
    if not isinstance(rewards, list):
        return ""
    earned = [reward for each in cast("list[Any]", rewards) if (reward := as_reward(each)) is not None]
    limits = "" if (interval := interval_of(earned)) is None else interval.limits
    return f" ({limits}{', ' * bool(limits)}{len(earned)} of {counted(len(cast('list[Any]', rewards)), 'task')})"


def _alarm_line(record: RunRecord) -> str:
    """Return an alarm as a line. Its state is raised, over or missing."""
    data, state = record.data, record.data.get("state")
    line = f"alarm {record.name or '-'} after step {record.step}"
    if state == "over":
        return f"{line}, over (since step {figure_text(data.get('since'))}): {figure_text(data.get('text'))}"
    hint = f"; to try: {data['what_to_try']}" if data.get("what_to_try") else ""
    return f"{line}{', raised' if state == 'raised' else ''}: {figure_text(data.get('text'))}{hint}"


def _figures(steps: list[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics to show: the usual ones first, then the other numbers."""
    numbers = {n: None for each in steps for n, value in each.items() if type(value) in (int, float)}
    usual = [name for name in FIRST if name in numbers]
    return [*usual, *(name for name in numbers if name not in usual and name not in ("step", "steps"))][:_COLUMNS]


_PAGE = 100
_CALLS = ("step", "rollout", "call", "outcome", "row", "tokens", "advantage", "weights")
_FIGURES = (
    *("engine_logprobs", "trainer_logprobs", "entropy", "ratio", "clipped"),
    *("weight", "correction", "kl", "advantage"),
)


async def show_check(store: LightningStore, run_id: str, *, as_json: bool) -> int:
    """Check the ledger of a run, print the result, and return the exit code."""
    result = await check_ledger(store, run_id)
    if as_json:
        show_json({"adds_up": result.adds_up, **vars(result)})
        return 0 if result.adds_up else 1
    reasons = ", ".join(f"{reason} {count}" for reason, count in result.excluded.most_common())
    say(
        f"{counted(result.captured, 'model call')}: "
        f"{result.trained} trained ({counted(result.trained_tokens, 'token')}), "
        f"{result.excluded.total()} excluded{f' ({reasons})' if reasons else ''}; "
        f"{counted(result.evaluation_calls, 'evaluation call')}; {counted(result.rows, 'token row')}"
    )
    if result.without_span:
        say(f"spans deleted: {counted(result.without_span, 'recorded call')}")
    for line in result.wrong:
        say(f"wrong: {line}")
    errors = counted(result.wrong_count, "error")
    say("the ledger adds up" if result.adds_up else f"the ledger does not add up: {errors}")
    return 0 if result.adds_up else 1


async def show_calls(
    store: LightningStore, run_id: str, step: int | None, rollout: str | None, limit: int, offset: int, *, as_json: bool
) -> tuple[int, int]:
    """Show the calls of a page of rollouts, and return the number of rollouts on the page and in total."""
    page = await store.query_run_records(
        run_id, kind_in=["ledger"], step_from=step, step_to=step, name=rollout, limit=limit, offset=offset
    )
    if as_json:
        show_json([{"step": record.step, **clean_record(record).data} for record in page])
        return len(page), page.total
    lines: list[tuple[str, ...]] = []
    for record in page:
        entry = cast(LedgerEntry, record.data)
        calls = entry.get("calls", [])
        if not calls:
            lines.append((str(record.step), record.name, "-", f"no call ({entry.get('verdict') or '-'})", *"----"))
        for call in calls:
            ending = "trained" if call["ending"] == "trained" else str(call["reason"])
            late = " (late)" if entry.get("late") else ""
            figures = (call["row"], call["tokens"] or None, call["advantage"], call["weight_version"])
            lines.append((str(record.step), record.name, call["call_id"], ending + late, *map(number, figures)))
    show_table(_CALLS, lines)
    return len(page), page.total


async def show_row(store: LightningStore, run_id: str, step: int, row: int, *, as_json: bool) -> int:
    """Show the tokens of a row, the numbers that the loss used, and the call of each trained token."""
    rows: dict[int, tuple[LedgerEntry, dict[str, Any]]] = {}
    of_step: dict[str, Any] = {"run_id": run_id, "kind_in": ["ledger"], "step_from": step, "step_to": step}
    async for page in pages_of(store.query_run_records, **of_step, limit=_PAGE):
        for record in page:
            entry = cast(LedgerEntry, record.data)
            rows |= {each.get("row", -1): (entry, dict(each)) for each in entry.get("rows", ())}
        if row in rows:
            break
    if row not in rows:
        hint = f"rows with tokens: {', '.join(map(str, sorted(rows)[:20]))}" if rows else "set record_tokens"
        raise NotFoundError(f"Step {step} of run {run_id!r} has no recorded tokens for row {row}; {hint}")
    entry, recorded_row = rows[row]
    numbers = numbers_of(cast(Any, recorded_row))
    texts: list[str] = await store.get_vocabulary(recorded_row.get("vocabulary") or "") or []
    calls = [call for call in entry.get("calls", ()) if call["row"] == row]
    owners: list[str] = [call["call_id"] for call in calls for _ in range(call["tokens"])]
    trained_index = -1
    lines: list[dict[str, Any]] = []
    for place, (token, mask) in enumerate(zip(numbers["tokens"], numbers["mask"], strict=True)):
        trained_index += mask
        figures = {n: numbers[n][trained_index] for n in _FIGURES if n in numbers} if mask else {}
        text: str | None = texts[int(token)] if 0 <= token < len(texts) else None
        call_id: str | None = owners[int(trained_index)] if mask and trained_index < len(owners) else None
        lines.append({"place": place, "token": token, "text": text, "call_id": call_id, **figures})
    if as_json:
        show_json({"step": step, "row": row, "rollout_id": entry.get("rollout_id"), "tokens": lines})
        return 0
    say(f"row {row} of step {step}: rollout {entry.get('rollout_id')}, reward {number(entry.get('reward'))}")
    shown = [name for name in _FIGURES if name in numbers]
    table = [
        (str(line["place"]), str(line["token"]), repr(line["text"]) if line["text"] is not None else "-",
         line["call_id"] or "-", *(number(line.get(name)) for name in shown))
        for line in lines
    ]  # fmt: skip
    show_table(("position", "token", "text", "call", *shown), table)
    return 0
