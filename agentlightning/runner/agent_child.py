"""The main program of a process for `isolation="process"`: runs one attempt at a time, and communicates by a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import threading
import traceback
from socket import socket
from types import FrameType
from typing import Any, cast

from agentlightning.litagent.litagent import LitAgent
from agentlightning.runner.base import Runner
from agentlightning.runner.executors import call_agent
from agentlightning.runner.outcome import AttemptFault, InvalidResult
from agentlightning.runner.pipe import (
    READY,
    AgentRaised,
    Answer,
    Ask,
    Order,
    Outcome,
    PipeStore,
    line_of,
)
from agentlightning.runner.results import is_result, spans_of
from agentlightning.tracer.collector import ENDPOINT as COLLECTOR_VARIABLE
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.concurrency.main_thread import on_main_thread
from agentlightning.utils.concurrency.threads import Threads
from agentlightning.utils.exceptions import message_of, readable


def main(pipe: socket, parts: bytes, worker_id: int) -> None:
    """Run attempts until the pipe ends."""
    pipe.set_inheritable(False)
    os.setsid()  # its own process group, killed as a whole
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner handles Ctrl+C
    os.environ.pop(COLLECTOR_VARIABLE, None)  # the runner mirrors the spans
    logging.getLogger(call_agent.__module__).setLevel(logging.ERROR)  # no thread remains: the process is killed
    agent, runner = pickle.loads(parts)
    run(lambda _: _AttemptServer(pipe, agent, runner).serve(worker_id), beside=agent.has_sync_method())


class _AttemptServer:
    """One event loop, in the main thread or, for a synchronous agent, in another one. Another thread reads the pipe,
    and ends the process when the runner ends. An idle process ends normally, so that the agent's exit handlers run."""

    def __init__(self, pipe: socket, agent: LitAgent[Any], runner: Runner[Any]) -> None:
        self._pipe = pipe
        self._agent = agent
        self._runner = runner
        self._orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._threads = Threads(on_main=True)
        self._attempt: asyncio.Task[Outcome] | None = None

    async def serve(self, worker_id: int) -> None:
        loop = asyncio.get_running_loop()

        def on_term(signum: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._interrupt)

        await on_main_thread(lambda: signal.signal(signal.SIGTERM, on_term))
        threading.Thread(target=self._read, args=(loop,), name="agent-orders", daemon=True).start()
        with self._runner.run_context(agent=self._agent, store=PipeStore(self._ask), worker_id=worker_id):
            self._send(READY)
            while (order := await self._orders.get()) is not None:
                self._attempt = asyncio.create_task(self._run(order))
                await asyncio.wait({self._attempt})
                if self._attempt.cancelled():
                    outcome = Outcome(error=AgentRaised("The attempt was interrupted"))
                elif (error := self._attempt.exception()) is not None:
                    outcome = Outcome(error=_portable(error), traceback=_text(error))
                else:
                    outcome = self._attempt.result()
                self._send(outcome)

    async def _run(self, order: Order) -> Outcome:
        rollout, tracer = order.rollout, self._agent.get_tracer()
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        async with tracer.trace_context(name=rollout_id, rollout_id=rollout_id, attempt_id=attempt_id):
            try:
                value = await call_agent(self._agent, rollout, order.resources, self._threads)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # the runner classifies it, even one that would end this loop
                return Outcome(error=_portable(error), traceback=_text(error))
        try:  # a result that can be sent: spans as our own class
            if isinstance(value, list) and value and is_result(cast(Any, value)):
                value = spans_of(cast(Any, value), rollout)
        except AttemptFault as error:
            return Outcome(error=error, traceback=_text(error))
        try:
            line_of(Outcome(value=value))
        except Exception as error:  # any class may raise any exception when it is inspected
            kind = type(cast(Any, value)).__name__
            refused = InvalidResult(f"Invalid raw result type: a {kind} cannot be sent to the runner: {error}")
            return Outcome(error=refused, traceback=_text(refused))
        return Outcome(value=value)

    async def _ask(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self._send(Ask.of(number, operation, args, kwargs))
            return await answer
        finally:
            del self._pending[number]

    def _send(self, message: str | Ask | Outcome) -> None:
        self._pipe.sendall(line_of(message))

    def _interrupt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(EOFError, OSError), self._pipe.makefile("rb") as messages:
            while True:
                loop.call_soon_threadsafe(self._take, pickle.load(messages))
        if self._attempt is None or self._attempt.done():  # the runner has closed the pipe
            loop.call_soon_threadsafe(self._orders.put_nowait, None)
        else:  # the runner has ended; the agent may be in any state
            os._exit(0)

    def _take(self, message: Order | Answer) -> None:
        if isinstance(message, Order):
            self._orders.put_nowait(message)
            return
        future = self._pending.get(message.number)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(message.error)
        else:
            future.set_result(message.value)


def _portable(error: BaseException) -> BaseException:
    """Return an exception that can be sent: itself if it can be copied."""
    error = readable(error)
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except BaseException:  # any class may refuse, with any exception
        pass
    return AgentRaised(f"{type(error).__qualname__}: {message_of(error)}")


def _text(error: BaseException) -> str:
    error = readable(error)
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
