"""Runners as Ray actors, with the same interface and life cycle as `ChildProcesses`.

A `ProcessTeam` drives it. Signals are replaced with calls: SIGINT cancels the runner's task, SIGTERM and SIGKILL end
the actor's process. Ray responds on its own threads; the responses are queued, and the team's loop handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from agentlightning.base.process_secrets import TOKEN, hold
from agentlightning.execution.children import (
    ChildExit,
    ChildReport,
    ChildTask,
    _report_failure,
    _report_result,
    name_of,
)
from agentlightning.execution.events import ThreadingEvent
from agentlightning.runner.base import worker_label
from agentlightning.utils.concurrency.loop_thread import LoopThread
from agentlightning.utils.concurrency.loops import run

logger = logging.getLogger(__name__)

ACTOR_THREADS = 4
"""One thread for `serve`, the others for calls while it runs."""
DEATH_CHARACTERS = 1000


class AskingEvent(ThreadingEvent):
    """A stop event that also calls `tell` when it is set for the first time."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    @override
    def set(self) -> None:
        first = not self.is_set()
        super().set()
        if first:
            self._tell()


@dataclass(frozen=True)
class ActorExit(ChildExit):
    """The end of an actor. Its exit code is assigned here: 0 returned, 1 raised, None died."""

    place: str | None = None
    """Process and host; None if it never ran."""
    death: str | None = None
    """Ray's reason for the death of an actor, or the reason why it never started."""

    @property
    @override
    def worker_id(self) -> str | None:
        """The label of its worker in the store; None if it never ran."""
        if self.place is None:
            return None
        _, pid, _, host = self.place.split(" ", 3)  # the format of `RunnerActor.location`
        return worker_label(host, int(pid), self.index)

    @override
    def describe(self) -> str:
        """Return the name, the place where it ran, and how it ended."""
        end = "the actor died" if self.exitcode is None else f"exitcode={self.exitcode}"
        return f"{self.name} ({self.place}, {end})" if self.place else f"{self.name} (never ran)"

    @override
    def may_restart(self) -> bool:
        """True if a restart could help; False if Ray could not place it."""
        return self.place is not None and (self.report is None or self.report.restart_helps)

    @override
    def explain(self) -> str:
        """Return `describe` and the known cause."""
        return super().explain() if self.death is None else f"{self.describe()}: {self.death}"


@dataclass
class _Actor:
    index: int
    handle: Any
    timer: threading.Timer
    place: str | None = None
    killed: int | None = None
    """The signal that ended it."""


