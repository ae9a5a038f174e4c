"""A live run: the store server of a file as a separate process, and rollouts at a steady pace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest
from bench.dashboard.store import RUN

PER_SECOND = 50
LOADED = f"a live run is {PER_SECOND} rollouts a second"
_TIMES = 5
"""Number of times per second that rollouts are added and ended."""
_TRIES = 300


class Load:
    """Adds and ends rollouts until the context ends."""

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


@contextlib.asynccontextmanager
async def serve(file: Path) -> AsyncGenerator[tuple[str, int]]:
    """Serve a store's file on a free port; yield the address and the process id.

    Raises:
        RuntimeError: the server did not answer within 60 seconds, or has no page.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("agl")), "store", "--port", str(port), "--db", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(_TRIES):
            if process.returncode is not None:
                raise RuntimeError(f"the store server ended with {process.returncode}: {' '.join(command)}")
            with contextlib.suppress(OSError):
                await asyncio.to_thread(lambda: urllib.request.urlopen(f"{base}/", timeout=5).close())
                break
            await asyncio.sleep(0.2)
        else:
            raise RuntimeError(f"no page at {base}/; build it with `make dashboard`")
        yield base, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
