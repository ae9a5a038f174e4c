"""Calls on the main thread beside a loop: one at a time, in their context, interrupted on demand, and not for ever."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.concurrency.main_thread import (
    Interrupted,
    MainThread,
    main_thread_beside,
    on_main_thread,
)

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def beside(work: Callable[[MainThread], Coroutine[object, object, Any]]) -> Any:
    async def main(_: Interrupts) -> Any:
        main_thread = main_thread_beside(asyncio.get_running_loop())
        assert main_thread is not None
        return await work(main_thread)

    return run(main, beside=True)


def test_a_call_runs_on_the_main_thread_in_the_context_of_its_caller() -> None:
    async def work(main_thread: MainThread) -> tuple[Any, bool, str]:
        place.set("here")
        done = await main_thread.call(lambda: (threading.current_thread() is threading.main_thread(), place.get()))
        return done.value, threading.current_thread() is threading.main_thread(), place.get()

    assert beside(work) == ((True, "here"), False, "here")
    assert place.get() == "nowhere"


def test_the_loop_has_the_context_in_which_it_was_started() -> None:
    async def work(_: MainThread) -> str:
        return place.get()

    token = place.set("outside")
    assert beside(work) == "outside"
    place.reset(token)


def test_what_a_call_or_the_loop_raises_comes_through() -> None:
    async def work(main_thread: MainThread) -> Any:
        done = await main_thread.call(lambda: sys.exit(3))
        assert isinstance(done.error, SystemExit)
        raise LookupError("of the loop")

    with pytest.raises(LookupError, match="of the loop"):
        beside(work)


def test_an_interrupt_ends_the_call_for_which_it_is_and_no_later_one() -> None:
    async def work(main_thread: MainThread) -> list[Any]:
        begun = threading.Event()
        first = main_thread.call(lambda: (begun.set(), time.sleep(600)))
        await asyncio.to_thread(begun.wait)
        assert not main_thread.is_free
        first.interrupt()
        error = (await first).error
        assert main_thread.is_free
        first.interrupt()
        return [type(error), (await main_thread.call(lambda: time.sleep(0.05) or "second")).value]

    assert beside(work) == [Interrupted, "second"]


def test_an_interrupt_whose_signal_came_to_nothing_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal arrives after the last look for signals and before the wait in the system begins."""
    send, sent = signal.pthread_kill, list[int]()

    def lose_the_first(thread: int, signum: int) -> None:
        sent.append(signum)
        if len(sent) > 1:
            send(thread, signum)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)

    async def work(main_thread: MainThread) -> Any:
        begun = threading.Event()
        call = main_thread.call(lambda: (begun.set(), time.sleep(600)))
        await asyncio.to_thread(begun.wait)
        call.interrupt()
        return (await call).error

    assert isinstance(beside(work), Interrupted)


def test_signal_handlers_that_a_call_has_replaced_are_put_back_but_those_of_the_loop_stay() -> None:
    async def work(main_thread: MainThread) -> None:
        before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
        await main_thread.call(lambda: [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)])
        assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
        await on_main_thread(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    before = signal.getsignal(signal.SIGTERM)
    try:
        beside(work)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_has_the_main_thread_itself_has_none_beside_it() -> None:
    async def main(_: Interrupts) -> Any:
        await on_main_thread(lambda: place.set("called"))
        return main_thread_beside(asyncio.get_running_loop())

    assert run(main) is None


STUCK = """
import asyncio, contextlib, time
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.concurrency.main_thread import main_thread_beside

def deaf():
    words = ["begun"]
    while True:
        with contextlib.suppress(BaseException):  # around the word, too: the signal follows it at once
            while words:
                print(words.pop(), flush=True)
            time.sleep(600)

async def holds_the_main_thread(interrupts):
    main_thread_beside(asyncio.get_running_loop()).call(deaf)
    await interrupts.asked()

async def ends_and_leaves_it(interrupts):
    main_thread_beside(asyncio.get_running_loop()).call(deaf)

async def blocks_the_loop(interrupts):
    deaf()

run({name}, beside=True)
"""


@pytest.mark.parametrize("name", ["holds_the_main_thread", "ends_and_leaves_it", "blocks_the_loop"])
def test_ctrl_c_ends_a_process_whose_main_thread_or_loop_is_held_for_good(name: str) -> None:
    program = STUCK.replace("{name}", name)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
