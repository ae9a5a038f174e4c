"""Stop events: both kinds behave alike, and the one for processes survives the death of a reader."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest

from agentlightning.execution import ExecutionEvent, MultiprocessingEvent, ThreadingEvent

KINDS: list[Callable[[], ExecutionEvent]] = [
    ThreadingEvent,
    MultiprocessingEvent,
    lambda: MultiprocessingEvent(ctx=multiprocessing.get_context("spawn")),
]


@pytest.mark.parametrize("make", KINDS)
def test_an_event_is_set_and_cleared_any_number_of_times(make: Callable[[], ExecutionEvent]) -> None:
    event = make()
    assert not event.is_set()
    for _ in range(3):
        event.set()
    assert event.is_set()
    assert event.wait() is True
    event.clear()
    assert not event.is_set()
    assert event.wait(0.01) is False


@pytest.mark.parametrize("make", KINDS)
def test_an_event_exposes_nothing_but_its_methods(make: Callable[[], ExecutionEvent]) -> None:
    assert not hasattr(make(), "__dict__")


def _set(event: ExecutionEvent) -> None:
    event.set()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_sets_the_event_of_its_parent(method: str) -> None:
    ctx = multiprocessing.get_context(method)
    event = MultiprocessingEvent(ctx=ctx)
    child = ctx.Process(target=_set, args=(event,))  # type: ignore[attr-defined]
    child.start()
    assert event.wait(10) is True
    child.join()


def _look_for_ever(event: ExecutionEvent) -> None:
    while True:
        event.is_set()


def test_a_process_killed_while_it_looks_leaves_the_event_usable() -> None:
    ctx = multiprocessing.get_context("fork")
    event = MultiprocessingEvent(ctx=ctx)
    for _ in range(5):
        child = ctx.Process(target=_look_for_ever, args=(event,))
        child.start()
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
    event.set()
    assert event.is_set()
