"""Attempts in separate processes: each holds a copy of the agent, and uses the runner's store.

`AgentProcess` is the runner's side. The process is started by `spawn`, so that only the agent and the tracer are
copied, in a separate process group, which is killed as one. `ProcessExecutor` has one process per concurrent attempt.
The process runs `agent_child.py`; `pipe.py` defines the messages between the two.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from agentlightning.runner.agent_child import main
from agentlightning.runner.executors import UNWIND_SECONDS, outcome_of
from agentlightning.runner.outcome import AttemptFault, TimeLimitExceeded
from agentlightning.runner.pipe import MOST_BYTES, READY, Answer, Ask, Order, Outcome, read_line
from agentlightning.store.base import LightningStore
from agentlightning.tracer.scope import current_scope
from agentlightning.types import AttemptedRollout, NamedResources, ProxyLLM
from agentlightning.utils.concurrency.main_thread import Done
from agentlightning.utils.concurrency.threads import Threads
from agentlightning.utils.descendants import end_descendants, join, pidfd_of
from agentlightning.utils.process_group import ProcessGroup

START_SECONDS = 120.0
"""Seconds in which a process has to import and load the agent."""
END_SECONDS = 2.0
LOOK_SECONDS = 0.1
"""Seconds between checks of the process, on systems that do not report its end."""


class AgentProcessDied(AttemptFault):
    """The agent's process ended unexpectedly: it crashed, was killed, or could not load the agent."""

    reason = "runner_died"


class AgentTraceback(Exception):
    """The traceback of an exception from another process, as the cause of its copy here."""


