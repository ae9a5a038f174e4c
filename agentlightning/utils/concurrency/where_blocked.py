"""The source lines at which a coroutine or a thread waits, for the report of a stall."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from types import FrameType
from typing import Any

SHOWN = 6
"""Number of returned lines: the outermost ones, which belong to the user's code, and the innermost."""
_MACHINERY = (
    "asyncio/",
    "concurrent/",
    "futures/",
    "threading.py",
    "concurrency/loop_thread.py",
    "concurrency/loops.py",
    "execution/roles.py",
)
"""Prefixes of shown lines that do not help to explain the wait."""


def task_stack(task: asyncio.Task[object]) -> list[str]:
    """Return the lines at which a task waits, from the outside in, as `folder/file.py:12 in function`."""
    frames: list[FrameType] = []
    step: Any = task.get_coro()
    while inspect.iscoroutine(step):
        if step.cr_frame is not None:
            frames.append(step.cr_frame)
        step = step.cr_await
    return _shown_lines(frames)


def thread_stack(name: str) -> list[str]:
    """Return the lines that the thread with this name executes, from the outside in; none without such a thread."""
    thread = next((thread for thread in threading.enumerate() if thread.name == name), None)
    frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    frames: list[FrameType] = []
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    return _shown_lines(frames)


def _shown_lines(frames: list[FrameType]) -> list[str]:
    lines = [line for frame in frames if not (line := _line(frame)).startswith(_MACHINERY)]
    return lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], lines[-1]]


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    name = "/".join(path[-2:])
    file = path[-1] if path[-1] == "threading.py" else name
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
