"""A run from the command line, in the foreground: Ctrl+C and SIGTERM end it in order, and its end is an exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from agentlightning.cli.support.output import say, show_traceback
from agentlightning.execution.base import exit_code_of
from agentlightning.utils.concurrency.loops import TERMINATED

if TYPE_CHECKING:
    from agentlightning.cli.support.plan import Plan

_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_OF_USERS = tuple(os.path.join(folder, "") for folder in (str(Path(__file__).parents[2]), *_LIBRARIES))
"""Folders of this package and of libraries, each with a separator at its end."""


def in_foreground(work: Callable[[], None]) -> int:
    """Run a training to its end and return the exit code.

    0; 130 after Ctrl+C, 143 after SIGTERM; 69 when the store did not answer for too long, 77 when it refuses the token;
    else 1. An error out of the user's own code is shown with its traceback, another one in one line.
    """
    terminated = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)  # the strategies know one way to be interrupted

    before = signal.signal(signal.SIGTERM, note)
    ctrl_c = signal.getsignal(signal.SIGINT)
    if ctrl_c is signal.SIG_IGN:  # a shell does that to what a script starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        return TERMINATED if terminated else exit_code_of(KeyboardInterrupt())
    except Exception as error:  # the boundary: whatever ended the training is told, and becomes an exit code
        if not has_frame_of_users(error.__traceback__):
            raise_as_code(error)
        show_traceback(error)
        return exit_code_of(error)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.SIG_DFL if ctrl_c is None else ctrl_c)
    return 0


def fit(plan: Plan) -> object:
    """Run a plan's Trainer, close its store, and return the result."""
    trainer = plan.trainer
    run = trainer.dev if plan.dev else trainer.fit
    try:
        run(plan.agent, plan.train_dataset, val_dataset=plan.val_dataset)
    finally:
        asyncio.run(trainer.store.close())
    return trainer.result


def raise_as_code(error: Exception) -> None:
    """Raise an error of ours on; one with an exit code of its own is told here and ends the command with that."""
    import typer

    code = exit_code_of(error)
    if code == 1:
        raise error
    say(f"agl: {error}", lines=True, to_stderr=True)
    raise typer.Exit(code)


def has_frame_of_users(trace: TracebackType | None) -> bool:
    """True if an error passed through code that is neither this package's nor a library's."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and not os.path.abspath(file).startswith(_NOT_OF_USERS):
            return True
        trace = trace.tb_next
    return False
