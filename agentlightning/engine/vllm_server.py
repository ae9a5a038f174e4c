"""A vLLM server: the settings of GRPO for it, the calls that control it, and its process.

Source of the calls: vLLM 0.33, `entrypoints/serve/dev`, `entrypoints/serve/lora` and `entrypoints/rl/online`. All calls
except `/health` and `/metrics` require `VLLM_SERVER_DEV_MODE=1`; those for adapters require
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode, urlsplit

from agentlightning.base.private_files import private_folder
from agentlightning.base.process_secrets import TOKEN
from agentlightning.errors import BadRequestError, EngineError
from agentlightning.utils.process_group import ProcessGroup
from agentlightning.utils.setting_checks import Bounds

logger = logging.getLogger(__name__)

WeightTransfer = Literal["folder", "ipc"]
AGL_VLLM: Final = (sys.executable, "-m", "agentlightning.cli", "vllm")
MAX_RESTARTS: Final = 3
"""Maximum number of restarts per run of a server that exited."""
_STOP_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.2
_HEALTH_SECONDS: Final = 5.0
_LAST_LINES: Final = 15
_LONGEST_TEXT: Final = 500
SWITCHES: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """Settings of generation with vLLM, with TRL's names if TRL has the setting."""

    use_vllm: bool = False
    """Generate with vLLM instead of the embedded engine. Requires a GPU and the package `vllm`."""
    vllm_server_base_url: str | None = None
    """Address of a running vLLM server, such as `http://127.0.0.1:8000`; None starts one for the run and stops it at
    the end of the run."""
    vllm_server_timeout: Annotated[float, Bounds(above=0)] = 240.0
    """Seconds within which a started server must respond."""
    vllm_gpu_memory_utilization: Annotated[float, Bounds(above=0, at_most=1)] = 0.3
    """Share of the GPU's memory that vLLM uses; the learner needs the rest. [`rollout.gpu_memory_utilization`]"""
    vllm_enable_sleep_mode: bool = False
    """Free vLLM's memory while the learner updates. [`rollout.free_cache_engine`]"""
    vllm_tensor_parallel_size: Annotated[int, Bounds(at_least=1)] = 1
    """Number of GPUs over which vLLM splits the model. [`rollout.tensor_model_parallel_size`]"""
    vllm_weight_transfer: WeightTransfer = "folder"
    """Transfer of new weights to vLLM if all weights are trained: through a `folder` that both can read, or between the
    processes on the same GPU (`ipc`: vLLM's own transfer, which requires vLLM in the learner's environment)."""
    vllm_args: tuple[str, ...] = ()
    """Additional arguments of `vllm serve`, such as `("--quantization", "fp8")`."""
    vllm_command: tuple[str, ...] = ()
    """Command to start vLLM, as a tuple; `()` is `agl vllm` of this environment."""

    def check_vllm(self, *, has_adapters: bool) -> None:
        """Raise `BadRequestError` for a setting that is out of range or has no effect with the others."""
        for name in ("vllm_args", "vllm_command"):
            value: object = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(each, str) for each in value):
                raise BadRequestError(f"{name} must be a tuple of strings; got {value!r}")
            object.__setattr__(self, name, tuple(value))  # JSON has lists
        if self.vllm_server_base_url is not None:
            parts = urlsplit(str(self.vllm_server_base_url))
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise BadRequestError(
                    "vllm_server_base_url must be the address of a server without a path, such as "
                    f"'http://127.0.0.1:8000'; got {self.vllm_server_base_url!r}"
                )
        if not self.use_vllm:
            for name, field in VLLMSettings.__dataclass_fields__.items():
                if getattr(self, name) != field.default:
                    raise BadRequestError(f"{name}={getattr(self, name)!r} has no effect without use_vllm=True")
        if self.vllm_weight_transfer == "ipc" and has_adapters:
            raise BadRequestError(
                "vllm_weight_transfer='ipc' and lora cannot be combined, because vLLM loads adapters with a separate "
                "API; omit vllm_weight_transfer"
            )
        for name in ("vllm_args", "vllm_command"):
            if getattr(self, name) and self.vllm_server_base_url is not None:
                raise BadRequestError(
                    f"{name} and vllm_server_base_url cannot be combined, because that server is already running"
                )


