"""A store server in a process of its own, as `agl store` starts it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.stubs.ports import free_port
from tests.stubs.processes import ROOT, Process


class StoreProcess:
    """Serves a SQLite file at one port, which it keeps when it is started again."""

    def __init__(self, db: Path | str, *, token: str | None = None, log: Path) -> None:
        self.address = f"http://127.0.0.1:{free_port()}"
        self.db, self._token, self._log = str(db), token, log
        self._process: Process | None = None

    def start(self) -> StoreProcess:
        command = ["agl", "store", "--port", self.address.rpartition(":")[2], "--db", self.db]
        self._process = Process(command, ROOT, {"AGL_TOKEN": self._token} if self._token else {}, log=self._log)
        self._process.until(re.escape(self.address))
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End it as Ctrl+C does."""
        if self._process is not None:
            self._process.interrupted(signal.SIGTERM)