class AgentProcess:
    """One process. Runs one attempt at a time; `run` blocks, the other methods may be called meanwhile."""

    def __init__(self, parts: bytes, worker_id: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = socket.socketpair()
        self._received = bytearray()
        self._process = context.Process(target=main, args=(theirs, parts, worker_id), name=f"agent-of-{worker_id}")
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._group = ProcessGroup(self._process.pid)
        self._ended = pidfd_of(self._process.pid)
        self._ready = False
        self._left = MOST_BYTES

    def run(self, order: Order, ask: Callable[[Ask], Answer]) -> Any:
        """Run an attempt when the process is ready, and return the agent's result; `ask` calls the store for it.

        Raises:
            AgentProcessDied: the process ended during the attempt.
            AttemptFault: the process sent an invalid message, or more than `MOST_BYTES`; it has been killed.
            BaseException: the agent's exception.
        """
        self._left = MOST_BYTES
        try:
            self._pipe.sendall(pickle.dumps(order))
            while not isinstance(message := self._receive(), Outcome):
                if isinstance(message, str):
                    raise AttemptFault(f"The agent's process sent an unexpected message: {message[:80]!r}")
                self._pipe.sendall(pickle.dumps(ask(message)))
        except AttemptFault:
            self.kill()
            raise
        except (EOFError, OSError) as error:
            raise AgentProcessDied(f"The agent's process {self._death()} during the attempt") from error
        if message.error is not None:
            raise message.error from AgentTraceback(f'\n"""\n{message.traceback}"""')
        return message.value

    def interrupt(self) -> None:
        """Request the end of the attempt: recorded spans are still reported if the agent ends in time."""
        if self._process.pid is not None and self._process.exitcode is None:
            self._group.signal(signal.SIGTERM)

    def is_alive(self) -> bool:
        """True while the process can run attempts."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Kill the process and all its descendants; a running `run` returns. May be called twice."""
        if self._process.exitcode is None and self._process.pid is not None:
            end_descendants(self._process.pid, grace=0.0)  # also those that have left the group
        self._process.kill()  # it may not lead its group yet
        self._group.close()
        join(self._process, END_SECONDS)
        if self._ended is not None and self._process.exitcode is not None:
            os.close(self._ended)
            self._ended = None

    def release(self) -> None:
        """Close the pipe, so that an idle process ends; only while no `run` is active."""
        self._pipe.close()

    def close(self) -> None:
        """Release the process, and kill it if it does not end soon. May be called twice."""
        self.release()
        join(self._process, END_SECONDS)
        self.kill()

    def wait_until_ready(self) -> None:
        """Wait until the agent is loaded; later calls return immediately.

        Raises:
            AgentProcessDied: the agent was not loaded within `START_SECONDS`, or cannot be loaded.
            AttemptFault: the process sent an unexpected message.
        """
        if self._ready:
            return
        try:
            if (message := self._receive(START_SECONDS)) != READY:
                raise AttemptFault(f"The agent's process sent an unexpected message: {str(message)[:80]!r}")
            self._ready = True
        except TimeoutError as error:
            raise AgentProcessDied(f"The agent's process was not ready within {START_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            raise AgentProcessDied(
                f"The agent's process {self._death()} before it was ready. Check in its error output whether it can "
                "import the agent. A script must have `if __name__ == '__main__':`."
            ) from error

    def _receive(self, seconds: float | None = None) -> str | Ask | Outcome:
        """Return the next message.

        Raises:
            EOFError, OSError: the process has ended, even if its descendants still hold the pipe.
            TimeoutError: nothing arrived within this time.
            AttemptFault: the message is invalid or too long.
        """
        end, searched = None if seconds is None else time.monotonic() + seconds, 0
        while (length := self._received.find(b"\n", searched) + 1) == 0:
            searched = len(self._received)
            alive = self.is_alive()
            remaining = None if end is None else end - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            awaited = [self._pipe] if self._ended is None or not alive else [self._pipe, self._ended]
            waits = [w for w in (remaining, None if self._ended is not None else LOOK_SECONDS) if w is not None]
            if self._pipe in multiprocessing.connection.wait(awaited, min(waits, default=None) if alive else 0.0):
                data = self._pipe.recv(1 << 18)
                self._left -= len(data)
                self._received += data
                if not data:
                    raise EOFError
                if self._left < 0:
                    raise AttemptFault(f"The agent's process sent more than {MOST_BYTES} bytes for one attempt")
            elif not alive:
                raise EOFError
        line = bytes(self._received[:length])
        del self._received[:length]
        try:
            return read_line(line)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise AttemptFault(f"The agent's process sent an invalid message: {line[:80]!r}") from error

    def _death(self) -> str:
        join(self._process, END_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0 and -code in set(signal.Signals):
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class ProcessExecutor:
    """One process per concurrent attempt, reused until it has to be killed.

    A rollout is claimed only after a process has loaded the agent. Its spans are sent to the runner and delivered with
    the runner's.
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
        except BaseException:  # also a cancellation: the process can be reused
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
            except Exception as error:  # the boundary: it is raised again in the calling process
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
                raise TimeLimitExceeded(f"The attempt exceeded timeout_seconds={limit} of its rollout")
        except BaseException:  # also a cancellation: the process may be in any state
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
        """End an attempt: interrupt it first, so that recorded spans are still reported; then kill the process."""
        process.interrupt()
        await asyncio.wait({running}, timeout=UNWIND_SECONDS)
        process.kill()
        await asyncio.wait({running}, timeout=UNWIND_SECONDS)  # it notices the end of the pipe
        self._drop(process)


def pickled_parts(agent: object, runner: object) -> bytes:
    """Return an agent, and a runner that has not been initialised, in pickled form.

    Raises:
        TypeError: one of them cannot be pickled; names it, and the solutions.
    """
    for name, part in (("agent", agent), ("tracer", runner)):
        try:
            pickle.dumps(part)
        except Exception as error:  # any class may refuse to be pickled, with any exception
            raise TypeError(
                f"isolation='process' sends the {name} to a separate process, but {part!r} cannot be pickled: "
                f"{type(error).__name__}: {error}. Define it at the top of a module, create its contents in its "
                "methods, or use isolation='thread'."
            ) from error
    return pickle.dumps((agent, runner))
