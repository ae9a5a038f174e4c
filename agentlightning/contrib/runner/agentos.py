"""`AgentOSRunner` runs agents whose actions a policy kernel checks: refusals become part of trace and outcome.

| the agent                                                   | the attempt ends as            |
| ----------------------------------------------------------- | ------------------------------ |
| was refused, continued and returned                         | its reward                     |
| was ended by the kernel (`AgentKernelPanic` left it)        | `policy_fault`                 |
| raised because it was refused (`OSError` of `ctx.read`)     | `policy_fault`                 |
| was refused, with `fail_on_violation=True`, and then did anything | `policy_fault`           |
| was left by the kernel's own panic (`kernel.panic(...)`)    | `infrastructure_fault`         |

A `policy_fault` gets the reward `violation_reward`. `user_space_execution` hides other exceptions of the agent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

from typing_extensions import override

from agentlightning.contrib.adapter.agentos import FlightRecorderAdapter
from agentlightning.contrib.agentos.attempt import (
    AttemptWatch,
    Violation,
    attempt_watch,
    note,
    readable_reason,
    watched,
)
from agentlightning.contrib.agentos.watch import Kernels, RecorderWatch
from agentlightning.errors import PolicyFault
from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.runner.executors import AgentExecutor, ThreadExecutor
from agentlightning.runner.outcome import Ending, check_policy_faults
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.otel import OtelTracer
from agentlightning.tracer.scope import current_scope
from agentlightning.types import AttemptedRollout, NamedResources
from agentlightning.utils.rewards import USABLE_REWARD, as_reward

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AgentOSRunner(LitAgentRunner[T]):
    """A runner that counts the actions that the kernel refused during each attempt.

    Args:
        kernel: a `KernelSpace` of agent-os-kernel; a `PolicyWatch` for kernels that the agent creates; a list of them;
            or any object with `on_violation(callback)`.
        tracer: the tracer; None uses the Trainer's, or `OtelTracer()`.
        fail_on_violation: the first violation ends the attempt as a policy fault, regardless of the agent's result;
            every later action is refused.
        emit_violations: record each violation as an annotation `policy_violation` in the trace.
        emit_entries: record the attempt's entries in the kernel's flight recorder as spans, at its end.
        violation_reward: the reward of an attempt that a violation ended.
        settings: settings of `LitAgentRunner`. The Trainer sets all others.

    Raises:
        TypeError: the kernel does not report violations.
        ValueError: `violation_reward` is not finite or exceeds 1e15 in size; or `isolation="process"`, in which the
            agent uses a copy of the kernel.
    """

    def __init__(
        self,
        kernel: object,
        tracer: Tracer | None = None,
        *,
        fail_on_violation: bool = False,
        emit_violations: bool = True,
        emit_entries: bool = True,
        violation_reward: float = -1.0,
        **settings: Any,
    ) -> None:
        super().__init__(tracer or OtelTracer(), **settings)
        if as_reward(violation_reward) is None:
            raise ValueError(f"violation_reward must be {USABLE_REWARD}; got {violation_reward!r}")
        if self._isolation == "process":
            raise ValueError(
                "AgentOSRunner can count refusals only in its own process, so isolation='process' is not supported. "
                "Remove it"
            )
        self._kernels = Kernels(kernel)
        if not self._kernels.sources:
            logger.warning("the kernel has no policy_engine, so it refuses no actions and no violations are counted")
        self._fail_on_violation = fail_on_violation
        self._emit_violations = emit_violations
        self._emit_entries = emit_entries
        self._violation_reward = violation_reward
        self._own = frozenset((*settings, *(("tracer",) if tracer is not None else ())))
        self._made_in = os.getpid()

    @property
    def kernel(self) -> object:
        """The kernel, or the list of kernels."""
        return self._kernels.kernel

    def take_from_trainer(self, **settings: Any) -> None:
        """Apply the settings of the Trainer that the constructor did not set."""
        for name, value in settings.items():
            if name not in self._own:
                setattr(self, f"_{name}", check_policy_faults(value) if name == "policy_faults" else value)

    @override
    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Prepare the worker as `LitAgentRunner` does, and subscribe to the kernels.

        Raises:
            RuntimeError: the kernel was passed from another process with an open flight recorder.
        """
        if self._made_in != os.getpid() and self._kernels.recorders:
            raise RuntimeError(
                "the flight recorder of the kernel is an open SQLite connection, which cannot be passed to another "
                "process. Run the runners in this process (strategy='shm'), or create policy = PolicyWatch(engine), "
                "pass it to AgentOSRunner and PolicyReward, and create the kernel in the agent: "
                "KernelSpace(policy_engine=policy, flight_recorder=RecorderWatch(...))"
            )
        super().init_worker(worker_id, store, **kwargs)
        self._kernels.subscribe()

    @override
    def _new_executor(self, store: LightningStore, worker_id: int) -> AgentExecutor:
        return _WatchedExecutor(self.get_agent(), self._concurrency, self._emit_entries)

    @override
    async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
        watch = AttemptWatch(
            rollout, emit=self._emit_violations, ends=self._fail_on_violation, reward=self._violation_reward
        )
        with watched(watch):
            return await super()._execute_rollout(rollout)


