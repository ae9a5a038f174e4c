"""A server that speaks MongoDB's wire protocol, as a process of one's own on a loopback port.

    with MongoServer(folder) as server:
        store = MongoLightningStore(server.uri)

It is `nx-27017` from PyPI, which keeps its data in SQLite files: no mongod can be installed everywhere. It knows no
partial indexes and no replica set, and does one thing at a time. `AGL_TEST_MONGO_URI` names a real server to be used
instead.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.stubs.ports import free_port

_NEEDED = "pip install pymongo nx-27017, or name a server in AGL_TEST_MONGO_URI"


class MongoServer:
    """One server; owned by who starts it. May be stopped, or killed, and started again with the same data."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("nx_27017") is None:
            pytest.skip(f"no MongoDB server: nx-27017 is not installed ({_NEEDED})")
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = f"mongodb://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        command = [sys.executable, "-c", "from nx_27017.nx_27017 import main; main()"]
        place = ["--data-dir", str(self._folder / "data"), "--host", "127.0.0.1", "--port", str(self._port)]
        files = ["--log-file", str(self._folder / "nx.log"), "--pid-file", str(self._folder / "nx.pid")]
        output = self._folder / "output.log"
        with output.open("ab") as log:
            self._process = subprocess.Popen([*command, *place, *files], cwd=self._folder, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while not _answers(self._port):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"nx-27017 did not start: {output.read_text()[-2000:]}")
            time.sleep(0.02)  # the server says that it is ready to nobody but those who ask

    def stop(self) -> None:
        """Stop the server in an orderly way. May be called twice."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop the server in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture(scope="session")
def mongo_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a server; each test takes a partition of its own in it."""
    pytest.importorskip("pymongo", reason=f"pymongo is not installed ({_NEEDED})")
    named = os.environ.get("AGL_TEST_MONGO_URI")
    if named:
        yield named
        return
    with MongoServer(tmp_path_factory.mktemp("mongo")) as server:
        yield server.uri
