"""One attempt from its claim to its end: resources, hooks, trace, agent, reward, and one report to the store.

The order of writing is what makes a crash harmless: first all spans, the reward among them, in one delivery; then the
end of the attempt. Where the second does not follow, the lease runs out and another attempt is made.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentlightning.emitter.reward import find_final_reward
from agentlightning.litagent.litagent import LitAgent
from agentlightning.logging import log_context
from agentlightning.runner.base import Runner
from agentlightning.runner.budget import with_budget_reason
from agentlightning.runner.hooks import Hooks
from agentlightning.runner.isolation import Stage
from agentlightning.runner.outcome import SCORED, UNSCORED, AttemptFault, Ending, PolicyFaults, ending_of
from agentlightning.runner.play import play
from agentlightning.runner.report import log_failure, report
from agentlightning.runner.resources import ResourceShelf
from agentlightning.runner.results import RewardFn, bind_reward_fn, is_result, reward_of, reward_span, spans_of
from agentlightning.runner.signs import SignsOfLife
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.delivery import DELIVERY_SECONDS, TraceDeliveryError, deliver_spans
from agentlightning.tracer.scope import current_scope
from agentlightning.types import AttemptedRollout, NamedResources, Span

logger = logging.getLogger(__name__)


@dataclass
class AttemptPlayer:
    """Plays attempts; holds what is the same for all attempts of a worker."""

    runner: Runner[Any]
    agent: LitAgent[Any]
    store: LightningStore
    tracer: Tracer
    hooks: Hooks
    stage: Stage
    shelf: ResourceShelf
    signs: SignsOfLife
    log_prefix: Callable[[str | None], str]
    policy_faults: PolicyFaults = field(default_factory=dict[type[Exception], float])
    reward_fn: RewardFn | None = None
    _warned_unscored: bool = False

    async def play(self, rollout: AttemptedRollout) -> Ending:
        """Play one claimed rollout and report how it ended; what the agent raised is in `Ending.cause`.

        Raises:
            asyncio.CancelledError, KeyboardInterrupt: after the attempt was reported as cancelled.
        """
        about = {"run_id": rollout.run_id, "rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        with log_context(**about):
            return await self._play(rollout)

    async def _play(self, rollout: AttemptedRollout) -> Ending:
        began = time.monotonic()
        about = {"agent": self.agent, "runner": self.runner, "rollout": rollout}
        spans: list[Span] = []
        try:
            needed = self.agent.needs_resources
            resources = await self.shelf.resources_of(rollout, needed=needed)
            await self.hooks.call("on_rollout_start", **about)
            ending = await self._traced(rollout, resources, spans)
        except BaseException as error:  # the boundary: whatever ends an attempt becomes its outcome
            ending = ending_of(error, self.policy_faults)
        ending = await with_budget_reason(ending, self.store, rollout)
        if ending.cause is not None:
            await self.hooks.call("on_rollout_error", **about, error=ending.cause)
        await self.hooks.call("on_rollout_end", **about, spans=spans)
        await report(self.store, rollout, ending, self.log_prefix(rollout.rollout_id))
        self._log(rollout, ending, spans, time.monotonic() - began)
        if ending.stops_runner:
            assert ending.cause is not None
            raise ending.cause
        return ending

    def _log(self, rollout: AttemptedRollout, ending: Ending, spans: list[Span], seconds: float) -> None:
        prefix = self.log_prefix(rollout.rollout_id)
        log_failure(ending, prefix)
        if ending.outcome == "unscored" and not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "%s the agent returned None and emitted no reward: the rollout is not trained (no_reward). "
                "Return a number, or call emit_reward. Said once per worker.",
                prefix,
            )
        reward = find_final_reward(spans)
        logger.debug("%s %s after %.2f s, %d spans, reward %s", prefix, ending.outcome, seconds, len(spans), reward)

    # --- inside the trace --------------------------------------------------------------------------------------------

    async def _traced(self, rollout: AttemptedRollout, resources: NamedResources, spans: list[Span]) -> Ending:
        """Run the agent in its trace context; fills `spans` with what was stored, in order."""
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        about = {"agent": self.agent, "runner": self.runner, "tracer": self.tracer, "rollout": rollout}
        ending = UNSCORED
        try:
            async with self.tracer.trace_context(name=rollout_id, rollout_id=rollout_id, attempt_id=attempt_id):
                try:
                    await self.hooks.call("on_trace_start", **about)
                    output = await self._call_agent(rollout, resources)
                    await self.hooks.call("on_trace_end", **about)
                    ending, results = await self._judge(output, rollout)
                except Exception as error:  # so that the trace of a failed attempt is delivered like any other
                    ending = ending_of(error, self.policy_faults)
                    results = [] if ending.reward is None else [reward_span(ending.reward, rollout)]
                apart = self._keep(results)
            if apart:
                apart = await deliver_spans(self.store, apart, time.monotonic() + DELIVERY_SECONDS)
            spans.extend([*self._trace(), *apart])
        except TraceDeliveryError as error:
            spans.extend(self._trace())
            if not ending.excluded:
                return ending_of(error, {})
            logger.error("%s %s", self.log_prefix(rollout_id), error)
        return ending

    async def _call_agent(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        async with self.signs.during(rollout):
            return await self.stage.call(rollout, resources)

    async def _judge(self, output: Any, rollout: AttemptedRollout) -> tuple[Ending, list[Span]]:
        """Return how an attempt ends whose agent returned `output`, and the spans that this adds."""
        if self.reward_fn is not None and not is_result(output):
            output = await self._reward_of(self.reward_fn, output, rollout)
        results = spans_of(output, rollout)
        if find_final_reward(results) is not None or find_final_reward(self._trace()) is not None:
            return SCORED, results
        return (SCORED if await self._was_scored_elsewhere(rollout) else UNSCORED), results

    async def _was_scored_elsewhere(self, rollout: AttemptedRollout) -> bool:
        """True if the store has a reward of the attempt that did not pass through this process."""
        try:
            spans = await self.store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id, name=AGL_ANNOTATION)
        except Exception as error:  # the store's failure, which no mapping of the user's may take for the agent's
            raise AttemptFault(f"The store did not say whether there is a reward: {error}") from error
        return find_final_reward(spans.items) is not None

    async def _reward_of(self, reward_fn: RewardFn, output: Any, rollout: AttemptedRollout) -> Any:
        call = bind_reward_fn(reward_fn, output, rollout, self._trace())
        asynchronous = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(type(reward_fn).__call__)
        threads = None if asynchronous else self.stage.threads
        value = await play(call, threads=threads, limit=rollout.config.timeout_seconds, label=rollout.rollout_id)
        return reward_of(value, reward_fn)

    def _keep(self, results: list[Span]) -> list[Span]:
        """Add spans to the trace that is open; return them where the tracer keeps no scope that delivers."""
        scope = current_scope()
        if scope is None or not scope.delivers:
            return results
        known = {span.span_id for span in scope.spans()}
        for span in results:
            if span.span_id not in known:
                scope.append(span)
        return []

    def _trace(self) -> list[Span]:
        try:
            return self.tracer.get_last_trace()
        except NotImplementedError:
            return []
