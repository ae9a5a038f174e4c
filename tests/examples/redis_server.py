"""A real Redis server of one's own, on a unix socket in a temporary folder, gone when the tests end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_server() -> Generator[str]:
    """Give the address of a server; skip where none is installed."""
    pytest.importorskip("redis", reason="the package redis is not installed (examples/own_store/requirements.txt)")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no Redis server is installed (apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="agl-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        settings = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        with subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL) as server:
            try:
                for _ in range(500):
                    if socket.exists():
                        break
                    assert server.poll() is None, "redis-server ended"
                    time.sleep(0.02)
                yield f"unix://{socket}"
            finally:
                server.terminate()
