"""LitAgentRunner: claims rollouts, runs an agent on them, and reports their outcomes."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import os
import socket
import threading
import types
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast, get_args

from typing_extensions import override

from agentlightning.base.process_secrets import server_token
from agentlightning.base.terminal import counted
from agentlightning.litagent.decorator import as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.agent_process import ProcessExecutor, pickled_parts
from agentlightning.runner.attempt import AttemptRunner
from agentlightning.runner.base import Hooks, Runner, StopEvent, log_prefix, worker_label
from agentlightning.runner.claims import Claims, Stopping, all_or_first_failure, cancel_all
from agentlightning.runner.executors import AgentExecutor, Isolation, ThreadExecutor
from agentlightning.runner.heartbeat import HeartbeatMode, Heartbeats
from agentlightning.runner.outcome import Ending, PolicyFaults, check_policy_faults
from agentlightning.runner.results import RewardFn, check_dimensions, check_reward_fn
from agentlightning.store.base import LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Hook, NamedResources, Rollout, RolloutMode
from agentlightning.utils.backoff import OUTAGE_SECONDS
from agentlightning.utils.concurrency.main_thread import has_loop_to_itself, has_main_thread_to_itself
from agentlightning.utils.server_launcher import SERVER_THREAD
from agentlightning.utils.setting_checks import check_choice, check_count

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LitAgentRunner(Runner[T]):
    """The runner. Up to `concurrency` rollouts run concurrently: asynchronous agents as tasks, others in threads.

    With `concurrency=1` a synchronous agent runs on the main thread if the runner's loop runs on another thread: in the
    processes of `cs`, and in `shm` with one runner. Then a time limit raises an exception in the agent.

    Args:
        tracer: records the agent's calls; not shared with other workers.
        max_rollouts: number of rollouts of this worker, including failed ones, after which it ends.
        poll_interval: seconds for which a request for work is held open; up to 20 while there is no work.
        heartbeat_interval: seconds between heartbeats, doubled while idle; 0 or less means no heartbeats and no lease.
        interval_jitter: maximum deviation of an interval, in seconds.
        heartbeat_launch_mode: `thread`, or `asyncio` on the runner's loop.
        heartbeat_include_gpu: include the state of the GPUs in heartbeats.
        concurrency: number of rollouts that run concurrently.
        reward_fn: returns the reward for results that are neither a number, None nor spans; see `results.py`.
        reward_dimensions: names of the rewards in a dict that an agent returns, starting with the one to learn from; by
            default `reward` or `primary` is that one.
        policy_faults: exception classes that count as the policy's fault, and the reward of each.
        isolation: `thread` runs the agent in this process; `process` runs each attempt in a separate process, so that
            an agent that ignores its time limit, holds the interpreter, or crashes can be killed.
        store_unreachable_timeout: seconds for which the store may be unreachable. During this time requests for work
            are retried, and spans and ends of attempts are buffered; then the runner ends with an error. The limit also
            applies to the Trainer's algorithm and gateway. Time in which the process was suspended does not count.
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: str = "thread",
        heartbeat_include_gpu: bool = False,
        *,
        concurrency: int = 1,
        reward_fn: RewardFn | None = None,
        reward_dimensions: Sequence[str] | None = None,
        policy_faults: PolicyFaults | None = None,
        isolation: str = "thread",
        store_unreachable_timeout: float = OUTAGE_SECONDS,
    ) -> None:
        super().__init__()
        if not isinstance(tracer, Tracer):
            raise TypeError(
                f"tracer must be a Tracer, such as OtelTracer(); got {type(tracer).__name__}. Pass agent and store to "
                "the context: LitAgentRunner(tracer=OtelTracer()).run_context(agent=agent, store=store)"
            )
        if isolation == "process" and not hasattr(os, "killpg"):
            raise RuntimeError(
                "isolation='process' requires process groups, which this system does not support (POSIX only); use "
                "'thread'"
            )
        self._tracer = tracer
        self._max_rollouts = None if max_rollouts is None else check_count("max_rollouts", max_rollouts, minimum=0)
        self._poll_interval = poll_interval
        self._heartbeat_interval = heartbeat_interval
        self._interval_jitter = interval_jitter
        if heartbeat_launch_mode not in ("thread", "asyncio"):
            raise ValueError(
                f"Unsupported heartbeat launch mode: {heartbeat_launch_mode!r}; expected 'thread' or 'asyncio'"
            )
        self._heartbeat_mode: HeartbeatMode = heartbeat_launch_mode
        self._heartbeat_include_gpu = heartbeat_include_gpu
        self._concurrency = check_count("concurrency", concurrency)
        self._reward_fn = check_reward_fn(reward_fn)
        self._reward_dimensions = check_dimensions(reward_dimensions)
        self._policy_faults = check_policy_faults(policy_faults)
        self._isolation: Isolation = check_choice("isolation", isolation, get_args(Isolation))
        self.store_unreachable_timeout = store_unreachable_timeout
        self._agent: LitAgent[T] | None = None
        self._hooks = Hooks(None)
        self._store: LightningStore | None = None
        self._attempts: AttemptRunner | None = None
        self._parts = b""
        self._begun = self._finished = 0

    # --- life --------------------------------------------------------------------------------------------------------

    @override
    def init(self, agent: LitAgent[T], *, hooks: Sequence[Hook] | None = None, **kwargs: object) -> None:
        """Set the agent (a plain function is wrapped) and hooks, and initialise the tracer."""
        server_token()  # removed from the environment before an agent can start a process
        self._hooks = Hooks(hooks)
        self._agent = as_agent(agent)
        self._agent.set_runner(self)
        if self._isolation == "process":
            tracer = copy.copy(self._tracer)  # without the store of an earlier worker
            tracer._store = None
            if isinstance(tracer, OtelTracer):  # nor a default store, which may hold the token
                tracer._default_store = None
            self._parts = pickled_parts(self._agent, LitAgentRunner[T](tracer))
        self._tracer.init()

    @override
    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: object) -> None:
        """Set the store. Call it in the process and thread that run the rollouts."""
        self.worker_id = worker_id
        self._store = store
        whole = complete(store)
        self._tracer.store_unreachable_timeout = self.store_unreachable_timeout
        self._tracer.init_worker(worker_id, whole)
        heartbeats = Heartbeats(
            whole,
            self.get_worker_label(),
            interval=self._heartbeat_interval,
            jitter=self._interval_jitter,
            mode=self._heartbeat_mode,
            include_gpu=self._heartbeat_include_gpu,
        )
        self._attempts = AttemptRunner(
            runner=self,
            agent=self.get_agent(),
            store=whole,
            tracer=self._tracer,
            hooks=self._hooks,
            executor=self._new_executor(whole, worker_id),
            heartbeats=heartbeats,
            store_unreachable_timeout=self.store_unreachable_timeout,
            policy_faults=self._policy_faults,
            reward_fn=self._reward_fn,
            reward_dimensions=self._reward_dimensions,
        )

    def _new_executor(self, store: LightningStore, worker_id: int) -> AgentExecutor:
        if self._isolation == "process":
            return ProcessExecutor(self._parts, store, worker_id)
        return ThreadExecutor(self.get_agent(), self._concurrency)

    @override
    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        attempts, self._attempts, self.worker_id = self._attempts, None, None
        try:
            if attempts is not None:
                attempts.close()
        finally:
            self._tracer.teardown_worker(worker_id)

    @override
    def teardown(self, *args: object, **kwargs: object) -> None:
        self._agent = self._store = self.worker_id = self._attempts = None
        self._hooks = Hooks(None)
        self._tracer.teardown()

    @property
    def max_rollouts(self) -> int | None:
        """Number of rollouts after which `iter` ends, or None."""
        return self._max_rollouts

    @property
    def tracer(self) -> Tracer:
        """The tracer."""
        return self._tracer

    @property
    def agent(self) -> LitAgent[T]:
        """The agent; see `get_agent`."""
        return self.get_agent()

    @property
    def store(self) -> LightningStore:
        """The store; see `get_store`."""
        return self.get_store()

    def get_agent(self) -> LitAgent[T]:
        """Return the agent.

        Raises:
            ValueError: `init` has not been called.
        """
        if self._agent is None:
            raise ValueError("The runner has no agent. Call init() first.")
        return self._agent

    def get_store(self) -> LightningStore:
        """Return the store.

        Raises:
            ValueError: `init_worker` has not been called.
        """
        if self._store is None:
            raise ValueError("The runner has no store. Call init_worker() first.")
        return self._store

    def get_worker_id(self) -> str:
        """Return the display name of this worker, such as `Worker-0`. Its name in the store is `get_worker_label`."""
        return log_prefix(self.worker_id).strip("[]")

    def get_worker_label(self) -> str:
        """Return the unique name of this worker in the store; the monitor of its process uses the same name.

        Raises:
            ValueError: `init_worker` has not been called.
        """
        if self.worker_id is None:
            raise ValueError("The runner has no worker. Call init_worker() first.")
        return worker_label(socket.gethostname(), os.getpid(), self.worker_id)

    def wants_main_thread(self, agent: LitAgent[T]) -> bool:
        """True if the runner's event loop should leave the main thread to this agent.

        Agents with a synchronous method run there, one rollout at a time. An asynchronous agent runs on the loop.
        """
        return self._concurrency == 1 and self._isolation == "thread" and agent.has_sync_method()

    # --- work --------------------------------------------------------------------------------------------------------

    @override
    async def iter(self, *, event: StopEvent | None = None, exit_when_idle: float | None = None) -> None:
        """Run rollouts of the queue until `event` is set, `max_rollouts` have been run, or (with `exit_when_idle`)
        there was no work for that many seconds.

        Without both arguments it also returns once the queue is empty and nothing can fill it: if the store is in the
        memory of this process, which has no server, no other task and no other thread of the program.

        Rollouts that are running when the event is set are finished. If the call is cancelled, they are also cancelled
        and reported as cancelled.

        Raises:
            StoreUnreachableError: the store was unreachable for longer than `store_unreachable_timeout`.
            AgentProcessDied: with `isolation="process"`, no process can load the agent.
        """
        store, label, attempts = complete(self.get_store()), self.get_worker_label(), self._ready()
        self._begun = self._finished = 0
        if event is None and exit_when_idle is None and _nothing_else_enqueues(store):
            exit_when_idle = 0.0
        held = attempts.heartbeats.held
        claims = Claims(store, label, held, self._poll_interval, self.store_unreachable_timeout)
        logger.info("%s serves the queue as %s", self._log_prefix(), label)
        try:
            async with attempts.heartbeats.of_worker():
                self._note_whether_alone(attempts)
                stopping = Stopping(event)
                lane = partial(self._lane, attempts, claims, stopping, exit_when_idle)
                try:
                    await all_or_first_failure([asyncio.create_task(lane()) for _ in range(self._concurrency)])
                finally:
                    await stopping.close()
                    await claims.close()
        finally:
            logger.info("%s finished after %s", self._log_prefix(), counted(self._finished, "rollout"))

    @override
    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
    ) -> Rollout:
        store, attempts = self.get_store(), self._ready()
        resources_id = (await store.add_resources(resources)).resources_id if resources is not None else None
        async with attempts.heartbeats.of_worker():
            self._note_whether_alone(attempts, event)
            rollout = await store.start_rollout(
                input=input, mode=mode, resources_id=resources_id, worker_id=self.get_worker_label()
            )
            with attempts.heartbeats.holding(rollout):
                running, stopping = asyncio.create_task(attempts.run_by(self.execute, rollout)), Stopping(event)
                try:
                    await asyncio.wait({running, stopping.noticed}, return_when=asyncio.FIRST_COMPLETED)
                    cause = running.result().cause if running.done() else None
                finally:  # cancelled when the event is set
                    await cancel_all([running])
                    await stopping.close()
        if cause is not None:
            raise cause
        finished = await store.get_rollout_by_id(rollout.rollout_id)
        if finished is None:
            raise RuntimeError(f"Failed to fetch completed rollout by id after step: {rollout.rollout_id}")
        return finished

    def _note_whether_alone(self, attempts: AttemptRunner, event: StopEvent | None = None) -> None:
        """Let a synchronous agent block the loop on the main thread if nothing else needs the loop: no other task or
        server, no heartbeat, and no event that could end the attempt."""
        needed = self._heartbeat_mode == "asyncio" or event is not None
        attempts.executor.threads.may_hold_loop = not needed and has_main_thread_to_itself()

    @override
    async def execute(self, task: AttemptedRollout) -> Ending:
        """Call `_execute_rollout`. Subclasses of `Runner` override this method."""
        return await self._execute_rollout(task)

    async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
        """Run one claimed rollout. Override it to add steps before or after. Failures are part of the result."""
        return await self._ready().run(rollout)

    def _ready(self) -> AttemptRunner:
        if self._attempts is None:
            raise ValueError("The runner is not initialised. Call init() and init_worker() first.")
        return self._attempts

    async def _lane(
        self, attempts: AttemptRunner, claims: Claims, stopping: Stopping, exit_when_idle: float | None
    ) -> None:
        """Claim and run, one rollout at a time."""
        executor = attempts.executor
        while not stopping.is_set() and (self._max_rollouts is None or self._begun < self._max_rollouts):
            self._begun += 1
            if executor.prepares and not await stopping.until_set(executor.prepare()):
                return
            rollout = await claims.next(stopping, exit_when_idle)
            if rollout is None:
                executor.spare()
                self._begun -= 1
                return
            with attempts.heartbeats.holding(rollout):
                await attempts.run_by(self.execute, rollout)
            self._finished += 1
            if self._finished == 1 or self._finished % 100 == 0:
                logger.info("%s %s done", self._log_prefix(), counted(self._finished, "rollout"))

    def _log_prefix(self, rollout_id: str | None = None) -> str:
        """Return `[Worker-0] [ro-...]`, or `[Worker-0]` without a rollout."""
        return log_prefix(self.worker_id, rollout_id)


