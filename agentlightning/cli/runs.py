"""`agl runs`: look at training runs, at what became of each model call, compare two runs, take one elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.cli.support.output import JSON, moment, number, say, show_json, show_table
from agentlightning.cli.support.store_access import STORE, with_store

if TYPE_CHECKING:
    from agentlightning.algorithm.runs.compare import RunComparison
    from agentlightning.store.base import LightningStore
    from agentlightning.types.runs import Run, RunRecord

_PAGE = 100
_ID = typer.Argument(metavar="RUN", help="Which run; - is the run without a name.")
_LIMIT = typer.Option(_PAGE, min=1, max=1000, help="At most so many rows.")
_OFFSET = typer.Option(0, min=0, help="Leave out so many rows before them.")
_SILENT_SECONDS = 60.0
"""A run whose algorithm has not been heard of for so long has probably died."""
_FIRST = (
    "mean_reward",
    "held_out",
    "update.loss",
    "loss",
    "reward",
    "calls_trained",
    "update.entropy",
    "update.grad_norm",
)
"""Figures of a step that are shown before others."""
_COLUMNS = 6

app = typer.Typer(no_args_is_help=True)


@app.callback()
def runs() -> None:
    """Look at training runs: their settings, curves and ledgers; compare two of them, export one.

    Example: agl runs show run-1a2b3c --store runs/20260101-120000
    """


@app.command("list")
def list_runs(
    store: str = STORE,
    state: list[str] = typer.Option([], help="Only those that are so; may be repeated."),
    contains: str | None = typer.Option(None, help="Only those whose id contains this."),
    limit: int = _LIMIT,
    offset: int = _OFFSET,
    as_json: bool = JSON,
) -> int:
    """Show runs, the newest first.

    Example: agl runs list --store run.db --state failed
    """
    from agentlightning.algorithm.runs.clean import clean_run

    filters: dict[str, Any] = {"state_in": state or None, "run_id_contains": contains}
    page = with_store(store, lambda opened: opened.query_runs(**filters, sort_order="desc", limit=limit, offset=offset))
    if as_json:
        show_json([clean_run(run) for run in page])
        return 0
    table = [
        (_name(run), run.algorithm or "-", _standing(run), number(run.last_step), _best(run), moment(run.start_time))
        for run in page
    ]
    show_table(("run", "algorithm", "state", "step", "best", "started"), table)
    _say_rest(len(table), offset, page.total, "runs")
    return 0


@app.command("show")
def show(
    run_id: str = _ID,
    store: str = STORE,
    figure: list[str] = typer.Option([], help="A figure of the steps to show, such as update.loss; may be repeated."),
    limit: int = _LIMIT,
    offset: int = _OFFSET,
    as_json: bool = JSON,
) -> int:
    """Show a run: how it stands, its settings, its steps, evaluations and alarms.

    Exit code 2 if there is no such run. Example: agl runs show run-1a2b3c --figure mean_reward --store run.db
    """
    from agentlightning.algorithm.runs.clean import clean_record
    from agentlightning.algorithm.runs.compare import flat

    async def ask(opened: LightningStore) -> tuple[Run, Any, list[RunRecord]]:
        run = await _existing(opened, run_id, store)
        page: dict[str, Any] = {"limit": limit, "offset": offset}
        steps = await opened.query_run_records(run.run_id, kind_in=["step"], sort_order="desc", **page)
        others = await opened.query_run_records(
            run.run_id, kind_in=["evaluation", "alarm", "checkpoint"], sort_order="desc", limit=_PAGE
        )
        return run, steps, [clean_record(record) for record in others]

    run, steps, others = with_store(store, ask)
    if as_json:
        show_json({"run": run, "steps": [clean_record(record) for record in steps], "others": others})
        return 0
    for line in _story(run):
        say(line)
    show_table(("setting", "value"), [(name, _text(value)) for name, value in flat(run.config or {}).items()])
    shown = [(record.step, flat(record.data)) for record in reversed(list(steps))]
    names = figure or _figures([figures for _, figures in shown])
    if shown:
        lines = [(str(step), *(_text(figures.get(name)) for name in names)) for step, figures in shown]
        show_table(("step", *names), lines)
        _say_rest(len(lines), offset, steps.total, "steps, the last ones")
    for record in reversed(others):
        told = record.data.get("text") or record.data.get("path") or record.data.get("value")
        say(f"{record.kind} {record.name or '-'} after step {record.step}: {_text(told)}")
    return 0


@app.command("ledger")
def ledger(
    run_id: str = _ID,
    store: str = STORE,
    step: int | None = typer.Option(None, min=0, help="Of which step; the last one by default."),
    rollout: str | None = typer.Option(None, help="Only of this rollout, in all steps."),
    row: int | None = typer.Option(None, min=0, help="Show the tokens of this row of the step."),
    check: bool = typer.Option(False, "--check", help="Check that every model call of the run has exactly one ending."),
    limit: int = _LIMIT,
    offset: int = _OFFSET,
    as_json: bool = JSON,
) -> int:
    """Show what became of each model call: the row in which it was trained, or why it was not.

    With --check exit code 1 if the ledger does not add up. Exit code 2 if there is no such run, step or row.

    Example: agl runs ledger run-1a2b3c --step 3 --row 0 --store run.db
    """
    from agentlightning.cli.support.ledger import show_calls, show_check, show_row

    async def ask(opened: LightningStore) -> int:
        run = await _existing(opened, run_id, store)
        if check:
            return await show_check(opened, run.run_id, as_json=as_json)
        wanted = step if step is not None or rollout is not None else run.last_step
        if row is not None:
            return await show_row(opened, run.run_id, wanted or 0, row, as_json=as_json)
        found = await show_calls(opened, run.run_id, wanted, rollout, limit, offset, as_json=as_json)
        if not as_json:
            _say_rest(found[0], offset, found[1], "rollouts")
        return 0

    return with_store(store, ask)


@app.command("compare")
def compare(
    first: str = _ID,
    second: str = typer.Argument(metavar="OTHER", help="The run to compare it with."),
    store: str = STORE,
    other_store: str | None = typer.Option(None, help="Where the other run is, if it is in another store."),
    figure: str | None = typer.Option(None, help="Which figure of the steps to show side by side."),
    limit: int = _LIMIT,
    offset: int = _OFFSET,
    as_json: bool = JSON,
) -> int:
    """Compare two runs: settings that differ, a curve side by side, best results, and evaluations task by task.

    Exit code 2 if there is no such run. Example: agl runs compare run-1a2b3c run-4d5e6f --store run.db
    """
    from agentlightning.algorithm.runs.compare import compare_runs
    from agentlightning.errors import BadRequestError, closest_name

    async def read(opened: LightningStore, run_id: str, place: str) -> tuple[Run, list[RunRecord]]:
        run = await _existing(opened, run_id, place)
        return run, list(await opened.query_run_records(run.run_id, kind_in=["step", "evaluation"]))

    places = store, other_store or store
    one, records = with_store(places[0], lambda opened: read(opened, first, places[0]))
    other, others = with_store(places[1], lambda opened: read(opened, second, places[1]))
    found = compare_runs(one, other, records, others)
    if as_json:
        show_json({"runs": [one, other], **vars(found)})
        return 0
    if figure is not None and figure not in found.figures:
        near = closest_name(figure, list(found.figures))
        hint = f"did you mean {near!r}?" if near else f"both have: {', '.join(found.figures) or 'none'}"
        raise BadRequestError(f"The steps of both runs have no figure {figure!r}; {hint}")
    _show_comparison(one, other, found, figure, limit, offset)
    return 0


@app.command("export")
def export(
    run_id: str = _ID,
    out: Path = typer.Option(..., help="An empty or new folder."),
    store: str = STORE,
) -> int:
    """Write a run into a folder: run.json, and a file of JSON Lines for each kind of record. Secrets are hidden.

    Exit code 2 if there is no such run. Example: agl runs export run-1a2b3c --out exported --store run.db
    """
    from agentlightning.algorithm.runs.export import export_run

    async def ask(opened: LightningStore) -> dict[str, int]:
        return await export_run(opened, await _existing(opened, run_id, store), out)

    lines = with_store(store, ask)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(lines.items())) or "no records"
    say(f"{out}: {told}")
    return 0


# --- what is asked and shown -----------------------------------------------------------------------------------------


async def _existing(store: LightningStore, run_id: str, place: str) -> Run:
    """Return a run.

    Raises:
        NotFoundError: there is none of that id; names the nearest one.
    """
    from agentlightning.algorithm.runs.clean import clean_run
    from agentlightning.errors import NotFoundError, closest_name
    from agentlightning.store.spec import public_form

    run = await store.get_run_by_id("" if run_id == "-" else run_id)
    if run is None:
        known = [run.run_id for run in await store.query_runs(sort_order="desc", limit=1000)]
        near = closest_name(run_id, known)
        hint = (
            f"did you mean {near!r}?" if near else f"agl runs list --store {public_form(place)} shows those there are"
        )
        raise NotFoundError(f"There is no run {run_id!r} in {public_form(place)}; {hint}")
    return clean_run(run)


def _name(run: Run) -> str:
    return run.run_id or "-"


def _standing(run: Run) -> str:
    """Return how a run stands; one whose algorithm is silent has probably died."""
    import time

    if run.state != "running":
        return run.state
    if run.starts == 0:
        return "not started"
    silent = time.time() - (run.last_heartbeat_time or run.start_time)
    return "running" if silent < _SILENT_SECONDS else f"running, silent for {_span(silent)}"


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _best(run: Run) -> str:
    return "-" if run.best is None else f"{run.best.value:g} {run.best.name} (step {run.best.step})"


def _story(run: Run) -> list[str]:
    lines = [f"run {_name(run)}: {run.algorithm or '-'}, {_standing(run)}, started {run.starts} times"]
    ended = (
        "" if run.end_time is None else f", ended {moment(run.end_time)} after {_span(run.end_time - run.start_time)}"
    )
    lines.append(f"begun {moment(run.start_time)}{ended}; last heard of {moment(run.last_heartbeat_time)}")
    lines.append(f"step {number(run.last_step)}, best {_best(run)}")
    if run.stop_reason is not None:
        lines.append(f"told to stop {moment(run.stop_time)}: {run.stop_reason}")
    if run.error is not None:
        lines.append(f"ended by {run.error.type}: {run.error.message}")
    if run.versions:
        lines.append("versions " + ", ".join(f"{name} {version}" for name, version in run.versions.items()))
    return lines


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def _figures(found: list[dict[str, Any]]) -> list[str]:
    """Return the names of the figures to show: the usual ones first, then the numbers that are there."""
    numbers = {n: None for each in found for n, value in each.items() if type(value) in (int, float)}
    ordered = [name for name in _FIRST if name in numbers]
    return [*ordered, *(name for name in numbers if name not in ordered and name not in ("step", "steps"))][:_COLUMNS]


def _show_comparison(one: Run, other: Run, found: RunComparison, figure: str | None, limit: int, offset: int) -> None:
    names = _name(one), _name(other)
    for run in (one, other):
        figures = f"step {number(run.last_step)}, best {_best(run)}"
        say(f"run {_name(run)}: {run.algorithm or '-'}, {_standing(run)}, {figures}")
    if found.settings:
        show_table(("setting", *names), [(n, _text(a), _text(b)) for n, (a, b) in found.settings.items()])
    else:
        say("settings and versions are equal")
    chosen = figure or next((name for name in (*_FIRST, *found.figures) if name in found.figures), None)
    if chosen is not None:
        curve = found.figures[chosen]
        shown = curve[offset : offset + limit]
        show_table((f"step: {chosen}", *names), [(str(step), _text(a), _text(b)) for step, a, b in shown])
        _say_rest(len(shown), offset, len(curve), "steps")
        rest = [name for name in found.figures if name != chosen]
        if rest:
            say(f"--figure shows another one: {', '.join(rest)}")
    for each in found.evaluations:
        values = " and ".join(_text(value) for value in each["values"])
        steps = " and ".join(map(str, each["steps"]))
        say(f"evaluation {each['name']} after steps {steps}: {values}; {each.get('text') or each['why_not_paired']}")


def _say_rest(shown: int, offset: int, total: int, what: str) -> None:
    if offset + shown < total:
        say(f"{shown} of {total} {what}; --offset {offset + shown} shows the next ones")
    else:
        say(f"{total} {what}")
