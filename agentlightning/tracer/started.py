"""Threads, and jobs of thread pools, belong to the scope in which they were started.

Python gives a new thread an empty context, so that a thread knows nothing of the rollout that started it. Left behind,
it would find the next rollout alone in the process and write into that. From the first scope on, `Thread.start`,
`_thread.start_new_thread` and `ThreadPoolExecutor.submit` note the scope of their caller for what they start:

- what a rollout started and left behind finds its own scope closed, and is refused;
- a pool may live as long as its owner likes: a job belongs to who submitted it, whoever first needed the thread;
- what was started outside of every rollout belongs to none, and finds the only open scope as before.

Not seen: threads of C libraries, and work that travels to a thread by a queue of the program's own; the thread then
belongs to whoever started it.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

ScopeVar = ContextVar[Any]
"""Holds a scope or None; scopes are made in a module that needs this one."""
origin: ScopeVar = ContextVar("agentlightning_origin", default=None)
"""The scope in which the thread or job that runs here was started; None if in none."""
_lock = threading.Lock()
_noted: list[ScopeVar] = []


def note_origins(present: ScopeVar) -> None:
    """From here on, threads and jobs know their `origin`: what `present` holds where they are started, else the origin
    of that place. Cheap to repeat."""
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
    """`threading` keeps a reference of its own to what is replaced here, so that nothing is noted twice."""
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
        tokens = present.set(None), origin.set(None)  # a thread that the pool starts for this job is nobody's
        try:
            return submit(self, _Bound(scope, fn), *args, **kwargs)
        finally:
            present.reset(tokens[0])
            origin.reset(tokens[1])

    ThreadPoolExecutor.submit = submit_with_origin


class _Bound:
    """A call whose origin is the scope in which it was ordered."""

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
