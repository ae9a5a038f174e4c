"""The settings by which GRPO serves its policy with vLLM; the names are TRL's where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from agentlightning.errors import BadRequestError
from agentlightning.utils.setting_checks import Bounds

WeightTransfer = Literal["folder", "ipc"]


@dataclass(frozen=True, kw_only=True)
class VLLMSettings:
    """Whether and how vLLM generates."""

    use_vllm: bool = False
    """Generate with vLLM instead of the embedded engine. Needs a GPU and the package `vllm`."""
    vllm_server_base_url: str | None = None
    """The address of a vLLM server that runs already, such as `http://127.0.0.1:8000`; None starts one for the run and
    stops it at its end."""
    vllm_server_timeout: Annotated[float, Bounds(above=0)] = 240.0
    """Seconds until a server that was started must answer."""
    vllm_gpu_memory_utilization: Annotated[float, Bounds(above=0, at_most=1)] = 0.3
    """Share of the GPU's memory that vLLM takes; the learner needs the rest. [`rollout.gpu_memory_utilization`]"""
    vllm_enable_sleep_mode: bool = False
    """vLLM gives its memory back while the learner updates. [`rollout.free_cache_engine`]"""
    vllm_tensor_parallel_size: Annotated[int, Bounds(at_least=1)] = 1
    """GPUs over which vLLM spreads the model. [`rollout.tensor_model_parallel_size`]"""
    vllm_weight_transfer: WeightTransfer = "folder"
    """How new weights get there, where all of them learn: as a `folder` that both read, or from one process to the
    other on the same GPU (`ipc`: vLLM's own transfer, which needs vLLM in the learner's environment)."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of `vllm serve`, such as `("--quantization", "fp8")`."""
    vllm_command: tuple[str, ...] = ()
    """What starts vLLM's command line; `()` is `agl vllm` of this environment."""

    def check_vllm(self, *, has_adapters: bool) -> None:
        """Check what the annotations do not say.

        Raises:
            BadRequestError: one is out of its range, or has no effect as the others are.
        """
        for name in ("vllm_args", "vllm_command"):
            _check_texts(name, getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        if self.vllm_server_base_url is not None:
            _check_address(self.vllm_server_base_url)
        if not self.use_vllm:
            self._refuse_without_vllm()
        if self.vllm_weight_transfer == "ipc" and has_adapters:
            raise BadRequestError(
                "These settings do not go together: vllm_weight_transfer='ipc' and lora: adapters are loaded by their "
                "own API of vLLM; leave vllm_weight_transfer out"
            )
        started = {"vllm_args": self.vllm_args, "vllm_command": self.vllm_command}
        for name, value in started.items():
            if value and self.vllm_server_base_url is not None:
                raise BadRequestError(
                    f"These settings do not go together: {name} and vllm_server_base_url: that server runs already"
                )

    def _refuse_without_vllm(self) -> None:
        defaults = VLLMSettings()
        for name in VLLMSettings.__dataclass_fields__:
            if getattr(self, name) != getattr(defaults, name):
                raise BadRequestError(f"{name}={getattr(self, name)!r} has no effect without use_vllm=True")


def _check_texts(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(each, str) for each in value):
        raise BadRequestError(f"{name} must be a tuple of texts; got {value!r}")


def _check_address(address: object) -> None:
    parts = urlsplit(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise BadRequestError(
            "vllm_server_base_url must be the address of a server without a path, such as 'http://127.0.0.1:8000'; "
            f"got {address!r}"
        )
