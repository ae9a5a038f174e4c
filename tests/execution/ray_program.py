"""A program with runners in a Ray cluster, to be interrupted and killed from outside by `test_ray.py`.

`python -m tests.execution.ray_program ADDRESS RUNNER` prints `ready <pid of a runner>` when both sides are at work, and
`returned interrupted=<bool>` when `execute` has returned.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from agentlightning.execution import ExecutionEvent, RayExecutionStrategy
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.execution.bundles import Serve, Tasks, blocking_runner


async def waits(store: LightningStore, event: ExecutionEvent) -> None:
    [pid] = await Tasks(1)(store, event)
    print("ready", pid, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("algorithm cleaned up", flush=True)


async def serves_then_blocks(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await Serve(cap=1)(store, worker_id, event)
    await blocking_runner(store, worker_id, event)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
    address, runner = sys.argv[1:]
    strategy = RayExecutionStrategy(address=address)
    bundles: dict[str, Any] = {"serves": Serve(), "serves_then_blocks": serves_then_blocks}
    strategy.execute(waits, bundles[runner], InMemoryLightningStore())
    print(f"returned interrupted={strategy.interrupted}", flush=True)


if __name__ == "__main__":
    main()
