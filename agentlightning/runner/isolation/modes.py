"""Where the agent runs: in this process, or in one that can be killed without asking it."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
from typing import Any, Literal, Protocol, get_args

from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.invoke import UNWIND_SECONDS, invoke, outcome_of
from agentlightning.runner.isolation.pipe import Answer, Ask, Order
from agentlightning.runner.isolation.process import AgentProcess
from agentlightning.runner.outcome import TimeLimitExceeded
from agentlightning.store.base import LightningStore
from agentlightning.tracer.scope import current_scope
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM
from agentlightning.utils.concurrency.main_thread import Done
from agentlightning.utils.concurrency.threads import Threads

logger = logging.getLogger(__name__)

Isolation = Literal["thread", "process"]

FREE_SECONDS = 5.0
"""How long a runner waits for an interrupted agent to let go of the main thread."""


def check_isolation(isolation: str) -> Isolation:
    """Return the isolation if it is one.

    Raises:
        ValueError: it is none.
        RuntimeError: this system cannot end a process with all that it has started.
    """
    if isolation == "process" and not hasattr(os, "killpg"):
        raise RuntimeError(
            "isolation='process' needs process groups, which this system does not have (POSIX only); use 'thread'"
        )
    for known in get_args(Isolation):
        if isolation == known:
            return known
    raise ValueError(f"isolation must be one of {', '.join(get_args(Isolation))}; got {isolation!r}")


class AgentExecutor(Protocol):
    """Calls the agent for attempts."""

    @property
    def prepares(self) -> bool:
        """True if a lane has to `prepare` before it claims, so that no claimed attempt waits for a process."""
        ...

    async def prepare(self) -> None:
        """Get ready for one more attempt.

        Raises:
            AgentProcessDied: there can be none.
        """

    def spare(self) -> None:
        """Undo one `prepare`: no attempt came."""

    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        """Call the agent within the time limit of the rollout and return what it gives.

        Raises:
            TimeLimitExceeded: it did not end in time.
            BaseException: whatever it raised.
        """
        ...

    @property
    def threads(self) -> Threads:
        """Threads for what else blocks."""
        ...

    def close(self) -> None:
        """End what was started. May be called twice."""


class ThreadExecutor:
    """This process: coroutines on the event loop, other agents on the main thread if it is free for them, else in a
    thread each. It is free where the loop runs beside it and the runner has one rollout at once."""

    def __init__(self, agent: LitAgent[Any], concurrency: int = 1) -> None:
        self._agent = agent
        self.threads = Threads(on_main=concurrency == 1)

    @property
    def prepares(self) -> bool:
        """True while an agent that was interrupted still has the main thread."""
        return (main_thread := self.threads.main_thread) is not None and not main_thread.is_free

    async def prepare(self) -> None:
        """Wait for the main thread for a while; after that agents run in threads until it is free."""
        main_thread = self.threads.main_thread
        if main_thread is not None and not await main_thread.until_free(FREE_SECONDS):
            logger.warning("The agent does not let go of the main thread: rollouts run in other threads until it does")

    def spare(self) -> None:
        """Nothing to do."""

    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        method = self._agent.method_for(rollout.mode)
        return await invoke(
            lambda: method(rollout.input, resources=resources, rollout=rollout),
            threads=None if inspect.iscoroutinefunction(method) else self.threads,
            limit=rollout.config.timeout_seconds,
            label=rollout.rollout_id,
        )

    def close(self) -> None:
        self.threads.close()


class ProcessExecutor:
    """A process for each attempt that runs at the same time; used again until one had to be killed.

    A rollout is claimed when there is a process that has loaded the agent. Spans come back and are delivered with those
    of the runner.
    """

    prepares = True

    def __init__(self, parts: bytes, store: LightningStore, worker_id: int) -> None:
        self.threads = Threads()
        self._parts = parts
        self._store = store
        self._worker_id = worker_id
        self._free: list[AgentProcess] = []
        self._ready: list[AgentProcess] = []
        self._all: set[AgentProcess] = set()
        atexit.register(self.close)

    async def prepare(self) -> None:
        process = self._take()
        try:
            outcome_of(await self.threads.call(process.wait_until_ready, "start"))
        except BaseException:  # also a cancellation: the process can be used again
            self._free.append(process)
            raise
        self._ready.append(process)

    def spare(self) -> None:
        self._free.append(self._ready.pop())

    async def call(self, rollout: AttemptedRollout, resources: NamedResources) -> Any:
        process = self._ready.pop() if self._ready else self._take()
        scope, loop = current_scope(), asyncio.get_running_loop()

        async def answer(question: Ask) -> Answer:
            try:
                arguments = question.read(rollout)
                if question.operation == "add_many_spans" and scope is not None and scope.delivers and scope.is_open:
                    for span in arguments["spans"]:  # the trace of the attempt delivers them
                        scope.append(span)
                    return Answer(question.number, list(arguments["spans"]))
                return Answer(question.number, await getattr(self._store, question.operation)(**arguments))
            except Exception as error:  # the boundary: it is raised again in the process that asked
                return Answer(question.number, error=error)

        def ask(question: Ask) -> Answer:
            return asyncio.run_coroutine_threadsafe(answer(question), loop).result()

        # models behind the gateway get the key of the attempt: the process of the agent does not have the token
        keyed = {name: r.keyed_for(rollout) if isinstance(r, ProxyLLM) else r for name, r in resources.items()}
        order = Order(rollout, keyed)
        label, limit = rollout.rollout_id, rollout.config.timeout_seconds
        running = self.threads.call(process.wait_until_ready, label)
        try:
            await asyncio.wait({running})
            outcome_of(running.result())
            running = self.threads.call(lambda: process.run(order, ask), label)
            await asyncio.wait({running}, timeout=limit)
            if not running.done():
                raise TimeLimitExceeded(f"The attempt ran past the timeout_seconds={limit} of its rollout")
        except BaseException:  # also a cancellation: the process may be in the middle of anything
            await self._stop(process, running)
            raise
        if process.is_alive():
            self._free.append(process)
        else:
            self._drop(process)
        return outcome_of(running.result())

    def close(self) -> None:
        atexit.unregister(self.close)
        for process in self._all:
            process.release()
        for process in list(self._all):
            self._drop(process)
        self.threads.close()

    def _take(self) -> AgentProcess:
        while self._free:
            process = self._free.pop()
            if process.is_alive():
                return process
            self._drop(process)
        process = AgentProcess(self._parts, self._worker_id)
        self._all.add(process)
        return process

    def _drop(self, process: AgentProcess) -> None:
        self._all.discard(process)
        process.close()

    async def _stop(self, process: AgentProcess, running: asyncio.Future[Done]) -> None:
        """End an attempt: ask, so that what was recorded is still reported; then kill."""
        process.interrupt()
        await asyncio.wait({running}, timeout=UNWIND_SECONDS)
        process.kill()
        await asyncio.wait({running}, timeout=UNWIND_SECONDS)  # it reads the end of the pipe
        self._drop(process)
