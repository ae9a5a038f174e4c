"""vLLM with the interface of the embedded engine: a server beside the learner, which serves what was learned last."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentlightning.engine.decode_thread import EngineStats
from agentlightning.engine.served import ServedModel
from agentlightning.engine.vllm_engine.control import VLLMControl
from agentlightning.engine.vllm_engine.process import VLLMProcess
from agentlightning.engine.vllm_engine.vllm_settings import VLLMSettings
from agentlightning.engine.vllm_engine.weights import AdapterSync, FolderSync, IpcSync, WeightSync
from agentlightning.errors import EngineError

logger = logging.getLogger(__name__)

LOG: Final = "vllm.log"
WEIGHTS: Final = "vllm-weights"
_STEER_SECONDS: Final = 600.0
"""For a server to take new weights."""


class VLLMEngine:
    """Serves a policy by vLLM.

    While the weights change (`swap`) nothing is in flight: the server pauses, or sleeps and gives its memory back. It
    goes on with the new weights, without the keys and values that older ones computed. A server that ends by itself is
    started again with the present weights; the calls that were in flight fail and are the gateway's to repeat.
    """

    def __init__(
        self,
        policy: ServedModel,
        settings: VLLMSettings,
        *,
        model: str,
        folder: Path,
        model_name: str = "policy",
        has_adapters: bool = False,
        seed: int = 0,
        max_batch: int = 64,
    ) -> None:
        """Prepare the engine; nothing runs yet.

        Args:
            model: folder of the model below the adapters.
            folder: for the weights that the server reads, and for the output of one that is started.
            has_adapters: they alone learn.
            max_batch: calls that are generated at once by a server that is started.
        """
        self.model_name: Final = model_name
        self._swapping, self._pushing = threading.Lock(), threading.Lock()  # the latter: a server may start meanwhile
        self._policy, self._settings = policy, settings
        sync = IpcSync if settings.vllm_weight_transfer == "ipc" else FolderSync
        self._sync: WeightSync = (
            AdapterSync(policy, model, model_name, folder / WEIGHTS)
            if has_adapters
            else sync(policy, model_name, folder / WEIGHTS)
        )
        self._has_adapters = has_adapters
        self._process: VLLMProcess | None = None
        if settings.vllm_server_base_url is None:
            self._process = VLLMProcess(
                lambda: [*self._write(), *_arguments(policy, settings, seed, max_batch)],
                command=settings.vllm_command,
                environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if isinstance(self._sync, IpcSync) else None,
                log=folder / LOG,
                start_seconds=settings.vllm_server_timeout,
            )
            self._control = self._process.control
        else:
            key = os.environ.get("VLLM_API_KEY")
            self._control = VLLMControl(settings.vllm_server_base_url, api_key=key)
        self._served: int | None = None
        self._began = time.monotonic()
        self._swapped_seconds = 0.0

    @property
    def base_url(self) -> str:
        """Where OpenAI clients point."""
        return f"{self._control.address}/v1"

    @property
    def api_key(self) -> str | None:
        """What clients must send."""
        return os.environ.get("VLLM_API_KEY") if self._process is None else self._process.api_key

    def start(self) -> None:
        """Start or find the server and give it the weights.

        Raises:
            EngineError: it does not start, does not answer, serves another model, or does not take the weights.
        """
        if self._process is not None:
            self._process.start()
        elif not self._control.is_healthy():
            raise EngineError(
                f"No vLLM server answers at vllm_server_base_url={self._control.address!r}: GET /health. Start it with "
                "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 agl vllm serve MODEL "
                f"--served-model-name {self.model_name} --logprobs-mode processed_logprobs"
            )
        try:
            self._check_name()
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
    def swap(self, timeout: float = 30.0) -> Generator[None]:
        """Let what is in flight end, let the block change the weights, and serve them.

        Raises:
            EngineError: the server did not do its part; or there is none any more.
        """
        if not self._swapping.acquire(timeout=timeout):
            raise EngineError(f"Another change of the weights was not over within {timeout:g} s")
        began = time.monotonic()
        try:
            self._await_server(timeout)
            self._halt(timeout)
            try:
                yield
            finally:
                self._go_on(began)
        finally:
            self._swapped_seconds += time.monotonic() - began
            self._swapping.release()

    def stats(self) -> EngineStats:
        """Return sums since the start. `busy_seconds` is the time outside of swaps."""
        with contextlib.suppress(EngineError):
            requests, prompt, completion = self._control.counts()
            busy = time.monotonic() - self._began - self._swapped_seconds
            return EngineStats(requests, prompt, completion, busy)
        return EngineStats()

    def _halt(self, timeout: float) -> None:
        if self._settings.vllm_enable_sleep_mode:
            self._control.sleep(1 if self._has_adapters else 2, timeout)  # of an adapter's model the weights stay
        else:
            self._control.pause(timeout)

    def _go_on(self, began: float) -> None:
        """Serve the present weights. A server that was started again meanwhile does not sleep."""
        self._await_server(_STEER_SECONDS)
        sleeps = self._settings.vllm_enable_sleep_mode and self._control.is_sleeping()
        if sleeps:
            self._control.wake_up(["weights"], _STEER_SECONDS)
        if self._served != self._policy.weight_version or (sleeps and not self._has_adapters):
            self._push()
            logger.debug("vLLM took weight version %s, %.1f s", self._served, time.monotonic() - began)
        if sleeps:
            self._control.wake_up(["kv_cache"], _STEER_SECONDS)
        self._control.forget_prefixes(_STEER_SECONDS)
        if not sleeps:
            self._control.resume(_STEER_SECONDS)

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

    def _check_name(self) -> None:
        if self._process is None and self._has_adapters:
            return  # the adapter takes the name
        found = self._control.models()
        if self.model_name not in found:
            raise EngineError(
                f"The vLLM server at {self._control.address} serves {', '.join(found)}; it must serve the policy as "
                f"{self.model_name!r}: start it with --served-model-name {self.model_name}"
            )


def _arguments(policy: ServedModel, settings: VLLMSettings, seed: int, most_calls: int) -> list[str]:
    """Return the arguments of `vllm serve` after the model's. Log-probabilities are of the distribution that is
    sampled from."""
    arguments = ["--seed", str(seed), "--max-model-len", str(policy.context_length)]
    arguments += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(most_calls)]
    arguments += ["--gpu-memory-utilization", str(settings.vllm_gpu_memory_utilization)]
    arguments += ["--tensor-parallel-size", str(settings.vllm_tensor_parallel_size)]
    arguments += ["--dtype", str(policy.model.dtype).removeprefix("torch.")]
    if settings.vllm_enable_sleep_mode:
        arguments += ["--enable-sleep-mode"]
    if settings.vllm_weight_transfer == "ipc":
        arguments += ["--weight-transfer-config", '{"backend": "ipc"}']
    return [*arguments, *settings.vllm_args]
