"""Assigns threads, and jobs of thread pools, to the scope in which they were started.

A new thread of Python has an empty context, so it has no reference to the rollout that started it. If the thread
outlives the rollout, it could write into the next rollout of the process. Therefore, once there is a scope,
`Thread.start`, `_thread.start_new_thread` and `ThreadPoolExecutor.submit` store the scope of their caller:

- a thread that outlives its rollout finds that its scope is closed, and its spans are refused;
- a pool may live for any time: a job belongs to its submitter, regardless of who started the thread;
- a thread that was started outside of all rollouts belongs to none, and uses the only open scope.

Not covered: threads of C libraries, and work that a thread receives through a queue of the program; such a thread
belongs to the code that started it.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

ScopeVar = ContextVar[Any]
"""Contains a scope or None; the scope class is defined in a module that imports this one."""
origin: ScopeVar = ContextVar("agentlightning_origin", default=None)
"""The scope in which the current thread or job was started; None if there was none."""
_lock = threading.Lock()
_noted: list[ScopeVar] = []


def note_origins(present: ScopeVar) -> None:
    """Set the `origin` of each new thread and job: the value of `present` where it is started, else the origin there.
    Cheap to repeat."""
    if _noted:
        return
    with _lock:
        if not _noted:
            for note in (_note_threads, _note_bare_threads, _note_jobs):
                note(present)
            _noted.append(present)


def _note_threads(present: ScopeVar) -> None:
    start = threading.Thread.start

    def start_with_origin(self: threading.Thread) -> None:
        scope = present.get() or origin.get()
        if scope is not None:
            self.run = _Bound(scope, self.run)  # on the object: a subclass may have a `run` of its own
        start(self)

    threading.Thread.start = start_with_origin


def _note_bare_threads(present: ScopeVar) -> None:
    """Also patch `_thread`. `threading` has a reference to the original, so nothing is recorded twice."""
    start = _thread.start_new_thread

    def start_with_origin(function: Callable[..., object], *args: Any, **kwargs: Any) -> int:
        scope = present.get() or origin.get()
        if scope is not None and callable(function):
            function = _Bound(scope, function)
        return start(function, *args, **kwargs)

    setattr(_thread, "start_new_thread", start_with_origin)  # noqa: B010 -- the stub declares it final
    setattr(_thread, "start_new", start_with_origin)  # noqa: B010


def _note_jobs(present: ScopeVar) -> None:
    submit = ThreadPoolExecutor.submit

    def submit_with_origin(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: object, **kwargs: object
    ) -> Future[Any]:
        scope = present.get() or origin.get()
        if scope is None:
            return submit(self, fn, *args, **kwargs)
        tokens = present.set(None), origin.set(None)  # the pool's thread for this job has no origin
        try:
            return submit(self, _Bound(scope, fn), *args, **kwargs)
        finally:
            present.reset(tokens[0])
            origin.reset(tokens[1])

    ThreadPoolExecutor.submit = submit_with_origin


class _Bound:
    """A call with the scope in which it was submitted as origin."""

    __slots__ = ("_call", "_scope")

    def __init__(self, scope: object, call: Callable[..., Any]) -> None:
        self._scope = scope
        self._call = call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        token = origin.set(self._scope)
        try:
            return self._call(*args, **kwargs)
        finally:
            origin.reset(token)
