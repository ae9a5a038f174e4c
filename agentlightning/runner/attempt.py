"""One attempt from its claim to its end: resources, hooks, trace, agent, reward, and the report to the store.

The order of writes makes a crash harmless: first all spans, including the reward, in one delivery, then the end of the
attempt. Without the second write the lease runs out, and the rollout is retried.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentlightning.emitter.reward import find_final_reward
from agentlightning.errors import BusyError
from agentlightning.litagent.decorator import is_coroutine_function
from agentlightning.litagent.litagent import LitAgent
from agentlightning.logging import log_context
from agentlightning.runner.base import Hooks, Runner, log_prefix
from agentlightning.runner.executors import AgentExecutor, invoke
from agentlightning.runner.heartbeat import Heartbeats
from agentlightning.runner.outcome import (
    SCORED,
    UNSCORED,
    AttemptFault,
    Ending,
    InvalidReward,
    MissingResources,
    PolicyFaults,
    StoreAway,
    describe,
    ending_of,
    log_failure,
    report,
    with_budget_reason,
)
from agentlightning.runner.results import RewardFn, bind_reward_fn, is_result, reward_of, reward_span, spans_of
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.delivery import TraceDeliveryError, deliver_spans
from agentlightning.tracer.scope import current_scope, spans_left_out
from agentlightning.types import AttemptedRollout, NamedResources, ResourcesUpdate, Span
from agentlightning.types.resources import agents_form
from agentlightning.utils.backoff import retry_for
from agentlightning.utils.exceptions import readable
from agentlightning.utils.rewards import USABLE_REWARD, as_reward

logger = logging.getLogger(__name__)


REPORT_SECONDS = 10.0
"""Minimum seconds for the report of the end of an attempt, regardless of the time that the store was unreachable."""
KEPT_VERSIONS = 8
"""Number of resource versions that a worker caches."""


class ResourceCache:
    """Looks up resources in a store; used by one event loop. Versions never change, so each is fetched once."""

    def __init__(self, store: LightningStore, store_unreachable_timeout: float) -> None:
        self._store = store
        self._store_unreachable_timeout = store_unreachable_timeout
        self._kept: OrderedDict[tuple[str, int], NamedResources] = OrderedDict()

    async def resources_of(self, rollout: AttemptedRollout, *, required: bool) -> NamedResources:
        """Return the resources that the rollout names; the latest ones if it names none.

        Raises:
            MissingResources: they do not exist, or none were published and they are `required`.
            StoreAway: the store did not respond for `store_unreachable_timeout` seconds.
        """
        id, version = rollout.resources_id, rollout.resources_version
        key = None if id is None or version is None else (id, version)
        if key in self._kept:
            return self._kept[key]
        try:
            update = await retry_for(self._store_unreachable_timeout, lambda: self._named_by(rollout), "resources")
        except (OSError, BusyError) as error:
            raise StoreAway(f"The store returned no resources of rollout {rollout.rollout_id}: {error}") from error
        if update is not None:
            resources = {name: agents_form(resource) for name, resource in update.resources.items()}
            named_resources = cast("NamedResources", resources)
            if key is not None:
                self._kept[key] = named_resources
                while len(self._kept) > KEPT_VERSIONS:
                    self._kept.popitem(last=False)
            return named_resources
        if id is not None:
            which = id if version is None else f"{id}, version {version},"
            raise MissingResources(
                f"Failed to fetch resources: {which} does not exist, but rollout {rollout.rollout_id} refers to it"
            )
        if required:
            raise MissingResources(
                f"Failed to fetch resources: rollout {rollout.rollout_id} has none and none were published. Set the "
                "Trainer's initial_resources, call store.add_resources, or set needs_resources = False on the agent."
            )
        return {}

    def _named_by(self, rollout: AttemptedRollout) -> Coroutine[object, object, ResourcesUpdate | None]:
        if rollout.resources_id is None:
            return self._store.get_latest_resources(run_id=rollout.run_id)
        return self._store.get_resources_by_id(rollout.resources_id, rollout.resources_version)


class _Outage:
    """The remaining time that the store may be unreachable at the end of one attempt; it starts at the first query."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    def left(self) -> float:
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return max(self._end - now, min(REPORT_SECONDS, self._seconds))