@dataclass
class RayActors:
    """Runners as actors, by index. Owned by the loop of its team, except `ask`, which any thread may call."""

    ray: Any
    """The Ray module."""
    task: Any
    """A reference to the pickled `ChildTask` that each of them runs."""
    options: dict[str, object]
    """Ray options of each actor: `num_cpus`, `resources`, ..."""
    token: str | None
    start_timeout: float
    prefix: str = "runner-"
    look_seconds: float | None = field(default=None, init=False)
    """None: Ray reports every change, so no polling is needed."""
    _actors: dict[int, _Actor] = field(default_factory=dict[int, _Actor], init=False)

    def __post_init__(self) -> None:
        self._news: queue.SimpleQueue[tuple[_Actor, str, Future[Any]]] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._factory = self.ray.remote(RunnerActor)

    def start(self, index: int) -> None:
        """Request Ray to start actor `index`. Return immediately; Ray places it later."""
        name = name_of(self.prefix, index)
        options = {"max_concurrency": ACTOR_THREADS, "max_restarts": 0, **self.options}
        handle = self._factory.options(**options).remote(self.task, index, name, self.token)
        late: Future[Any] = Future()
        timer = threading.Timer(self.start_timeout, late.set_result, [None])
        timer.daemon = True
        actor = self._actors[index] = _Actor(index, handle, timer)
        self._report(actor, "placed", handle.location.remote().future())
        self._report(actor, "late", late)
        timer.start()

    def filenos(self) -> list[int]:
        return [self._reader.fileno()]

    def collect(self) -> list[ChildExit]:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                continue
        exits: list[ChildExit] = []
        while not self._news.empty():
            actor, kind, future = self._news.get()
            if self._actors.get(actor.index) is not actor:
                continue  # its end was handled already
            if kind == "placed" and future.exception() is None:
                actor.timer.cancel()
                actor.place = future.result()
                logger.info("%s runs as %s", name_of(self.prefix, actor.index), actor.place)
                # Only after its place is known: this separates an actor that dies at once from one that never ran.
                self._report(actor, "ended", actor.handle.serve.remote().future())
            elif kind != "late":
                exits.append(self._reap(actor, future))
            elif actor.place is None:
                exits.append(self._give_up(actor))
        return exits

    def ask(self) -> None:
        """Request every actor to stop. An actor that Ray has not placed yet is not started."""
        for actor in list(self._actors.values()):
            if actor.place is not None:
                actor.handle.ask.remote()
            else:
                self._kill(actor, 0)

    def signal(self, index: int, signum: int) -> None:
        """Apply the effect of a signal to an actor."""
        actor = self._actors.get(index)
        if actor is None:
            return
        if signum == signal.SIGINT:
            actor.handle.interrupt.remote()
        else:
            self._kill(actor, signum)

    def close(self) -> None:
        for actor in self._actors.values():
            actor.timer.cancel()
            self._kill(actor, signal.SIGKILL)
        self._actors.clear()
        self._reader.close()
        self._writer.close()

    def _report(self, actor: _Actor, kind: str, future: Future[Any]) -> None:
        def bring(done: Future[Any]) -> None:
            self._news.put((actor, kind, done))
            with contextlib.suppress(OSError):  # closed: nothing collects any more
                self._writer.send(b"!")

        future.add_done_callback(bring)

    def _reap(self, actor: _Actor, future: Future[Any]) -> ActorExit:
        actor.timer.cancel()
        del self._actors[actor.index]
        name, error = name_of(self.prefix, actor.index), future.exception()
        if error is None:
            report = future.result()
            self._kill(actor, signal.SIGTERM)  # its process is idle, and would live as long as the handle
            return ActorExit(actor.index, name, 0 if report.cause is None else 1, report, place=actor.place)
        code = None if actor.killed is None else -actor.killed
        return ActorExit(actor.index, name, code, None, place=actor.place, death=str(error)[:DEATH_CHARACTERS])

    def _give_up(self, actor: _Actor) -> ActorExit:
        self._kill(actor, signal.SIGKILL)
        del self._actors[actor.index]
        request = {name: amount for name, amount in self.options.items() if name != "runtime_env"}
        death = (
            f"Ray has not started it within start_timeout={self.start_timeout:g} s. Each runner requests {request}; "
            f"the cluster has {_amounts(self.ray.cluster_resources())}, "
            f"of which {_amounts(self.ray.available_resources())} are free. Lower n_runners or the resources of each "
            "runner, add nodes, or increase start_timeout if nodes are still starting."
        )
        return ActorExit(actor.index, name_of(self.prefix, actor.index), None, None, death=death)

    def _kill(self, actor: _Actor, signum: int) -> None:
        if actor.killed is None:
            actor.killed = signum
        try:
            self.ray.kill(actor.handle)
        except Exception as error:  # an unreachable actor must not spare the others
            logger.warning("Could not end %s: %s", name_of(self.prefix, actor.index), error)


def _amounts(resources: dict[str, float]) -> dict[str, float]:
    """Return the resources that a runner can request: without memory, and without the entries of single nodes."""
    hidden = ("node:", "memory", "object_store_memory")
    return {name: amount for name, amount in sorted(resources.items()) if not name.startswith(hidden)}


class RunnerActor:
    """One runner as an actor. `serve` blocks one thread of the actor; the other calls run on further threads.

    `pickled` is a `ChildTask`. `token` is that of the store server; it is an argument, because Ray shows the
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
        """Return process and host, for messages. The call returns as soon as Ray has placed the actor."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def serve(self) -> ChildReport:
        """Run the task to its end and return its report, which is empty if it was interrupted."""
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
