"""A program that runs bundles under a strategy, to be interrupted and killed from outside.

`python -m tests.execution.program LAYOUT ALGORITHM RUNNER` prints `ready <endpoint> <pid of a runner>` when both sides
are at work, and `returned interrupted=<bool>` when `execute` has returned. The layout `ray <address>` has its runners
in a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from typing import Any

from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    ExecutionStrategy,
    RayExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.utils.concurrency.loop_thread import call_in_thread
from tests.execution.bundles import Serve, Tasks, blocking_runner, deaf_runner
from tests.stubs.ports import free_port

LAYOUTS: dict[str, Any] = {
    "shm-runner": lambda: SharedMemoryExecutionStrategy(),
    "shm-algorithm": lambda: SharedMemoryExecutionStrategy(n_runners=2),
    "cs-fork": lambda: ClientServerExecutionStrategy(n_runners=2, server_port=0),
    "cs-spawn": lambda: ClientServerExecutionStrategy(n_runners=2, server_port=0, start_method="spawn"),
    "cs-forkserver": lambda: ClientServerExecutionStrategy(n_runners=2, server_port=0, start_method="forkserver"),
    "cs-no-restarts": lambda: ClientServerExecutionStrategy(n_runners=2, server_port=0, max_runner_restarts=0),
    "cs-runner": lambda: ClientServerExecutionStrategy(main_process="runner", server_port=0),
    "cs-runner-4747": lambda: ClientServerExecutionStrategy(main_process="runner"),
    "cs-fork-4747": lambda: ClientServerExecutionStrategy(n_runners=2),
    "cs-only-algorithm": lambda: ClientServerExecutionStrategy(role="algorithm", server_port=free_port()),
}


async def ready(store: LightningStore, event: ExecutionEvent) -> None:
    """Let one rollout through, so that both sides are known to work, and say so."""
    [pid] = await Tasks(1)(store, event)
    print("ready", getattr(store, "endpoint", "-"), pid, flush=True)


async def waits(store: LightningStore, event: ExecutionEvent) -> None:
    await ready(store, event)
    try:
        await asyncio.Event().wait()
    finally:
        print("algorithm cleaned up", flush=True)


async def blocks_its_loop(store: LightningStore, event: ExecutionEvent) -> None:
    await ready(store, event)
    try:
        _block()
    finally:
        print("algorithm cleaned up", flush=True)


async def blocks_a_thread(store: LightningStore, event: ExecutionEvent) -> None:
    await ready(store, event)
    await call_in_thread(_block, name="sync-algorithm")


async def computes_in_a_thread(store: LightningStore, event: ExecutionEvent) -> None:
    await ready(store, event)
    await call_in_thread(_compute, name="sync-algorithm")


def _block() -> None:
    time.sleep(60)


def _compute() -> None:
    try:
        while True:
            sum(range(1000))
    finally:
        print("algorithm cleaned up", flush=True)


async def refuses_to_end(store: LightningStore, event: ExecutionEvent) -> None:
    await ready(store, event)
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("algorithm refuses", flush=True)


async def says_ready_alone(store: LightningStore, event: ExecutionEvent) -> None:
    print("ready", getattr(store, "endpoint", "-"), 0, flush=True)
    await asyncio.Event().wait()


async def serves_then_blocks(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await Serve(cap=1)(store, worker_id, event)
    await blocking_runner(store, worker_id, event)


async def serves_then_deaf(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await Serve(cap=1)(store, worker_id, event)
    await deaf_runner(store, worker_id, event)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
    layout, algorithm, runner = sys.argv[1:]
    kind, _, address = layout.partition(" ")
    strategy: ExecutionStrategy = RayExecutionStrategy(address=address) if kind == "ray" else LAYOUTS[layout]()
    bundles: dict[str, Any] = {**globals(), "serves": Serve()}
    strategy.execute(bundles[algorithm], bundles[runner], InMemoryLightningStore())
    print(f"returned interrupted={strategy.interrupted}", flush=True)
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
    print("threads", *threads, flush=True)


if __name__ == "__main__":
    main()
