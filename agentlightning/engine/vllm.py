"""vLLM with the interface of the embedded engine: a separate server that serves the latest weights."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from typing_extensions import override

from agentlightning.base.private_files import private_folder
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.engine.served import ServedModel
from agentlightning.engine.torch_setup import no_progress_bar
from agentlightning.engine.vllm_server import VLLMControl, VLLMProcess, VLLMSettings
from agentlightning.errors import EngineError

logger = logging.getLogger(__name__)

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
"""`processed_logprobs`: after temperature, penalties and truncation; `raw_logprobs`: before all of them."""
_STEER_SECONDS: Final = 600.0
"""Timeout in seconds for a server to load new weights."""
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `--max-lora-rank`."""


class VLLMEngine:
    """Serves a policy with vLLM.

    While the weights change (`paused`), no call is in progress: the server pauses, or sleeps and frees its memory. It
    then continues with the new weights and without the cached keys and values of older weights. A server that exits is
    restarted with the current weights; calls in progress fail, and the gateway retries them.
    """

    def __init__(
        self,
        policy: ServedModel,
        settings: VLLMSettings,
        *,
        model: str,
        folder: Path,
        has_adapters: bool = False,
        seed: int = 0,
        max_batch: int = 64,
        logprobs_mode: LogprobsMode = "processed_logprobs",
    ) -> None:
        """Prepare the engine; the server is not started yet.

        Args:
            model: folder of the base model of the adapters.
            folder: folder for the weights that the server reads, and for the output of a started server.
            has_adapters: whether only adapters are trained.
            max_batch: maximum number of calls that a started server generates concurrently.
            logprobs_mode: log-probabilities that the server returns.
        """
        self.model_name: Final = "policy"
        self._pausing, self._pushing = threading.Lock(), threading.Lock()  # the latter: a server may start meanwhile
        self._policy, self._settings, self._has_adapters = policy, settings, has_adapters
        self._logprobs_mode = logprobs_mode
        weights, ipc = folder / "vllm-weights", settings.vllm_weight_transfer == "ipc"
        if has_adapters:
            self._sync = AdapterSync(policy, self.model_name, weights, base=model)
        else:
            self._sync = (IpcSync if ipc else FolderSync)(policy, self.model_name, weights)
        self._process: VLLMProcess | None = None
        if settings.vllm_server_base_url is None:
            self._process = VLLMProcess(
                lambda: [*self._write(), *_arguments(policy, settings, seed, max_batch, logprobs_mode)],
                command=settings.vllm_command,
                environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if ipc else None,
                log=folder / "vllm.log",
                start_seconds=settings.vllm_server_timeout,
            )
            self._control = self._process.control
        else:
            self._control = VLLMControl(settings.vllm_server_base_url, api_key=self.api_key)
        self._served: int | None = None
        self._began = time.monotonic()
        self._paused_seconds = 0.0

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients."""
        return f"{self._control.address}/v1"

    @property
    def api_key(self) -> str | None:
        """The key of clients."""
        return os.environ.get("VLLM_API_KEY") if self._process is None else self._process.api_key

    def start(self) -> None:
        """Start or find the server and load the weights into it. Raise `EngineError` if it does not start, does not
        respond, serves another model, or does not load the weights."""
        if self._process is not None:
            self._process.start()
        elif not self._control.is_healthy():
            raise EngineError(
                f"No vLLM server responds at vllm_server_base_url={self._control.address!r}. Start it with "
                "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 agl vllm serve MODEL "
                f"--served-model-name {self.model_name} --logprobs-mode {self._logprobs_mode}"
            )
        try:
            if self._process is not None or not self._has_adapters:  # else the adapter takes the name
                names = [str(model["id"]) for model in self._control.get("/v1/models")["data"]]
                if self.model_name not in names:
                    raise EngineError(
                        f"The vLLM server at {self._control.address} serves {', '.join(names)}, but must serve the "
                        f"policy as {self.model_name!r}. Start it with --served-model-name {self.model_name}"
                    )
            if self._process is None:
                self._push()
        except BaseException:
            self.stop()
            raise
        self._began = time.monotonic()

    def stop(self) -> None:
        """Stop a server that was started here. May be called twice."""
        if self._process is not None:
            self._process.stop()
        self._sync.close()

    @contextmanager
    def paused(self, timeout: float = 30.0) -> Generator[None]:
        """Wait for calls in progress, run the block, which changes the weights, and serve them. Raise `EngineError` if
        the server fails or no longer exists."""
        if not self._pausing.acquire(timeout=timeout):
            raise EngineError(f"Another change of the weights did not finish within {timeout:g} s")
        began = time.monotonic()
        try:
            self._await_server(timeout)
            if self._settings.vllm_enable_sleep_mode:
                level = 1 if self._has_adapters else 2  # 1 keeps the weights in the CPU's memory: an adapter's base
                self._control.post("/sleep", timeout, level=level, mode="wait")
            else:
                self._control.post("/pause", timeout, mode="wait")
            try:
                yield
            finally:
                self._resume(began)
        finally:
            self._paused_seconds += time.monotonic() - began
            self._pausing.release()

    def stats(self) -> EngineStats:
        """Return totals since the start. `busy_seconds` is the time outside pauses."""
        try:
            requests, prompt, completion = self._control.sums("request_success", "prompt_tokens", "generation_tokens")
        except EngineError:
            return EngineStats()
        return EngineStats(requests, prompt, completion, time.monotonic() - self._began - self._paused_seconds)

    def _resume(self, began: float) -> None:
        """Serve the current weights. A server that was restarted meanwhile does not sleep."""
        self._await_server(_STEER_SECONDS)
        control = self._control
        sleeps = self._settings.vllm_enable_sleep_mode and control.get("/is_sleeping")["is_sleeping"]
        if sleeps:
            control.post("/wake_up", _STEER_SECONDS, tags=["weights"])
        if self._served != self._policy.weight_version or (sleeps and not self._has_adapters):
            self._push()
            logger.debug("vLLM loaded weight version %s in %.1f s", self._served, time.monotonic() - began)
        if sleeps:
            control.post("/wake_up", _STEER_SECONDS, tags=["kv_cache"])
        if not json.loads(control.post("/reset_prefix_cache", _STEER_SECONDS)).get("success"):
            raise EngineError(
                f"The vLLM server at {control.address} did not reset its prefix cache, which has keys and values of "
                "older weights, because a program other than this run sends calls to it. Stop that program"
            )
        if not sleeps:
            control.post("/resume", _STEER_SECONDS)

    def _write(self) -> list[str]:
        with self._pushing:
            self._served = self._policy.weight_version
            return self._sync.for_start()

    def _push(self) -> None:
        with self._pushing:
            version = self._policy.weight_version
            self._sync.push(self._control, _STEER_SECONDS)
            self._served = version

    def _await_server(self, timeout: float) -> None:
        if self._process is not None:
            self._process.await_server(timeout)


def _arguments(
    policy: ServedModel, settings: VLLMSettings, seed: int, most_calls: int, logprobs_mode: LogprobsMode
) -> list[str]:
    """Return the arguments of `vllm serve` after the model."""
    values = {
        "--seed": seed,
        "--max-model-len": policy.context_length,
        "--logprobs-mode": logprobs_mode,
        "--max-num-seqs": most_calls,
        "--gpu-memory-utilization": settings.vllm_gpu_memory_utilization,
        "--tensor-parallel-size": settings.vllm_tensor_parallel_size,
        "--dtype": str(policy.model.dtype).removeprefix("torch."),
    }
    if settings.vllm_weight_transfer == "ipc":
        values["--weight-transfer-config"] = '{"backend": "ipc"}'
    sleep = ["--enable-sleep-mode"] if settings.vllm_enable_sleep_mode else []
    return [*(str(part) for value in values.items() for part in value), *sleep, *settings.vllm_args]


class FolderSync:
    """Transfers all current weights of a policy to a server, through a folder that it reads."""

    def __init__(self, policy: ServedModel, name: str, folder: Path) -> None:
        self._policy, self._name, self._folder = policy, name, folder

    def for_start(self) -> list[str]:
        """Write the weights and return the arguments to start a server with them, the model first."""
        self._save()
        self._policy.tokenizer.save_pretrained(self._folder)
        return [str(self._folder), "--served-model-name", self._name]

    def push(self, control: VLLMControl, timeout: float) -> None:
        """Load the weights into the server; return when it serves them, or raise `EngineError`."""
        self._save()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        control.post("/collective_rpc", timeout, body)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self) -> None:
        private_folder(self._folder)
        with self._policy.lock, no_progress_bar():
            self._policy.model.save_pretrained(self._folder)


class AdapterSync(FolderSync):
    """Writes only the adapter, and vLLM replaces the previous one with it."""

    def __init__(self, policy: ServedModel, name: str, folder: Path, *, base: str) -> None:
        super().__init__(policy, name, folder)
        self._base = base

    @override
    def for_start(self) -> list[str]:
        """Write the adapter; its base model has the name `base`, which no call requests."""
        self._save()
        adapters: Any = self._policy.model
        rank = max(config.r for config in adapters.peft_config.values())
        allowed = next((each for each in _LORA_RANKS if each >= rank), rank)
        loaded = ["--lora-modules", f"{self._name}={self._folder}", "--max-lora-rank", str(allowed), "--max-loras", "1"]
        return [self._base, "--served-model-name", "base", "--enable-lora", *loaded]

    @override
    def push(self, control: VLLMControl, timeout: float) -> None:
        self._save()
        body = {"lora_name": self._name, "lora_path": str(self._folder), "load_inplace": True}
        control.post("/v1/load_lora_adapter", timeout, body)


class IpcSync(FolderSync):
    """Transfers the weights on the GPU with vLLM's own transfer (`vllm.distributed.weight_transfer`, backend `ipc`)."""

    def __init__(self, policy: ServedModel, name: str, folder: Path) -> None:
        """Prepare the transfer; raise `EngineError` if vLLM cannot be imported here."""
        super().__init__(policy, name, folder)
        try:
            package = "vllm.distributed.weight_transfer"
            self._base, self._clients, self._factory, self._ipc = (
                import_module(f"{package}.{name}") for name in ("base", "clients", "factory", "ipc_engine")
            )
        except ImportError as error:
            raise EngineError(
                "vllm_weight_transfer='ipc' requires the package 'vllm' in the learner's process, where it cannot be "
                f"imported ({error}). Install it there, or omit vllm_weight_transfer"
            ) from error
        self._engine: Any = None
        self._address = ""

    @override
    def push(self, control: VLLMControl, timeout: float) -> None:
        try:
            if self._engine is None or self._address != control.address:
                client = self._clients.HTTPVLLMWeightSyncClient(control.address, timeout=timeout)
                source = self._base.ModuleSource(self._policy.model)
                init = self._ipc.IPCTrainerInitInfo(packed=True)
                make = self._factory.WeightTransferTrainerFactory.trainer_init
                self._engine = make(init, client=client, source=source)
                self._address = control.address
            with self._policy.lock:
                self._engine.send_weights()
        except Exception as error:  # of vLLM, torch and requests
            self._engine = None
            raise EngineError(f"vLLM did not receive the weights by CUDA IPC: {error}") from error
