"""The operation that takes in a history, on every backend: values checked and made the store's own, one script."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/history_operations.py.

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.history_operations import HistoryOperations
from agentlightning.store.rules.history import History, add_up, import_history, import_resources, pieces_of
from agentlightning.store.rules.values import check_run_id, evolve, public_attempt, public_rollout, to_json, valid
from agentlightning.store.wrappers.text_check import refuse_broken_texts
from agentlightning.types import Attempt, HistoryImport, ResourcesUpdate, Rollout, Span

_RESOURCES, _ROLLOUTS = TypeAdapter(list[ResourcesUpdate]), TypeAdapter(list[Rollout])
_ATTEMPTS, _SPANS = TypeAdapter(list[Attempt]), TypeAdapter(list[Span])


@refuse_broken_texts
class HistoryEngine(HistoryOperations):
    """The part of a store over a backend that takes in a history."""

    _runtime: StoreRuntime

    @override
    async def import_history(self, *, resources=(), rollouts=(), attempts=(), spans=()) -> HistoryImport:
        # in a thread, so that a server goes on answering while thousands of values are checked and copied
        updates, pieces = await asyncio.to_thread(_own, resources, rollouts, attempts, spans)
        of_resources = HistoryImport()
        if updates:
            of_resources = await self._runtime.write(lambda tx: import_resources(tx, updates))
        done = of_resources
        for piece in pieces:
            taken = await self._runtime.write(lambda tx, piece=piece: import_history(tx, piece))
            done = add_up(done, taken)
            await asyncio.sleep(0)  # a store in memory runs its scripts on the loop
        return done


def _own(resources: Any, rollouts: Any, attempts: Any, spans: Any) -> tuple[list[ResourcesUpdate], list[History]]:
    """Return the values of a call, checked and made the store's own."""
    updates = [_resources(update) for update in _valid(_RESOURCES, "resources", resources)]
    history = History(
        [_rollout(rollout) for rollout in _valid(_ROLLOUTS, "rollouts", rollouts)],
        [_attempt(attempt) for attempt in _valid(_ATTEMPTS, "attempts", attempts)],
        [_span(span) for span in _valid(_SPANS, "spans", spans)],
    )
    return updates, pieces_of(history) if any(history) else []


def _valid(kind: TypeAdapter[list[Any]], name: str, given: Any) -> list[Any]:
    with valid(name):
        found = kind.validate_python(list(given))
    if name != "spans":  # which become JSON as they are stored
        kind.dump_json(found)  # raises for a text that no file, database or wire takes
    return found


def _resources(update: ResourcesUpdate) -> ResourcesUpdate:
    if update.resources_id in ("", "latest") or update.version < 1:
        raise BadRequestError(
            f"Resources {update.resources_id!r} of version {update.version} cannot be kept; expected another id than "
            "'' and 'latest', and a version from 1 on"
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
        raise BadRequestError(f"Span {span.span_id} of rollout {span.rollout_id} has no number; got {span.sequence_id}")
    return span


def _named(field: str, value: str) -> None:
    if value in ("", "latest") or "\0" in value:
        raise BadRequestError(f"{field}={value!r} cannot be an id; expected a text other than '' and 'latest'")
