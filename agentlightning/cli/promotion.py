"""`agl compare` (same as `agl runs compare`) and `agl promote`: compare two runs, and apply promotion rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, STORE, number, say, show_json, show_table, with_store
from agentlightning.cli.run_texts import (
    FIRST,
    LIMIT,
    OFFSET,
    RUN,
    best_of,
    existing_run,
    figure_text,
    name_of,
    say_rest,
    state_of,
)

if TYPE_CHECKING:
    from agentlightning.evaluation.compare import RunComparison
    from agentlightning.evaluation.gate import Promotion
    from agentlightning.evaluation.records import RecordedEvaluation
    from agentlightning.store.base import LightningStore
    from agentlightning.types.runs import Run, RunRecord

_OTHER = typer.Argument(metavar="OTHER", help="Id of the run to compare with")
_BASELINE = typer.Argument(metavar="BASELINE", help="Id of the run to replace; - for the unnamed run")
_CANDIDATE = typer.Argument(metavar="CANDIDATE", help="Id of the candidate run, which would replace the baseline")
_OTHER_STORE = typer.Option(None, help="Store of the other run, if it is in a different store")
_EVALUATION = typer.Option(None, help="Name of the evaluation; by default the one with the most tasks in common")
_REPORT = typer.Option(None, help="HTML report to write, with curves, metrics and conversations")
_SEED = typer.Option(0, help="Seed for the draws of the sign-flip permutation test")


def compare(
    first: str = RUN,
    second: str = _OTHER,
    store: str = STORE,
    other_store: str | None = _OTHER_STORE,
    figure: str | None = typer.Option(None, help="Metric of a step; its values in both runs are shown side by side"),
    report: Path | None = _REPORT,
    limit: int = LIMIT,
    offset: int = OFFSET,
    as_json: bool = JSON,
) -> None:
    """Compare the settings, a metric, the best results and the evaluations of two runs.

    agl compare and agl runs compare are the same command. Exit code 2 if a run does not exist.

    Example: agl runs compare run-1a2b3c run-4d5e6f --store run.db
    """
    from agentlightning.errors import BadRequestError, closest_name
    from agentlightning.evaluation.compare import compare_runs
    from agentlightning.evaluation.gate import judge_promotion
    from agentlightning.evaluation.records import same_tasks

    places = store, other_store or store
    sides = _read(first, second, places)
    (one, records), (other, others) = sides
    comparison = compare_runs(one, other, records, others)
    if figure is not None and figure not in comparison.figures:
        near = closest_name(figure, list(comparison.figures))
        hint = f"did you mean {near!r}?" if near else f"expected one of: {', '.join(comparison.figures) or '(none)'}"
        raise BadRequestError(f"The steps of the two runs have no common metric {figure!r}; {hint}")
    if report is not None:
        pair = same_tasks(records, others, runs=(one.run_id, other.run_id))
        _write_report(report, judge_promotion(pair[0].result, pair[1].result), sides, pair, places, judged=False)
    if as_json:
        show_json({"runs": [one, other], **vars(comparison)})
        return
    _show_comparison(one, other, comparison, figure, limit, offset)
    if report is not None:
        say(f"report written to {report}")


def promote(
    first: str = _BASELINE,
    second: str = _CANDIDATE,
    store: str = STORE,
    other_store: str | None = _OTHER_STORE,
    evaluation: str | None = _EVALUATION,
    min_difference: float = typer.Option(0.0, help="Minimum gain in mean reward, exclusive"),
    significance: float = typer.Option(0.05, help="The p-value of the paired test must be below this value"),
    slices: bool = typer.Option(True, help="Require that no slice (group of tasks) is worse"),
    slice_significance: float = typer.Option(0.05, help="Corrected p-value below which a slice counts as worse"),
    max_slice_drop: float | None = typer.Option(None, help="Maximum drop of the mean reward of a slice"),
    max_missing: float = typer.Option(0.05, help="Maximum share of samples without a reward"),
    floor: list[str] = typer.Option(
        [], metavar="NAME=VALUE", help="NAME=VALUE: minimum mean of a reward dimension; may be repeated"
    ),
    ceiling: list[str] = typer.Option(
        [],
        metavar="NAME=VALUE",
        help="NAME=VALUE: maximum mean of a reward dimension, of seconds or of tokens; may be repeated",
    ),
    seed: int = _SEED,
    report: Path | None = _REPORT,
    as_json: bool = JSON,
) -> int:
    """Check whether a candidate run may replace a baseline run, from their evaluations of the same tasks.

    By default, the candidate must be better with a p-value below 0.05, and no slice (group of tasks) may be worse.
    Prints the result of each rule. Exit code 0 if the candidate is promoted, 1 if not, 2 for wrong input, such as runs
    without common tasks.

    Example: agl promote run-1a2b3c run-4d5e6f --floor safety=0.99 --report out.html --store run.db
    """
    from agentlightning.evaluation.gate import PromotionRules, judge_promotion
    from agentlightning.evaluation.records import same_tasks

    rules = PromotionRules(
        min_difference=min_difference,
        significance=significance,
        check_slices=slices,
        slice_significance=slice_significance,
        max_slice_drop=max_slice_drop,
        max_missing=max_missing,
        floors=_limits("--floor", floor),
        ceilings=_limits("--ceiling", ceiling),
    )
    places = store, other_store or store
    sides = _read(first, second, places)
    (one, records), (other, others) = sides
    pair = same_tasks(records, others, name=evaluation, runs=(one.run_id, other.run_id))
    promotion = judge_promotion(pair[0].result, pair[1].result, rules, seed=seed)
    if report is not None:
        _write_report(report, promotion, sides, pair, places, judged=True)
    if as_json:
        evaluations = [
            {"run": run, "evaluation": each.name, "step": each.step}
            for run, each in zip((one, other), pair, strict=True)
        ]
        show_json(
            {**promotion.as_json(), "evaluations": evaluations, "report": None if report is None else str(report)}
        )
    else:
        names = " and ".join(f"{each.name} of {name_of(run)}" for run, each in ((one, pair[0]), (other, pair[1])))
        say(f"compared: {names}")
        say(str(promotion), lines=True)
        if report is not None:
            say(f"report written to {report}")
    return 0 if promotion.promoted else 1


# --- input and output ------------------------------------------------------------------------------------------------

_Side = tuple["Run", "list[RunRecord]"]


def _read(first: str, second: str, places: tuple[str, str]) -> tuple[_Side, _Side]:
    """Return two runs with their steps and evaluations."""
    from agentlightning.errors import BadRequestError
    from agentlightning.training.records import clean_record

    if first == second and places[0] == places[1]:
        raise BadRequestError(f"Run {first!r} is given twice. Use another run, or another store with --other-store")

    async def read(connection: LightningStore, run_id: str, place: str) -> _Side:
        run = await existing_run(connection, run_id, place)
        records = await connection.query_run_records(run.run_id, kind_in=["step", "evaluation"])
        return run, [clean_record(record) for record in records]

    one = with_store(places[0], lambda connection: read(connection, first, places[0]))
    return one, with_store(places[1], lambda connection: read(connection, second, places[1]))


def _limits(option: str, texts: Sequence[str]) -> dict[str, float]:
    from agentlightning.errors import BadRequestError

    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name in limits:
            raise BadRequestError(f"{option} is set twice for {name!r}. Set it once")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise BadRequestError(f"{option}: expected NAME=VALUE, such as accuracy=0.8; got {text!r}")
    return limits


def _write_report(
    path: Path,
    promotion: Promotion,
    sides: tuple[_Side, _Side],
    pair: tuple[RecordedEvaluation, RecordedEvaluation],
    places: tuple[str, str],
    *,
    judged: bool,
) -> None:
    from agentlightning.base.private_files import open_private
    from agentlightning.errors import BadRequestError
    from agentlightning.evaluation.report import Side, changed_tasks, report, transcripts

    won, lost = changed_tasks(promotion.pairs)
    ids = [each.before.rollout_id for each in (*won, *lost)], [each.after.rollout_id for each in (*won, *lost)]
    shown: list[Side] = []
    for (run, records), chosen, place, rollout_ids in zip(sides, pair, places, ids, strict=True):
        text = f"{chosen.name} after step {chosen.step}, {counted(len(chosen.result.tasks), 'task')}"
        texts = with_store(place, lambda connection, rollout_ids=rollout_ids: transcripts(connection, rollout_ids))
        shown.append(Side(run, records, text, texts))
    page = report(promotion, shown[0], shown[1], won, lost, judged=judged)
    try:
        with open_private(path, "w") as file:
            file.write(page)
    except OSError as error:
        raise BadRequestError(f"Cannot write the report {str(path)!r}: {error.strerror or error}") from error


def _show_comparison(
    one: Run, other: Run, comparison: RunComparison, figure: str | None, limit: int, offset: int
) -> None:
    names = name_of(one), name_of(other)
    for run in (one, other):
        figures = f"step {number(run.last_step)}, best {best_of(run)}"
        say(f"run {name_of(run)}: {run.algorithm or '-'}, {state_of(run)}, {figures}")
    if comparison.settings:
        show_table(
            ("setting", *names), [(n, figure_text(a), figure_text(b)) for n, (a, b) in comparison.settings.items()]
        )
    else:
        say("settings and versions are the same")
    name = figure or next((name for name in (*FIRST, *comparison.figures) if name in comparison.figures), None)
    if name is not None:
        curve = comparison.figures[name]
        shown = curve[offset : offset + limit]
        show_table((f"step: {name}", *names), [(str(step), figure_text(a), figure_text(b)) for step, a, b in shown])
        say_rest(len(shown), offset, len(curve), "step")
        rest = [each for each in comparison.figures if each != name]
        if rest:
            say(f"other metrics for --figure: {', '.join(rest)}")
    for each in comparison.evaluations:
        values = " and ".join(figure_text(value) for value in each["values"])
        steps = " and ".join(map(str, each["steps"]))
        say(f"evaluation {each['name']} after steps {steps}: {values}; {each.get('text') or each['why_not_paired']}")
    if comparison.why_no_evaluation:
        say(f"no evaluation to compare: {comparison.why_no_evaluation}")