@dataclass
class AttemptRunner:
    """Runs the attempts of one worker; owns their shared resources until `close`."""

    runner: Runner[Any]
    agent: LitAgent[Any]
    store: LightningStore
    tracer: Tracer
    hooks: Hooks
    executor: AgentExecutor
    heartbeats: Heartbeats
    store_unreachable_timeout: float
    policy_faults: PolicyFaults = field(default_factory=dict[type[Exception], float])
    reward_fn: RewardFn | None = None
    reward_dimensions: tuple[str, ...] = ()
    _warned_unscored: bool = False
    _warned_bool: bool = False
    _endings: dict[str, Ending] = field(default_factory=dict[str, Ending])
    """Endings of the attempts that `run_by` still runs, by attempt id."""

    def __post_init__(self) -> None:
        self._resources = ResourceCache(self.store, self.store_unreachable_timeout)

    def close(self) -> None:
        """End the threads and processes of the worker. May be called twice."""
        self.executor.close()
        self.heartbeats.close()

    async def run_by(
        self, execute: Callable[[AttemptedRollout], Awaitable[object]], rollout: AttemptedRollout
    ) -> Ending:
        """Run one claimed rollout through a method that programs override and that must call `run`.

        An exception before that call, or no call, is reported as the end of the attempt; a later one is raised.
        """
        id, began = rollout.attempt.attempt_id, time.monotonic()
        try:
            answer = await execute(rollout)
            if id in self._endings or isinstance(answer, Ending):  # for an attempt that the method has reported itself
                return self._endings.get(id) or cast("Ending", answer)
            name = getattr(execute, "__qualname__", "execute")
            raise AttemptFault(
                f"{name} returned without running the rollout. To run it, call: return await "
                f"super().{getattr(execute, '__name__', 'execute')}(...)"
            )
        except Exception as error:  # the boundary to the user's code
            if id in self._endings:
                raise
            ending = Ending("failed", "infrastructure_fault", "exception", describe(error), cause=readable(error))
            prefix = self._prefix(rollout)
            await report(self.store, rollout, ending, prefix, seconds=self.store_unreachable_timeout)
            self._log(rollout, ending, [], time.monotonic() - began)
            return ending
        finally:
            self._endings.pop(id, None)

    async def run(self, rollout: AttemptedRollout) -> Ending:
        """Run one claimed rollout and report its end; the agent's exception is in `Ending.cause`.

        Raises:
            asyncio.CancelledError, KeyboardInterrupt: after the attempt was reported as cancelled.
        """
        ids = {"run_id": rollout.run_id, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        with log_context(**ids):
            began = time.monotonic()
            about = {"agent": self.agent, "runner": self.runner, "rollout": rollout}
            spans: list[Span] = []
            outage = _Outage(self.store_unreachable_timeout)
            try:
                resources = await self._resources.resources_of(rollout, required=self.agent.needs_resources)
                await self.hooks.call("on_rollout_start", **about)
                ending = await self._traced(rollout, resources, spans, outage)
            except BaseException as error:  # the boundary: every exception becomes the attempt's outcome
                ending = ending_of(error, self.policy_faults)
            ending = await with_budget_reason(ending, self.store, rollout)
            if ending.cause is not None:
                await self.hooks.call("on_rollout_error", **about, error=ending.cause)
            await self.hooks.call("on_rollout_end", **about, spans=spans)
            await report(self.store, rollout, ending, self._prefix(rollout), seconds=outage.left())
            self._log(rollout, ending, spans, time.monotonic() - began)
            if ending.stops_runner:
                assert ending.cause is not None
                raise ending.cause
            self._endings[rollout.attempt.attempt_id] = ending
            return ending

    def _prefix(self, rollout: AttemptedRollout) -> str:
        return log_prefix(self.runner.worker_id, rollout.rollout_id)

    def _log(self, rollout: AttemptedRollout, ending: Ending, spans: list[Span], seconds: float) -> None:
        prefix = self._prefix(rollout)
        log_failure(ending, prefix)
        if ending.outcome == "unscored" and not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "%s the agent returned None and emitted no reward: the rollout counts in no mean (no_reward). Return "
                "a number or call emit_reward, unless the algorithm computes the reward (group_reward). Logged once "
                "per worker.",
                prefix,
            )
        reward = find_final_reward(spans)
        logger.debug("%s %s after %.2f s, %d spans, reward %s", prefix, ending.outcome, seconds, len(spans), reward)

    # --- inside the trace --------------------------------------------------------------------------------------------

    async def _traced(
        self, rollout: AttemptedRollout, resources: NamedResources, spans: list[Span], outage: _Outage
    ) -> Ending:
        """Run the agent in its trace context; fill `spans` with the stored spans, in order."""
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        about = {"agent": self.agent, "runner": self.runner, "tracer": self.tracer, "rollout": rollout}
        ending = UNSCORED
        try:
            async with self.tracer.trace_context(name=rollout_id, rollout_id=rollout_id, attempt_id=attempt_id):
                try:
                    await self.hooks.call("on_trace_start", **about)
                    async with self.heartbeats.of_attempt(rollout):
                        output = await self.executor.call(rollout, resources)
                    await self.hooks.call("on_trace_end", **about)
                    ending, results = await self._judge(output, rollout, outage)
                except Exception as error:  # also delivers the trace of a failed attempt
                    ending = ending_of(error, self.policy_faults)
                    results = [] if ending.reward is None else [reward_span(ending.reward, rollout)]
                apart = self._keep(results)
                outage.left()  # from here on the store must answer
            if apart:
                apart = await deliver_spans(self.store, apart, outage.left())
            spans.extend([*self._trace(), *apart])
            if ending.reason is None and spans_left_out(spans):
                ending = replace(ending, reason="spans_cut")
        except TraceDeliveryError as error:
            spans.extend(self._trace())
            if not ending.excluded:
                return ending_of(error, {})
            logger.error("%s %s", self._prefix(rollout), error)
        return ending

    async def _judge(self, output: object, rollout: AttemptedRollout, outage: _Outage) -> tuple[Ending, list[Span]]:
        """Return the ending of an attempt by the agent's `output`, and the spans for it."""
        dimensions = self.reward_dimensions
        if self.reward_fn is not None and not is_result(output):
            call = bind_reward_fn(self.reward_fn, output, rollout, self._trace())
            threads = None if is_coroutine_function(self.reward_fn) else self.executor.threads
            limit = rollout.config.timeout_seconds
            value = await invoke(call, threads=threads, limit=limit, label=rollout.rollout_id)
            output = reward_of(value, self.reward_fn)
            if isinstance(output, Mapping) and len(output) == 1:  # the reward, of any name
                dimensions = tuple(output)
        if isinstance(output, bool) and not self._warned_bool:
            self._warned_bool = True
            text = "%s The reward is not a number: %r is used as %g. Return a float. Logged once per worker."
            logger.warning(text, self._prefix(rollout), output, output)
        results = spans_of(output, rollout, dimensions)
        if (earned := find_final_reward([*self._trace(), *results])) is not None:
            return _scored(earned), results
        # the store may have a reward that another process sent
        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        try:
            spans = await retry_for(
                outage.left(), lambda: self.store.query_spans(*ids, name=AGL_ANNOTATION), "query for rewards"
            )
        except (OSError, BusyError) as error:
            raise StoreAway(f"The query for rewards in the store failed: {error}") from error
        except Exception as error:  # the store's failure, to which the user's mapping must not apply
            raise AttemptFault(f"The query for rewards in the store failed: {error}") from error
        earned = find_final_reward(spans.items)
        return (UNSCORED if earned is None else _scored(earned)), results

    def _keep(self, results: list[Span]) -> list[Span]:
        """Add spans to the open trace; return them if the tracer has no scope that delivers them."""
        scope = current_scope()
        if scope is None or not scope.delivers:
            return results
        span_ids = {span.span_id for span in scope.spans()}
        for span in results:
            if span.span_id not in span_ids:
                scope.append(span)
        return []

    def _trace(self) -> list[Span]:
        try:
            return self.tracer.get_last_trace()
        except NotImplementedError:
            return []


def _scored(reward: float) -> Ending:
    """Return the ending of an attempt with this final reward, which is checked here."""
    if as_reward(reward) is not None:
        return SCORED
    return ending_of(InvalidReward(f"The last reward of the attempt is {reward}; expected {USABLE_REWARD}"), {})
