"""How the learner's weights come into a vLLM server: adapters by their own API, others by a folder or by CUDA IPC."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from typing_extensions import override

from agentlightning.engine.served import ServedModel
from agentlightning.engine.torch_setup import no_progress_bar
from agentlightning.engine.vllm_engine.control import VLLMControl
from agentlightning.errors import EngineError
from agentlightning.private_files import private_folder

BASE: Final = "base"
"""The name under which the model below an adapter is served."""
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `--max-lora-rank` may be."""


class WeightSync(Protocol):
    """Gives a server the present weights of a policy."""

    def for_start(self) -> list[str]:
        """Write them and return the arguments by which a server starts with them, the model first."""
        ...

    def push(self, control: VLLMControl, timeout: float) -> None:
        """Return when the server serves them; raises `EngineError` if it does not."""
        ...

    def close(self) -> None:
        """Remove what was kept for it."""
        ...


class AdapterSync:
    """Writes the adapter and has vLLM load it in the place of the one before."""

    def __init__(self, policy: ServedModel, base: str, name: str, folder: Path) -> None:
        self._policy, self._base, self._name = policy, base, name
        self._folder = folder

    def for_start(self) -> list[str]:
        """Write the adapter; the model below it is served to nobody."""
        _write(self._policy, self._folder)
        adapters: Any = self._policy.model
        rank = max(config.r for config in adapters.peft_config.values())
        allowed = next((each for each in _LORA_RANKS if each >= rank), rank)
        loaded = ["--lora-modules", f"{self._name}={self._folder}", "--max-lora-rank", str(allowed), "--max-loras", "1"]
        return [self._base, "--served-model-name", BASE, "--enable-lora", *loaded]

    def push(self, control: VLLMControl, timeout: float) -> None:
        """Return when the adapter is served under the policy's name."""
        _write(self._policy, self._folder)
        control.load_adapter(self._name, str(self._folder), timeout)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class FolderSync:
    """Writes all weights and has vLLM read them."""

    def __init__(self, policy: ServedModel, name: str, folder: Path) -> None:
        self._policy, self._name = policy, name
        self._folder = folder

    def for_start(self) -> list[str]:
        """Write weights and tokenizer."""
        _write(self._policy, self._folder)
        self._policy.tokenizer.save_pretrained(self._folder)
        return [str(self._folder), "--served-model-name", self._name]

    def push(self, control: VLLMControl, timeout: float) -> None:
        """Return when the weights are served."""
        _write(self._policy, self._folder)
        control.reload_weights(str(self._folder), timeout)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class IpcSync(FolderSync):
    """Hands the weights over on the GPU by vLLM's own transfer (`vllm.distributed.weight_transfer`, backend `ipc`)."""

    def __init__(self, policy: ServedModel, name: str, folder: Path) -> None:
        """Prepare; raises `EngineError` where vLLM cannot be imported here."""
        try:
            package = "vllm.distributed.weight_transfer"
            base, clients, factory, ipc_engine = (
                import_module(f"{package}.{name}") for name in ("base", "clients", "factory", "ipc_engine")
            )
        except ImportError as error:
            raise EngineError(
                "vllm_weight_transfer='ipc' runs vLLM's transfer in the learner's process, where the package 'vllm' "
                f"cannot be imported ({error}); install it there, or leave vllm_weight_transfer out"
            ) from error
        super().__init__(policy, name, folder)
        self._engine, self._address = None, ""
        self._base: Any = base
        self._clients: Any = clients
        self._factory: Any = factory
        self._ipc: Any = ipc_engine

    @override
    def push(self, control: VLLMControl, timeout: float) -> None:
        """Return when the weights are served."""
        try:
            if self._engine is None or self._address != control.address:
                client = self._clients.HTTPVLLMWeightSyncClient(control.address, timeout=timeout)
                source = self._base.ModuleSource(self._policy.model)
                init: Any = self._ipc.IPCTrainerInitInfo(packed=True)
                make: Any = self._factory.WeightTransferTrainerFactory.trainer_init
                self._engine: Any = make(init, client=client, source=source)
                self._address = control.address
            with self._policy.lock:
                self._engine.send_weights()
        except Exception as error:  # of vLLM, torch and requests
            self._engine = None
            raise EngineError(f"vLLM did not take the weights by CUDA IPC: {error}") from error


def _write(policy: ServedModel, folder: Path) -> None:
    private_folder(folder)
    with policy.lock, no_progress_bar():
        policy.model.save_pretrained(folder)