def _nothing_else_enqueues(store: LightningStore) -> bool:
    """Return whether the store is in the memory of this process and only the caller's task runs there."""
    is_shared = store.capabilities.get("distributed", True)
    others = set(threading.enumerate()) - {threading.current_thread()}
    return not is_shared and not any(map(_may_enqueue, others)) and has_loop_to_itself()


def _may_enqueue(thread: threading.Thread) -> bool:
    """Return whether a thread may enqueue work: true for servers and all threads except ours, an exporter's, and those
    of a loop's executor, which work for its tasks."""
    return thread.name == SERVER_THREAD or not thread.name.startswith(("agl-", "agent", "asyncio_", "Otel"))


def overrides_only_execute(cls: type[Runner[Any]]) -> bool:
    """Return whether a subclass of `Runner` defines `execute` and neither `iter` nor `step`."""
    mine, base = cast("Any", cls), cast("Any", Runner)
    return mine.execute is not base.execute and mine.iter is base.iter and mine.step is base.step


class _Behind(LitAgentRunner[Any]):
    """A runner that claims rollouts for such a class, which may have no constructor parameter `tracer`."""

    @functools.wraps(cast("Any", LitAgentRunner).__init__)  # the Trainer chooses the settings by this signature
    def __init__(self, *args: Any, **settings: Any) -> None:
        if not args:
            settings.setdefault("tracer", OtelTracer())
        super().__init__(*args, **settings)


@functools.cache
def serving(cls: type[Runner[Any]]) -> type[Runner[Any]]:
    """Return a class that claims rollouts: `cls` itself, or one that adds `LitAgentRunner` if `cls` has only `execute`.

    `super().execute(task)` of such a class runs the rollout. Its objects can be pickled if those of `cls` can.
    """
    if not overrides_only_execute(cls):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = types.new_class(cls.__name__, (cls, _Behind), {}, lambda body: body.update(names))
    made.__reduce_ex__ = lambda self, protocol: (_restored, (cls,), self.__getstate__())  # type: ignore[method-assign]
    return made


def _restored(cls: type[Runner[Any]]) -> Any:
    made = serving(cls)
    return made.__new__(made)
