"""The idle runner of the wake-up benchmark, in a module of its own so that a spawned process finds it."""

from __future__ import annotations

import asyncio
import time
from typing import Any


def idle_runner(url: str, times: Any, count: int) -> None:
    """Claim `count` rollouts one after another, put the time of each claim into the queue, and finish them."""
    from agentlightning.store.client_server import LightningStoreClient

    async def work() -> None:
        client = LightningStoreClient(url)
        for _ in range(count):
            claim = await client.dequeue_rollout(worker_id="bench", timeout=20)
            times.put(time.time())
            assert claim is not None
            await client.finish_rollout(claim.rollout_id)
        await client.close()

    asyncio.run(work())
