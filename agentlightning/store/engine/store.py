"""EngineStore, the store class of every backend. It checks and converts the arguments of an operation, gets the time
and the ids once per call, runs the script of `store/rules/` and returns copies. Read-only operations are in
`reading.py`, runs and the import of histories in `runs.py`, and waiting and the timer in `runtime.py`."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/base.py, from where a checker takes them over.

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import (
    UNSET,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Unset,
    call_token,
)
from agentlightning.store.engine.calls import IdleBeats, Repeats, call_ids, call_of, until_tick
from agentlightning.store.engine.reading import ReadingEngine
from agentlightning.store.engine.runs import RunEngine
from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.engine.waiters import Key
from agentlightning.store.operations import refuse_broken_texts
from agentlightning.store.rules.claims import Claim, Claimed, claim, start_attempt
from agentlightning.store.rules.deletion import delete
from agentlightning.store.rules.enqueue import enqueue, start_rollout
from agentlightning.store.rules.idempotency import Call, claim_call, refusable
from agentlightning.store.rules.lifecycle import check_status
from agentlightning.store.rules.resources import publish
from agentlightning.store.rules.spans import (
    AnySpan,
    add_spans,
    next_sequence_ids,
)
from agentlightning.store.rules.tx import Backend, ClaimRow, Tx
from agentlightning.store.rules.updates import update_attempt, update_rollout
from agentlightning.store.rules.values import (
    check_limit,
    check_names,
    check_rewards,
    check_timeout,
    checked,
    evolve,
    given,
    new_request,
    own_config,
    public_attempt,
    public_attempted,
    public_rollout,
    public_worker,
    to_json,
    valid,
    wrong_value,
)
from agentlightning.store.rules.workers import heartbeat
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    CustomResource,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    ResourceUnion,
    RetentionPolicy,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
)
from agentlightning.types.core import with_mode_of_config
from agentlightning.types.resources import stored_forms

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")
_NAMED_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)
_EMPTY_TOGETHER_SECONDS = 0.05
"""Seconds that the response to an idle worker may wait, so that responses to several workers share a commit."""


@refuse_broken_texts
class EngineStore(RunEngine, ReadingEngine):
    """A store over a backend. Usable concurrently from any thread and event loop."""

    def __init__(
        self,
        backend: Backend,
        *,
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self._backend = backend
        self._repeats = Repeats()
        self._runtime = StoreRuntime(
            backend, scan_debounce_seconds=scan_debounce_seconds, lease_seconds=lease_seconds, policy=retention
        )
        self._idle_beats = IdleBeats() if backend.persistent else None
        if tracker is not None:
            from agentlightning.store.metrics import observe_operations

            meter = observe_operations(self, tracker)
            self._runtime.on_end, self._runtime.on_attempt_end = meter.rollout_ended, meter.attempt_ended

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        shared = self._backend.shared
        return {
            "async_safe": True,
            "thread_safe": True,
            "zero_copy": False,
            "otlp_traces": False,
            "distributed": shared,
            "persistent": self._backend.persistent,
            "persistence": self._backend.persistent,
        }

    @override
    async def close(self) -> None:
        self._runtime.close()

    @override
    async def statistics(self) -> LightningStoreStatistics:
        counts, resources, workers = await self._runtime.read(
            lambda tx: (tx.counts(), tx.count_rows("resources"), tx.scan("worker"))
        )
        policy = self._runtime.policy
        retention: LightningStoreStatistics = (
            {} if policy is None else {"retention": policy.model_dump(exclude_none=True)}
        )
        return {
            "name": type(self).__name__,
            "total_rollouts": counts.rollouts,
            "total_attempts": counts.attempts,
            "total_spans": counts.spans,
            "total_span_bytes": counts.span_bytes,
            "total_resources": resources,
            "total_workers": sum(not worker_id.startswith(CONTROL_PREFIX) for worker_id, _ in workers),
            "uptime": time.monotonic() - self._runtime.started,
            "lease_seconds": self._runtime.lease_seconds,
            **retention,
        }

    # --- adding work -----------------------------------------------------------------------------------------------

    @override
    async def start_rollout(
        self, input, mode=None, resources_id=None, config=None, metadata=None, worker_id=None, *, run_id=None
    ) -> AttemptedRollout:
        request = _request(input, config, metadata, mode=mode, resources_id=resources_id, run_id=run_id)
        await self._runtime.settle()
        call = call_of("start_rollout")
        token = call.token if call else None
        ids, attempt_id = call_ids(12, token), "at-" + call_ids(8, token)(0)
        claim = await self._runtime.write(
            lambda tx: start_rollout(tx, self._runtime.now(), ids, attempt_id, request, worker_id, call)
        )
        return self._hand_out(claim)

    @override
    async def enqueue_rollout(
        self, input, mode=None, resources_id=None, config=None, metadata=None,
        *, run_id=None, priority=0, not_before=None,
    ) -> Rollout:  # fmt: skip
        request = _request(
            input, config, metadata, mode=mode, resources_id=resources_id, run_id=run_id, priority=priority,
            not_before=not_before,
        )  # fmt: skip
        return (await self._enqueue([request]))[0]

    @override
    async def enqueue_many_rollouts(self, rollouts) -> list[Rollout]:
        with valid("rollouts"):
            valid_rollouts = [EnqueueRolloutRequest.model_validate(each) for each in rollouts]
        names = EnqueueRolloutRequest.model_fields
        requests = [_request(**{name: getattr(rollout, name) for name in names}) for rollout in valid_rollouts]
        return await self._enqueue(requests) if requests else []

    async def _enqueue(self, requests: list[EnqueueRolloutRequest]) -> list[Rollout]:
        now = await self._runtime.settle()
        call = call_of("enqueue_many_rollouts")
        ids = call_ids(12, None if call is None else call.token)
        made = await self._runtime.write(lambda tx: enqueue(tx, now, ids, requests, call))
        return [public_rollout(rollout) for rollout in made]

    @override
    async def dequeue_rollout(self, worker_id=None, *, timeout=0.0, run_id=None) -> AttemptedRollout | None:
        check_timeout(timeout)
        claims = (await self._claim(1, worker_id, timeout, run_id)).claims
        return self._hand_out(claims[0]) if claims else None

    @override
    async def dequeue_many_rollouts(
        self, *, limit=1, worker_id=None, timeout=0.0, run_id=None
    ) -> list[AttemptedRollout]:
        check_timeout(timeout)
        if check_limit(limit) <= 0:
            return []
        return [self._hand_out(each) for each in (await self._claim(limit, worker_id, timeout, run_id)).claims]

    def _claim(self, limit: int, worker_id: str | None, timeout: float, run_id: str | None) -> Awaitable[Claimed]:
        token, looks, now = call_token("dequeue_many_rollouts"), 0, 0.0
        ids, work = call_ids(8, token), ("work", run_id)

        async def at_once() -> Claimed:
            now = await self._runtime.settle()
            return await self._runtime.write(lambda tx: claim(tx, now, ids, None, run_id, worker_id, limit))

        if token is None and timeout <= 0:
            return at_once()

        def script_of(_: Claimed | None) -> Callable[[Tx], Claimed]:
            nonlocal looks, now
            looks, now = looks + 1, self._runtime.now()
            return partial(
                claim, now=now, ids=ids, token=token, run_id=run_id, worker_id=worker_id, limit=limit,
                looks_again=looks > 1,
            )  # fmt: skip

        def missing(result: Claimed) -> list[Key]:
            if result.answered and not result.claims:
                raise _AnsweredBefore
            return [] if result.claims else [work]

        def due_in(result: Claimed) -> float | None:
            return None if result.due is None else max(0.001, result.due - now)

        def until() -> Awaitable[Claimed]:
            again = None if worker_id is None else ("work", (worker_id, run_id))
            return self._runtime.until(script_of, missing, [work], timeout, write=True, due_in=due_in, again=again)

        async def in_turn(token: str) -> Claimed:
            async with self._repeats.turn(token):
                try:
                    result = await until()
                except _AnsweredBefore:
                    return Claimed([], True)
                if not looks:  # a kept wait went on: this call is not recorded yet
                    await until_tick(_EMPTY_TOGETHER_SECONDS, time.monotonic())
                    row = ClaimRow([], self._runtime.now(), asked=claim_call(token, run_id, worker_id, limit).asked)
                    await self._runtime.write(lambda tx: tx.get("claim", token) or tx.put("claim", token, row))
                return result

        return until() if token is None else in_turn(token)

    @override
    async def start_attempt(self, rollout_id, worker_id=None) -> AttemptedRollout:
        now = await self._runtime.settle()
        call = call_of("start_attempt", worker_id=worker_id)
        attempt_id = "at-" + call_ids(8, call.token if call else None)(0)
        return self._hand_out(
            await self._runtime.write(lambda tx: start_attempt(tx, now, rollout_id, attempt_id, worker_id, call))
        )

    def _hand_out(self, claim: Claim) -> AttemptedRollout:
        rollout, attempt = claim
        if rollout.config.timeout_seconds is not None or rollout.config.unresponsive_seconds is not None:
            self._runtime.watch()
        return public_attempted(rollout, attempt)

    # --- adding spans ----------------------------------------------------------------------------------------------

    @override
    async def add_span(self, span) -> Span | None:
        return cast("Span | None", (await self._add([span]))[0])

    @override
    async def add_many_spans(self, spans) -> list[Span]:
        return [cast("Span", span) for span in await self._add(spans) if span is not None] if spans else []

    @property
    def add_unread_spans(self) -> Callable[[Sequence[AnySpan]], Awaitable[object]] | None:
        """The operation that stores unread spans. None if this store must read them: a subclass, a store that counts
        its operations, or a backend that does not keep unread spans."""
        replaced = "add_many_spans" in vars(self) or type(self).add_many_spans is not EngineStore.add_many_spans
        return None if replaced or not getattr(self._backend, "keeps_unread", False) else self._add

    async def _add(self, spans: Sequence[AnySpan]) -> list[AnySpan | None]:
        now = self._runtime.now()
        stored = await self._runtime.write(lambda tx: add_spans(tx, now, spans))
        duplicates = [span for span, new in zip(spans, stored, strict=True) if new is None]
        if duplicates:
            text = "Duplicated span added: %a of attempt %s, rollout %s (%d of %d spans of the call were there already)"
            first = duplicates[0]
            logger.error(text, first.span_id, first.attempt_id, first.rollout_id, len(duplicates), len(spans))
        return stored

    @override
    async def get_next_span_sequence_id(self, rollout_id, attempt_id) -> int:
        pairs = [(rollout_id, attempt_id)]
        return (await self._runtime.write(lambda tx: next_sequence_ids(tx, pairs)))[0]

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids) -> list[int]:
        return await self._runtime.write(lambda tx: next_sequence_ids(tx, rollout_attempt_ids))

    # --- changes ---------------------------------------------------------------------------------------------------

    @override
    async def update_rollout(
        self, rollout_id, input=UNSET, mode=UNSET, resources_id=UNSET, status=UNSET, config=UNSET, metadata=UNSET
    ) -> Rollout:
        changes = given(mode=mode, resources_id=resources_id, status=status)
        if not isinstance(input, Unset):
            changes["input"] = to_json(input)
        if not isinstance(metadata, Unset):
            changes["metadata"] = to_json(metadata, "metadata")
        if not isinstance(config, Unset):
            own = own_config(config)
            call_mode, changes["config"] = with_mode_of_config(changes.get("mode"), own)
            changes |= {} if call_mode is None else {"mode": call_mode}
        changes = checked(Rollout, changes)
        if "status" in changes:
            changes["status"] = check_status("rollout", changes["status"])
        now = await self._runtime.settle()
        call = call_of("update_rollout", **changes)

        def change(tx: Tx) -> Rollout:
            return update_rollout(tx, now, rollout_id, dict(changes), call)

        return public_rollout(await self._change(now, rollout_id, call, change))

    async def _change(self, now: float, rollout_id: str, call: Call | None, change: Callable[[Tx], R]) -> R:
        """Run a change of a rollout. A refusal is recorded with its token."""
        return _accepted(await self._runtime.write(lambda tx: refusable(tx, now, rollout_id, call, change)))

    @override
    async def update_attempt(
        self, rollout_id, attempt_id, status=UNSET, worker_id=UNSET, last_heartbeat_time=UNSET, metadata=UNSET,
        *, outcome=UNSET, outcome_reason=UNSET, error=UNSET, reward=UNSET, rewards=UNSET,
    ) -> Attempt:  # fmt: skip
        changes = given(
            status=status, worker_id=worker_id, last_heartbeat_time=last_heartbeat_time,
            outcome=outcome, outcome_reason=outcome_reason, error=error, reward=reward, rewards=rewards,
        )  # fmt: skip
        if not isinstance(metadata, Unset):
            changes["metadata"] = to_json(metadata, "metadata")
        if changes.get("last_heartbeat_time", 0.0) is None:
            raise BadRequestError("last_heartbeat_time is invalid; it cannot be a null value.")
        if "reward" in changes or "rewards" in changes:
            check_rewards(changes)
        changes = checked(Attempt, changes)
        if "status" in changes:
            changes["status"] = check_status("attempt", changes["status"])
        if changes.get("error") is not None:
            changes["error"] = evolve(changes["error"])
        now = await self._runtime.settle()
        call = call_of("update_attempt", attempt_id=attempt_id, **changes)

        def change(tx: Tx) -> Attempt:
            return update_attempt(tx, now, rollout_id, attempt_id, dict(changes), call)

        return public_attempt(await self._change(now, rollout_id, call, change))

    @override
    async def delete_rollouts(
        self, *, rollout_ids=None, run_id=UNSET, keep_last=None, max_age=None, max_bytes=None, force=False
    ) -> int:
        with valid("the bounds"):
            bounds = RetentionPolicy(keep_last=keep_last, max_age=max_age, max_bytes=max_bytes)
        run = None if isinstance(run_id, Unset) else (run_id,)
        call = call_of("delete_rollouts", rollout_ids=rollout_ids, run_id=run, bounds=bounds, force=force)
        if rollout_ids is None:
            if bounds == RetentionPolicy():
                if isinstance(run_id, Unset):
                    raise BadRequestError(
                        "Pass what to delete: rollout_ids=[...], run_id=..., or a limit (keep_last, ...)"
                    )
                bounds = RetentionPolicy(keep_last=0)
            return await self._runtime.delete_surplus(bounds, run, call)
        if bounds != RetentionPolicy() or not isinstance(run_id, Unset):
            raise BadRequestError("rollout_ids cannot be combined with run_id or a limit; call delete_rollouts twice")
        ids, now = list(rollout_ids), self._runtime.now()
        return _accepted(
            await self._runtime.write(lambda tx: delete(tx, now, ids, "force" if force else "refuse", call))
        )

    @override
    async def update_worker(self, worker_id, heartbeat_stats=UNSET, *, run_id=None, attempts=None) -> Worker:
        if heartbeat_stats is None:
            raise TypeError("heartbeat_stats is invalid; it cannot be a null value.")
        stats = heartbeat_stats
        if not isinstance(stats, Unset):
            stats = checked(Worker, {"heartbeat_stats": to_json(stats, "heartbeat_stats")})["heartbeat_stats"]
        named = None if attempts is None else check_names(attempts)
        self._runtime.watch()
        now = self._runtime.now()
        call = call_of(
            "update_worker",
            worker_id=worker_id,
            heartbeat_stats=stats,
            run_id=run_id,
            attempts=None if named is None else sorted(named),
        )
        if self._idle_beats is not None and named is not None and not named:
            await self._idle_beats.gather()
        return public_worker(
            await self._runtime.write(lambda tx: heartbeat(tx, now, worker_id, stats, run_id, named, call))
        )

    @override
    async def observe_metric(self, name, value, tags=None) -> None:
        await super().observe_metric(name, value, tags)  # once the texts are checked

    # --- resources -------------------------------------------------------------------------------------------------

    @override
    async def add_resources(self, resources, *, run_id=None) -> ResourcesUpdate:
        return await self.update_resources(
            "rs-" + call_ids(12, call_token("add_resources"))(0), resources, run_id=run_id
        )

    @override
    async def update_resources(self, resources_id, resources, *, run_id=None) -> ResourcesUpdate:
        if resources_id in ("", "latest"):
            raise BadRequestError(f"{resources_id!r} cannot be the id of resources; choose another id")
        with valid("resources"):
            named = _NAMED_RESOURCES.validate_python(stored_forms(dict(resources)))
        own = {name: _json_resource(name, resource) for name, resource in named.items()}
        token, now = call_token("update_resources"), self._runtime.now()
        update = await self._runtime.write(lambda tx: publish(tx, now, resources_id, token, own, run_id))
        return update.model_copy(deep=True)


class _AnsweredBefore(Exception):
    """Raised for a copy of an empty claim. If a new rollout woke it, another claim must be woken instead."""


def _request(
    input: object, config: RolloutConfig | None, metadata: Mapping[str, object] | None, **others: Any
) -> EnqueueRolloutRequest:
    """Return a request with copies of the values."""
    if isinstance(config, RolloutConfig):
        config = own_config(config)
    own = None if metadata is None else to_json(metadata, "metadata")
    try:
        return new_request(to_json(input), config=config, metadata=own, **others)
    except ValidationError as error:
        raise wrong_value("the rollout", error) from error


def _json_resource(name: str, resource: ResourceUnion) -> ResourceUnion:
    """Return a copy of a resource, with free-form values converted to JSON."""
    if isinstance(resource, CustomResource):
        return resource.model_copy(update={"values": to_json(resource.values, f"resources[{name!r}]")})
    return resource.model_copy(deep=True)


def _accepted(answer: R | Exception) -> R:
    """Return a result, or raise it if it is a refusal."""
    if isinstance(answer, Exception):
        raise answer
    return answer
