"""Rollouts at a steady pace, as a live run plays them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest
from bench.dashboard.store import RUN

PER_SECOND = 50
LOADED = f"a live run is {PER_SECOND} rollouts a second"
_TIMES = 5
"""How often a second rollouts are added and ended."""


class Load:
    """Add and end rollouts until it is left."""

    def __init__(self, client: LightningStoreClient) -> None:
        self._client = client

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._play())
        return self

    async def __aexit__(self, *_: object) -> None:
        ended = self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if ended:
            self._task.result()

    async def _play(self) -> None:
        each = PER_SECOND // _TIMES
        due = time.perf_counter()
        while True:
            request = EnqueueRolloutRequest(input={"question": "a room"}, mode="train", run_id=RUN)
            await self._client.enqueue_many_rollouts([request] * each)
            for claim in await self._client.dequeue_many_rollouts(limit=each, worker_id="live", run_id=RUN):
                await self._client.update_attempt(
                    claim.rollout_id, claim.attempt.attempt_id, status="succeeded", outcome="unscored"
                )
            due += 1 / _TIMES
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, its system calls included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
