"""`AgentOSRunner` runs agents whose actions a policy kernel checks, and records its violations in the trace."""

from __future__ import annotations

from typing import Any, TypeVar

from typing_extensions import override

from agentlightning.contrib.agentos import VIOLATION_NAME, check_kernel, violations_of_attempt
from agentlightning.emitter import emit_annotation
from agentlightning.errors import PolicyFault
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.runner.outcome import Ending, check_policy_faults
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout

T = TypeVar("T")


class AgentOSRunner(LitAgentRunner[T]):
    """A runner that knows what the kernel refused during each attempt.

    Args:
        kernel: see `agentlightning.contrib.agentos`.
        tracer: None is `OtelTracer()`, or the Trainer's.
        fail_on_violation: the first violation ends the attempt as a fault of the policy, with `violation_reward`.
        emit_violations: record each violation as an annotation `policy_violation` in the trace.
        settings: of `LitAgentRunner`. What is left out comes from the Trainer.

    Raises:
        TypeError: the kernel does not tell of violations.
    """

    def __init__(
        self,
        kernel: object,
        tracer: Tracer | None = None,
        *,
        fail_on_violation: bool = False,
        emit_violations: bool = True,
        violation_reward: float = -1.0,
        **settings: Any,
    ) -> None:
        super().__init__(tracer or OtelTracer(), **settings)
        self.kernel = check_kernel(kernel)
        self._fail_on_violation = fail_on_violation
        self._emit_violations = emit_violations
        self._violation_reward = violation_reward
        self._own = frozenset((*settings, *(("tracer",) if tracer is not None else ())))
        self._watching = False

    def take_from_trainer(self, **settings: Any) -> None:
        """Take those settings of the Trainer that were not given here."""
        for name, value in settings.items():
            if name not in self._own:
                setattr(self, f"_{name}", check_policy_faults(value) if name == "policy_faults" else value)

    @override
    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        super().init_worker(worker_id, store, **kwargs)
        if not self._watching:
            self._watching = True
            self.kernel.on_violation(self._note)

    @override
    async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
        token = violations_of_attempt.set([])
        try:
            return await super()._execute_rollout(rollout)
        finally:
            violations_of_attempt.reset(token)

    def _note(self, violation: object) -> None:
        found = violations_of_attempt.get()
        if found is None:  # somebody else uses the kernel as well
            return
        found.append((self.kernel, violation))
        if self._emit_violations:
            emit_annotation({"name": VIOLATION_NAME, "violation": str(violation)})
        if self._fail_on_violation:
            raise PolicyFault(f"the policy kernel refused an action: {violation}", reward=self._violation_reward)
