"""RunEngine, the run operations on every backend, and the import of a history. Each operation checks and converts its
arguments, runs one script and returns copies."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/base.py, from where a checker takes them over.

from __future__ import annotations

import asyncio
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.base import UNSET, LightningStore
from agentlightning.store.cursors import check_not_both, cursor_behind, place_of
from agentlightning.store.engine.calls import call_of
from agentlightning.store.engine.reading import is_descending, result_of
from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.operations import refuse_broken_texts
from agentlightning.store.rules.durable import damaged
from agentlightning.store.rules.history import History, add_up, import_history, import_resources, pieces_of
from agentlightning.store.rules.query import RecordPlan, check_choices, check_page, page_of, text_filter
from agentlightning.store.rules.runs import (
    add_run_records,
    add_vocabulary,
    check_size,
    delete_runs,
    find_run_records,
    load_run,
    new_records,
    rewind_run,
    start_run,
    update_run,
)
from agentlightning.store.rules.tx import RunRow, VocabularyRow, row_type
from agentlightning.store.rules.values import (
    check_run_id,
    check_vocabulary_id,
    checked,
    evolve,
    given,
    public_attempt,
    public_rollout,
    to_json,
    valid,
)
from agentlightning.types import (
    Attempt,
    HistoryImport,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Run,
    RunRecord,
    RunState,
    Span,
)

_RESOURCES, _ROLLOUTS = TypeAdapter(list[ResourcesUpdate]), TypeAdapter(list[Rollout])
_ATTEMPTS, _SPANS = TypeAdapter(list[Attempt]), TypeAdapter(list[Span])


@refuse_broken_texts
class RunEngine(LightningStore):
    """The run operations and the import of a store over a backend."""

    _runtime: StoreRuntime

    @override
    async def start_run(self, run_id, *, algorithm=None, config=None, versions=None, metadata=None) -> Run:
        arguments = {"algorithm": algorithm, "config": config, "versions": versions, "metadata": metadata}
        fields = _fields(check_run_id(run_id), {name: value for name, value in arguments.items() if value is not None})
        now, call = self._runtime.now(), call_of("start_run", run_id=run_id, **fields)
        return _copy(await self._runtime.write(lambda tx: start_run(tx, now, run_id, fields, call)))

    @override
    async def update_run(
        self, run_id, *, state=UNSET, best=UNSET, error=UNSET, stop_reason=UNSET, config=UNSET, metadata=UNSET,
        heartbeat=False,
    ) -> Run:  # fmt: skip
        arguments = given(
            state=state, best=best, error=error, stop_reason=stop_reason, config=config, metadata=metadata
        )
        fields = _fields(check_run_id(run_id), arguments)
        beat, now = bool(heartbeat), self._runtime.now()
        call = call_of("update_run", run_id=run_id, heartbeat=beat, **fields)
        return _copy(await self._runtime.write(lambda tx: update_run(tx, now, run_id, fields, beat, call)))

    @override
    async def get_run_by_id(self, run_id) -> Run | None:
        row = await self._runtime.read(lambda tx: load_run(tx, run_id))
        return None if row is None else _copy(row.run)

    @override
    async def query_runs(
        self, *, state_in=None, algorithm=None, run_id_contains=None, sort_by="start_time", sort_order="asc",
        limit=-1, offset=0,
    ) -> PaginatedResult[Run]:  # fmt: skip
        sort_by = check_page(Run, sort_by, limit, offset)
        check_choices("state_in", state_in, RunState)
        rows = await self._runtime.read(lambda tx: tx.scan("run"))
        runs = [cast("RunRow", row).run for _, row in rows]
        matches = [
            run
            for run in runs
            if (state_in is None or run.state in state_in)
            and all(text_filter(algorithm, None, run.algorithm) + text_filter(None, run_id_contains, run.run_id))
        ]
        page, total = page_of(matches, sort_by, is_descending(sort_order), limit, offset)
        return result_of([_copy(run) for run in page], limit, offset, total)

    @override
    async def add_run_records(self, run_id, records) -> int:
        now = self._runtime.now()
        new = new_records(records, now)
        call = call_of("add_run_records", run_id=check_run_id(run_id), records=[record[:3] for record in new])
        return await self._runtime.write(lambda tx: add_run_records(tx, now, run_id, new, call))

    @override
    async def query_run_records(
        self, run_id, *, kind_in=None, step_from=None, step_to=None, name=None, sort_order="asc", limit=-1, offset=0,
        cursor=None,
    ) -> PaginatedResult[RunRecord]:  # fmt: skip
        descending, after, total = is_descending(sort_order), None, None
        check_not_both(cursor, offset)
        if cursor is not None:
            after, (total,) = place_of(cursor, "step", sort_order, texts=False, more=1)
        plan = RecordPlan(
            check_run_id(run_id), kind_in, step_from, step_to, name, descending, limit, offset, total, after
        )
        bodies, total, last = await self._runtime.read(lambda tx: find_run_records(tx, plan))
        behind = last and cursor_behind("step", descending, last, total)
        return result_of([_record(run_id, body) for body in bodies], limit, offset, total, behind)

    @override
    async def rewind_run(self, run_id, step) -> int:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise BadRequestError(f"step must be 0 or more (the last step to keep); got {step!r}")
        now, call = self._runtime.now(), call_of("rewind_run", run_id=check_run_id(run_id), step=step)
        return await self._runtime.write(lambda tx: rewind_run(tx, now, run_id, step, call))

    @override
    async def delete_runs(self, run_ids, *, force=False) -> int:
        if isinstance(run_ids, str):
            raise BadRequestError(f"run_ids must be a list of ids; got the string {run_ids!r}")
        ids, now, call = list(run_ids), self._runtime.now(), call_of("delete_runs", run_ids=run_ids, force=force)
        answer = await self._runtime.write(lambda tx: delete_runs(tx, now, ids, bool(force), call))
        if isinstance(answer, Exception):
            raise answer
        return answer

    @override
    async def add_vocabulary(self, vocabulary_id, tokens) -> bool:
        if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
            raise BadRequestError("tokens must be a list of strings, one for each token id")
        row = VocabularyRow(to_json(list(tokens), "tokens"))
        check_size(f"The vocabulary {check_vocabulary_id(vocabulary_id)!r}", row_type("vocabulary").dump_json(row))
        return await self._runtime.write(lambda tx: add_vocabulary(tx, vocabulary_id, row.tokens))

    @override
    async def get_vocabulary(self, vocabulary_id) -> list[str] | None:
        row = await self._runtime.read(lambda tx: tx.get("vocabulary", vocabulary_id))
        return None if row is None else list(cast("VocabularyRow", row).tokens)

    @override
    async def import_history(self, *, resources=(), rollouts=(), attempts=(), spans=()) -> HistoryImport:
        # in a thread, so that a server keeps answering while thousands of values are checked and copied
        updates, pieces = await asyncio.to_thread(_own, resources, rollouts, attempts, spans)
        of_resources = HistoryImport()
        if updates:
            of_resources = await self._runtime.write(lambda tx: import_resources(tx, updates))
        done = of_resources
        for piece in pieces:
            result = await self._runtime.write(lambda tx, piece=piece: import_history(tx, piece))
            done = add_up(done, result)
            await asyncio.sleep(0)  # a store in memory runs its scripts on the loop
        return done


def _fields(run_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the changed fields of a run in their stored form."""
    for name in ("config", "metadata"):
        if name in arguments:
            arguments[name] = to_json(arguments[name], name)
    fields = checked(Run, arguments)
    check_size(f"Run {run_id!r}", row_type("run").dump_json(RunRow(Run.model_construct(run_id=run_id, **fields))))
    return fields


