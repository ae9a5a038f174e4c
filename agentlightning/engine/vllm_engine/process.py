"""A vLLM server as a process of this run: started, watched, started again when it ended by itself, stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from agentlightning.engine.vllm_engine.control import VLLMControl
from agentlightning.errors import EngineError
from agentlightning.litagent.command.process_group import ProcessGroup
from agentlightning.private_files import private_folder
from agentlightning.process_secrets import TOKEN

logger = logging.getLogger(__name__)

AGL_VLLM: Final = (sys.executable, "-m", "agentlightning.cli", "vllm")
MAX_RESTARTS: Final = 3
"""How often a server that ended by itself is started again in one run."""
_STOP_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.2
_LAST_LINES: Final = 15
_SWITCHES: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}


class VLLMProcess:
    """One server on loopback with an API key that nobody else knows.

    `start` and `stop` belong to one owner. A thread waits for the end of the process: one that comes by itself starts
    it again, at the same address, `MAX_RESTARTS` times at most.
    """

    def __init__(
        self,
        arguments: Callable[[], Sequence[str]],
        *,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path,
        start_seconds: float,
    ) -> None:
        """Prepare the process; nothing runs yet.

        Args:
            arguments: gives those of `vllm serve`, the model first, before each start: from its first answer on the
                server has the weights that they name. Address and key are added.
            command: starts vLLM's command line; () is `agl vllm`.
            environment: variables beside those of this process.
            log: file to which the server's output is appended.
            start_seconds: until it must answer.
        """
        self.port = _free_port()
        self.api_key = secrets.token_urlsafe(24)
        self.control = VLLMControl(f"http://127.0.0.1:{self.port}", api_key=self.api_key)
        self._command, self._arguments = list(command or AGL_VLLM), arguments
        self._environment = {name: value for name, value in os.environ.items() if name != TOKEN} | _SWITCHES
        self._environment |= {**(environment or {}), "VLLM_API_KEY": self.api_key}
        self._log, self._start_seconds = log, start_seconds
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._group: ProcessGroup | None = None
        self._watcher: threading.Thread | None = None
        self.restarts = 0
        self.failure: EngineError | None = None
        """Why there is no server any more."""

    def start(self) -> None:
        """Start the server; returns when it answers.

        Raises:
            EngineError: the command does not start or ends, or there is no answer in time; the text has the last
                lines of its output.
        """
        private_folder(self._log.parent)
        self._launch()
        self._watcher = threading.Thread(target=self._watch, name="agl-vllm", daemon=True)
        self._watcher.start()

    def await_server(self, timeout: float) -> None:
        """Return when the server answers, after a restart if need be.

        Raises:
            EngineError: there is none any more, or it does not answer in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self.failure is not None:
                raise self.failure
            if self.control.is_healthy():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"The vLLM server did not answer within {timeout:g} s. {self._said()}")
            self._stopping.wait(_LOOK_SECONDS)

    def stop(self) -> None:
        """End the server and all that it started: SIGTERM, then SIGKILL. May be called twice."""
        self._stopping.set()
        if self._process is not None and self._process.poll() is None and self._group is not None:
            self._group.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        if self._group is not None:
            self._group.close()
        if self._process is not None:
            self._process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _launch(self) -> None:
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        arguments = self._arguments()
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [*self._command, "serve", *arguments, *place],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{self._command[0]!r} cannot be started: {error}") from None
        self._group = ProcessGroup(self._process.pid)
        try:
            self._await_health()
        except BaseException:
            self._group.close()
            self._process.wait()
            raise

    def _await_health(self) -> None:
        assert self._process is not None, "launched"
        deadline = time.monotonic() + self._start_seconds
        while not self.control.is_healthy():
            if (code := self._process.poll()) is not None:
                raise EngineError(f"The vLLM server ended with status {code} before it answered. {self._said()}")
            if time.monotonic() > deadline:
                limit = f"vllm_server_timeout={self._start_seconds:g} s"
                raise EngineError(f"The vLLM server did not answer within {limit}. {self._said()}")
            if self._stopping.wait(_LOOK_SECONDS):
                raise EngineError("The vLLM server was stopped before it answered")

    def _watch(self) -> None:
        while True:
            assert self._process is not None, "launched"
            assert self._group is not None, "launched"
            code = self._process.wait()
            if self._stopping.is_set():
                return
            self._group.close()
            try:
                if self.restarts >= MAX_RESTARTS:
                    raise EngineError(f"The vLLM server ended {self.restarts + 1} times by itself. {self._said()}")
                self.restarts += 1
                logger.warning("the vLLM server ended with status %s and is started again. %s", code, self._said())
                self._launch()
            except Exception as error:
                if not self._stopping.is_set():
                    self.failure = error if isinstance(error, EngineError) else EngineError(str(error))
                    logger.error("there is no vLLM server any more: %s", self.failure)
                self._group.close()
                return

    def _said(self) -> str:
        """Return the last lines of the log, to stand in an error's text."""
        with contextlib.suppress(OSError), self._log.open(errors="replace") as log:
            lines = deque((line.rstrip()[:300] for line in log if line.strip()), maxlen=_LAST_LINES)
            if lines:
                return f"Its log {str(self._log)!r} ends with:\n" + "\n".join(f"  {line}" for line in lines)
        return f"It wrote nothing into {str(self._log)!r}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