class _WatchedExecutor(ThreadExecutor):
    """Calls the agent, and sets its outcome by the actions that its kernel refused."""

    def __init__(self, agent: LitAgent[Any], concurrency: int, emit_entries: bool) -> None:
        super().__init__(agent, concurrency)
        self._emit_entries = emit_entries

    @override
    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        watch, start = attempt_watch(), time.time()
        if watch is None:  # a subclass that runs the rollout elsewhere
            return await super().call(rollout, resources)
        try:
            output = await super().call(rollout, resources)
        except Exception as error:
            fault = fault_of(error, watch)
            if fault is None or (isinstance(error, PolicyFault) and error.args == fault.args):
                raise
            raise fault from error
        finally:
            if self._emit_entries:
                emit_entries(watch, start)
        if watch.is_over:
            raise watch.fault()
        return output


def fault_of(error: Exception, watch: AttemptWatch) -> PolicyFault | None:
    """Return the policy fault that caused an exception of the agent; None if it has another cause."""
    panic = next((each for each in _causes(error) if _is_panic(each)), None)
    if panic is not None and watch.first is None:  # ended by another kind of signal: its budget, its trust
        note("panic", Violation(readable_reason(panic), str(getattr(panic, "agent_id", None))))
    if panic is not None or watch.is_over:
        return watch.fault()
    if isinstance(error, OSError) and watch.first is not None and watch.first.reason in readable_reason(error):
        return watch.fault()
    return None


def emit_entries(watch: AttemptWatch, start: float) -> None:
    """Add the attempt's flight recorder entries to its trace. Never raises; the outcome does not change."""
    scope = current_scope()
    if scope is None or not scope.delivers:
        return
    adapter = FlightRecorderAdapter(rollout_id=watch.rollout_id, attempt_id=watch.attempt_id)
    for recorder in [each for each in watch.entries if isinstance(each, RecorderWatch)]:
        try:
            spans = adapter.adapt(recorder.entries_of(watch, start))
        except Exception as error:  # for example of the recorder's disk
            logger.warning("[Rollout %s] could not read the flight recorder: %s", watch.rollout_id, error)
            continue
        for span in spans:
            scope.append(span, emitted=True)


def _causes(error: BaseException) -> Generator[BaseException]:
    """Yield an exception, those that it was raised from, and those that are grouped in it, each once."""
    pending, visited = [error], set[int]()
    while pending:
        each = pending.pop()
        if id(each) in visited:
            continue
        visited.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            pending.extend(cast("BaseExceptionGroup[BaseException]", each).exceptions)
        if each.__cause__ is not None:
            pending.append(each.__cause__)


def _is_panic(error: BaseException) -> bool:
    """Return True for the `AgentKernelPanic` of an agent, not of the kernel; by name, since it may not be installed."""
    classes = [cls for cls in type(error).__mro__ if cls.__module__.startswith("agent_control_plane.")]
    return any(cls.__name__ == "AgentKernelPanic" for cls in classes) and getattr(error, "agent_id", None) != "kernel"
