"""What runs in a Ray cluster: one runner in a process of its own. This module does not import Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from typing import Any

from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.processes.children import ChildReport, ChildTask, _report_failure, _report_result
from agentlightning.process_secrets import TOKEN, hold
from agentlightning.utils.concurrency.loop_thread import LoopThread
from agentlightning.utils.concurrency.loops import run


class RunnerActor:
    """One runner as an actor. `serve` blocks one thread of the actor; the other calls come in on further ones.

    `pickled` is a `ChildTask`. `token` opens the store server; it comes as an argument, because Ray shows the
    environment of an actor.
    """

    def __init__(self, pickled: bytes, index: int, name: str, token: str | None) -> None:
        if token is not None:
            hold(TOKEN, token)
        task: ChildTask = pickle.loads(pickled)
        self._name = name
        self._event = ThreadingEvent()
        self._thread = LoopThread(name, lambda: task(index, self._event))

    def location(self) -> str:
        """Return process and host, for messages. Answered as soon as Ray has found a place for the actor."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def serve(self) -> ChildReport:
        """Run the task to its end and return how it ended; one that was interrupted has nothing to report."""
        self._thread.start()
        try:
            result: Any = run(lambda _: self._thread.result())
        except asyncio.CancelledError:
            return ChildReport()
        except BaseException as error:  # boundary: the driver gets the cause
            return _report_failure(error)
        return _report_result(self._name, result)

    def ask(self) -> None:
        """Set the stop event."""
        self._event.set()

    def interrupt(self) -> None:
        """Cancel the task."""
        self._thread.cancel()
