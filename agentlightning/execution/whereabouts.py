"""Where work stands: the lines of source at which a coroutine or a thread waits, for the report of a stall."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Generator
from types import CoroutineType, FrameType
from typing import Any, TypeGuard

SHOWN = 6
"""How many places are told: the outermost ones, which the user knows, and the innermost."""
_MACHINERY = (
    "asyncio/",
    "concurrent/",
    "futures/",
    "threading.py",
    "execution/threads.py",
    "execution/loops.py",
    "execution/sides.py",
)
"""Files that say nothing of what is waited for."""


def whereabouts(task: asyncio.Task[Any]) -> list[str]:
    """Return the places at which a task waits, from the outside in, as `folder/file.py:12 in function`."""
    frames: list[FrameType] = []
    step: Any = task.get_coro()
    while _is_coroutine(step):
        if step.cr_frame is not None:
            frames.append(step.cr_frame)
        step = step.cr_await
    return _places(frames)


def thread_whereabouts(name: str) -> list[str]:
    """Return the places at which the thread of that name is, from the outside in; nothing if there is none."""
    thread = next((thread for thread in threading.enumerate() if thread.name == name), None)
    frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    frames: list[FrameType] = []
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    return _places(frames)


def _is_coroutine(step: Coroutine[Any, Any, Any] | Generator[Any] | None) -> TypeGuard[CoroutineType[Any, Any, Any]]:
    return isinstance(step, CoroutineType)


def _places(frames: list[FrameType]) -> list[str]:
    told = [place for frame in frames if not (place := _place(frame)).startswith(_MACHINERY)]
    return told if len(told) <= SHOWN else [*told[: SHOWN - 1], told[-1]]


def _place(frame: FrameType) -> str:
    path = frame.f_code.co_filename.replace("\\", "/").split("/")
    name = "/".join(path[-2:])
    file = path[-1] if path[-1] == "threading.py" else name
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