class VLLMControl:
    """The calls to one vLLM server. May be used from any thread. Any failure is an `EngineError`."""

    def __init__(self, address: str, *, api_key: str | None = None) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def is_healthy(self) -> bool:
        """Return whether the server responds and its engine is alive."""
        try:
            self._ask("GET", "/health", _HEALTH_SECONDS)
        except EngineError:
            return False
        return True

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return json.loads(self._ask("GET", path, _HEALTH_SECONDS))

    def post(self, path: str, timeout: float, body: Mapping[str, Any] | None = None, **query: object) -> bytes:
        """Return the response to a call with a JSON body or query arguments, within `timeout` seconds."""
        return self._ask("POST", path + (f"?{urlencode(query, doseq=True)}" if query else ""), timeout, body)

    def sums(self, *counters: str) -> list[int]:
        """Return vLLM's counters since the server started, each summed over all its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self._ask("GET", "/metrics", _HEALTH_SECONDS).decode())
        samples = [sample for family in families for sample in family.samples]
        names = [f"vllm:{counter}_total" for counter in counters]
        return [int(sum(sample.value for sample in samples if sample.name == name)) for name in names]

    def _ask(self, method: str, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data=data, headers=self._headers, method=method)
        call = f"{method} {path.partition('?')[0]} of the vLLM server at {self.address}"
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()[:_LONGEST_TEXT]
            advice = ""
            if error.code == 404:
                variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if "lora" in path else "VLLM_SERVER_DEV_MODE"
                advice = f". Start the server with {variable}=1 in its environment"
            elif error.code in (401, 403):
                advice = ". Set the API key of the server in the environment variable VLLM_API_KEY"
            raise EngineError(f"{call} returned {error.code}: {text or error.reason}{advice}") from None
        except OSError as error:  # URLError and TimeoutError are subclasses
            raise EngineError(f"{call} did not respond within {timeout:g} s: {error}") from None


class VLLMProcess:
    """One server on loopback with a random API key.

    `start` and `stop` belong to one owner. A thread waits for the end of the process and restarts it if it exits, at
    the same address, at most `MAX_RESTARTS` times.
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
        """Prepare the process; it is not started yet.

        Args:
            arguments: returns the arguments of `vllm serve`, the model first; called before each start, so that the
                server starts with the current weights. Address and key are added.
            command: starts vLLM's command line; () is `agl vllm`.
            environment: variables in addition to those of this process.
            log: file to which the server's output is appended.
            start_seconds: seconds within which it must respond.
        """
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port: int = probe.getsockname()[1]
        self.api_key = secrets.token_urlsafe(24)
        self.control = VLLMControl(f"http://127.0.0.1:{self._port}", api_key=self.api_key)
        self._command, self._arguments = list(command or AGL_VLLM), arguments
        self._environment = {name: value for name, value in os.environ.items() if name != TOKEN} | SWITCHES
        self._environment |= {**(environment or {}), "VLLM_API_KEY": self.api_key}
        self._log, self._start_seconds = log, start_seconds
        self._stopping = threading.Event()
        self._server: tuple[subprocess.Popen[bytes], ProcessGroup] | None = None
        self._watcher: threading.Thread | None = None
        self._restarts = 0
        self._failure: EngineError | None = None  # why there is no server any more

    def start(self) -> None:
        """Start the server; return when it responds. If it does not, raise `EngineError` with the reason and the last
        lines of its output."""
        private_folder(self._log.parent)
        process, group = self._launch()
        self._watcher = threading.Thread(target=self._watch, args=(process, group), name="agl-vllm", daemon=True)
        self._watcher.start()

    def await_server(self, timeout: float) -> None:
        """Wait until the server responds, if necessary after a restart; if it does not, raise `EngineError`."""
        deadline = time.monotonic() + timeout
        while True:
            if self._failure is not None:
                raise self._failure
            if self.control.is_healthy():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"The vLLM server did not respond within {timeout:g} s. {self._log_end()}")
            self._stopping.wait(_POLL_SECONDS)

    def stop(self) -> None:
        """End the server and its child processes: SIGTERM, then SIGKILL. May be called twice."""
        self._stopping.set()
        if self._server is not None:
            process, group = self._server
            if process.poll() is None:
                group.signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
            group.close()
            process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _launch(self) -> tuple[subprocess.Popen[bytes], ProcessGroup]:
        place = ["--host", "127.0.0.1", "--port", str(self._port)]
        command = [*self._command, "serve", *self._arguments(), *place]
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{self._command[0]!r} cannot be started: {error}") from None
        group = ProcessGroup(process.pid)
        self._server = process, group
        try:
            self._await_health(process)
        except BaseException:
            group.close()
            process.wait()
            raise
        return process, group

    def _await_health(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_seconds
        while not self.control.is_healthy():
            if (code := process.poll()) is not None:
                raise EngineError(f"The vLLM server exited with status {code} before it responded. {self._log_end()}")
            if time.monotonic() > deadline:
                limit = f"vllm_server_timeout={self._start_seconds:g} s"
                raise EngineError(f"The vLLM server did not respond within {limit}. {self._log_end()}")
            if self._stopping.wait(_POLL_SECONDS):
                raise EngineError("The vLLM server was stopped before it responded")

    def _watch(self, process: subprocess.Popen[bytes], group: ProcessGroup) -> None:
        while True:
            code = process.wait()
            if self._stopping.is_set():
                return
            group.close()
            try:
                if self._restarts >= MAX_RESTARTS:
                    raise EngineError(f"The vLLM server exited {self._restarts + 1} times. {self._log_end()}")
                self._restarts += 1
                logger.warning("the vLLM server exited with status %s; restarting it. %s", code, self._log_end())
                process, group = self._launch()
            except Exception as error:
                if not self._stopping.is_set():
                    self._failure = error if isinstance(error, EngineError) else EngineError(str(error))
                    logger.error("the vLLM server is not restarted: %s", self._failure)
                return

    def _log_end(self) -> str:
        with contextlib.suppress(OSError), self._log.open(errors="replace") as log:
            lines = deque((line.rstrip()[:300] for line in log if line.strip()), maxlen=_LAST_LINES)
            if lines:
                return f"Its log {str(self._log)!r} ends with:\n" + "\n".join(f"  {line}" for line in lines)
        return f"It wrote nothing to {str(self._log)!r}"
