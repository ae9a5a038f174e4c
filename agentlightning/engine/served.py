"""A causal language model that can be served: the model, its tokenizer, the version of its weights and their lock."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.base.private_files import private_folder
from agentlightning.engine.torch_setup import SMALL_MODEL_PARAMETERS, leave_out_cudnn_attention, no_progress_bar
from agentlightning.errors import BadRequestError


class ServedModel:
    """A model whose weights may change while it is served."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        weight_version: int = 0,
        max_model_length: int | None = None,
    ) -> None:
        """Take ownership of the model; `max_model_length` limits `context_length`.

        Raises:
            ValueError: the tokenizer has no chat template or no end-of-sequence token.
        """
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the policy'} needs a chat template and an "
                "end-of-sequence token"
            )
        self.model = model
        """The live weights, in evaluation mode whenever they are served."""
        leave_out_cudnn_attention(model.device)
        self.tokenizer = tokenizer
        """Tokenizer with its chat template."""
        self.weight_version = weight_version
        """0 when loaded, incremented by every update that changed the weights."""
        self.lock = threading.RLock()
        """Lock that every reader and writer of the weights must hold."""
        self._max_length = max_model_length

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a reply: the tokenizer's and those of the generation settings."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        several = cast("list[int | None]", configured if isinstance(configured, list) else [configured])
        own = cast("int | None", self.tokenizer.eos_token_id)
        return frozenset(token for token in (own, *several) if token is not None)

    @property
    def is_small(self) -> bool:
        """True if the model's operations are too short to benefit from several CPU threads."""
        return sum(parameter.numel() for parameter in self.model.parameters()) < SMALL_MODEL_PARAMETERS

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        return min(config.max_position_embeddings, window or 1 << 60, self._max_length or 1 << 60)

    def gives_probabilities(self) -> bool:
        """Return whether all weights are finite and the model computes finite logits for the shortest prompt."""
        with self.lock, torch.inference_mode():
            if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
                return False
            shortest = torch.tensor([[self.tokenizer.eos_token_id]], device=self.model.device)  # (1, 1)
            return bool(self.model(input_ids=shortest).logits.isfinite().all())

    def merged(self) -> PreTrainedModel:
        """Return the model, or a copy with the adapters merged in."""
        if not hasattr(self.model, "merge_and_unload"):
            return self.model
        adapted: Any = copy.deepcopy(self.model)
        return adapted.merge_and_unload()

    def save(self, path: str | Path) -> None:
        """Write model and tokenizer in the format of `from_pretrained`; adapters are merged into the written copy."""
        private_folder(path)
        with self.lock, no_progress_bar():
            self.merged().save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def load_model(
    path: str | Path, *, bf16: bool = False, device: str = "cpu", four_bit: str | None = None
) -> PreTrainedModel:
    """Return the model in a folder (or of a name in the local cache), on the CPU, with the data type for `device`, see
    `dtype_of`. With `four_bit` (`nf4` or `fp4`) it is on `device`, and its linear layers are quantized (QLoRA,
    arXiv:2305.14314)."""
    dtype = dtype_of(device, bf16=bf16)
    options: dict[str, Any] = {}
    if four_bit is not None:
        bitsandbytes_for("load_in_4bit=True")
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=four_bit, bnb_4bit_compute_dtype=dtype)
        options = {"quantization_config": config, "device_map": {"": device}}
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, attn_implementation="sdpa", **options
        )
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):  # its other form of the weights has no gradient
            module.support_avx512bf16_for_cpu = False
    return model


def bitsandbytes_for(setting: str) -> Any:
    """Return the package bitsandbytes, which a setting requires.

    Raises:
        BadRequestError: it cannot be imported.
    """
    try:
        import bitsandbytes  # pyright: ignore[reportMissingImports] -- an optional package
    except ImportError as error:
        raise BadRequestError(
            f"{setting} requires the package bitsandbytes, which cannot be imported ({error}). Install it with "
            "pip install bitsandbytes, or use another value"
        ) from None
    return cast("Any", bitsandbytes)


def dtype_of(device: str, *, bf16: bool) -> torch.dtype:
    """Return the data type of the model's computation.

    Raises:
        BadRequestError: bfloat16 is requested on a device that does not support it.
    """
    if not bf16:
        return torch.float32
    on_cpu = torch.device(device).type == "cpu"
    has = torch.ops.mkldnn._is_mkldnn_bf16_supported() if on_cpu else torch.cuda.is_bf16_supported(False)  # pyright: ignore
    if not has:
        where = "this processor (AVX-512 is required)" if on_cpu else f"the device {device!r}"
        raise BadRequestError(
            f"bf16=True requires bfloat16 instructions, which {where} does not have, so it would be slower than "
            "float32. Remove bf16"
        )
    return torch.bfloat16


@contextmanager
def head_sees_only(model: PreTrainedModel, wanted: torch.Tensor) -> Generator[list[torch.Tensor]]:
    """Restrict the output layer to the hidden states at the given positions, as a batch of one; the model's other
    changes of its logits still apply. The list has the layer's input, (1, N, H), or is empty."""
    head_inputs: list[torch.Tensor] = []

    def select(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        head_inputs.append(inputs[0][wanted][None])
        return head_inputs[-1], *inputs[1:]

    head = cast("torch.nn.Module | None", model.get_output_embeddings())
    hook = None if head is None else head.register_forward_pre_hook(select)
    try:
        yield head_inputs
    finally:
        if hook is not None:
            hook.remove()
