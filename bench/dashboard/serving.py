"""The store server of a file as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path

_TRIES = 300


@contextlib.asynccontextmanager
async def serve(file: Path) -> AsyncGenerator[tuple[str, int]]:
    """Serve a store's file on a free port; gives the address and the process id.

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
