"""A store server in a process of its own, as `agl store` starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]


class StoreProcess:
    """Serves a SQLite file at one port, which it keeps when it is started again."""

    def __init__(self, db: Path | str, *, token: str | None = None, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.db, self._token, self._log = str(db), token, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> StoreProcess:
        """Start it, and return when it answers."""
        env = {key: value for key, value in os.environ.items() if key != "AGL_TOKEN"}
        if self._token:
            env["AGL_TOKEN"] = self._token
        command = [sys.executable, "-m", "agentlightning.cli", "store", "--port", str(self.port), "--db", self.db]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=ROOT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.address}/", timeout=5):
                    return self
            except urllib.error.HTTPError as error:
                error.close()
                return self
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"agl store does not answer:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it as Ctrl+C does."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