def _copy(run: Run) -> Run:
    return run.model_copy(deep=True)


def _record(run_id: str, body: bytes | str) -> RunRecord:
    try:
        return RunRecord.model_validate_json(body)
    except ValidationError as error:
        raise damaged("a record of run", run_id, error) from None


def _own(resources: Any, rollouts: Any, attempts: Any, spans: Any) -> tuple[list[ResourcesUpdate], list[History]]:
    """Return checked copies of the values of a call."""
    updates = [_resources(update) for update in _valid(_RESOURCES, "resources", resources)]
    history = History(
        [_rollout(rollout) for rollout in _valid(_ROLLOUTS, "rollouts", rollouts)],
        [_attempt(attempt) for attempt in _valid(_ATTEMPTS, "attempts", attempts)],
        [_span(span) for span in _valid(_SPANS, "spans", spans)],
    )
    return updates, pieces_of(history) if any(history) else []


def _valid(kind: TypeAdapter[list[Any]], name: str, values: Any) -> list[Any]:
    with valid(name):
        checked = kind.validate_python(list(values))
    if name != "spans":  # which become JSON as they are stored
        kind.dump_json(checked)  # raises for a text that no file, database or wire takes
    return checked


def _resources(update: ResourcesUpdate) -> ResourcesUpdate:
    if update.resources_id in ("", "latest") or update.version < 1:
        raise BadRequestError(
            f"Resources {update.resources_id!r} of version {update.version} cannot be stored; expected an id other "
            "than '' and 'latest', and a version of at least 1"
        )
    return update.model_copy(deep=True)


def _rollout(rollout: Rollout) -> Rollout:
    _named("rollout_id", rollout.rollout_id)
    if rollout.run_id is not None:
        check_run_id(rollout.run_id)
    metadata = None if rollout.metadata is None else to_json(rollout.metadata, "metadata")
    return evolve(public_rollout(evolve(rollout, input=to_json(rollout.input), metadata=metadata)), not_before=None)


def _attempt(attempt: Attempt) -> Attempt:
    _named("attempt_id", attempt.attempt_id)
    metadata = None if attempt.metadata is None else to_json(attempt.metadata, "metadata")
    return public_attempt(evolve(attempt, metadata=metadata))


def _span(span: Span) -> Span:
    if span.sequence_id < 0:
        raise BadRequestError(f"Span {span.span_id} of rollout {span.rollout_id}: bad sequence_id {span.sequence_id}")
    return span


def _named(field: str, value: str) -> None:
    if value in ("", "latest") or "\0" in value:
        raise BadRequestError(f"{field}={value!r} cannot be an id; expected a string other than '' and 'latest'")
