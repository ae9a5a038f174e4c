"""The memory that a run needs and the memory that is available.

The sum is computed from the model's configuration before loading: the model is built without data (on torch's `meta`
device), its weights are counted, and so are the tensors that a forward pass keeps for its backward pass. It is a lower
bound: rows are assumed to have `max_model_length` tokens (without it, twice `max_completion_length`) and one reply of
`max_completion_length` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentlightning.engine.served import bitsandbytes_for, head_sees_only
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.learner.optimizers import state_bytes
from agentlightning.training.learner.parameters import with_lora
from agentlightning.utils.system_snapshot import memory_capacity_bytes

if TYPE_CHECKING:
    from agentlightning.training.settings import TrainingSettings

GIB: Final = 2**30
_COUNTING: Final = "agl_counting"
_MEASURED_TOKENS: Final = 128
_LOGIT_COPIES: Final = 4  # float32 numbers a trained token and vocabulary entry, at the peak of softmax and entropy
_ENGINE_COPIES: Final = 8  # the same while a token is drawn: logits, two softmaxes, cumulative sums in double


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the needed memory: its purpose, its bytes, and the settings that reduce it."""

    what: str
    bytes: int
    lever: str


def check_memory(*policies: TrainingSettings) -> None:
    """Reject a run that does not fit into memory, before its model is loaded. `policies`: settings of each one.

    Raises:
        OutOfMemoryError: the run does not fit. The message lists the needed memory and the settings to change.
    """
    parts, shared = list[Part](), set[tuple[str, bool, str | None]]()
    for settings in policies:
        own = needed_memory(settings)
        key = settings.model, settings.bf16, settings.four_bit
        if settings.lora is not None and key in shared:  # adapters on one model: see `load_policies` in `policies.py`
            own = [part for part in own if not part.what.startswith("weights,")]
        shared.add(key)
        parts += own
    device, total = policies[0].device, sum(part.bytes for part in parts)
    free = free_memory(device)
    if total <= free:
        return
    parts.sort(key=lambda part: -part.bytes)
    levers = dict.fromkeys(part.lever for part in parts if part.lever and part.bytes > total / 20)
    needed, available = f"{total / GIB:.2f} GiB", f"{free / GIB:.2f} GiB"
    lines = [f"The run needs at least {needed} of memory, but only {available} are available on {device}:"]
    lines += [f"  {part.bytes / GIB:8.2f} GiB  {part.what}" for part in parts]
    lines.append(f"To reduce it, most effective first: {'; '.join(levers)}")
    raise OutOfMemoryError("\n".join(lines))


def needed_memory(settings: TrainingSettings) -> list[Part]:
    """Return the parts of a run's memory at its peak that are not 0.

    Engine and update take turns: only the larger of their temporary memory is counted. The engine's keys and values
    stay allocated during an update.
    """
    model, adapted = _without_numbers(settings)
    config = model.config.get_text_config()
    named = {name: weight for name, weight in (adapted or model).named_parameters() if weight.requires_grad}
    learned = list(named.values())
    own = [weight for weight in model.parameters() if adapted is None or not weight.requires_grad]
    weights = sum(weight.numel() * weight.element_size() for weight in own)
    if settings.load_in_4bit:
        weights -= _saved_by_four_bits(model)
    count = sum(weight.numel() for weight in learned)
    masters = sum(4 * weight.numel() for weight in learned if weight.dtype != torch.float32)
    of_optimizer = state_bytes(settings, adapted or model, {name: each.numel() for name, each in named.items()})
    kind = str(model.dtype).removeprefix("torch.")
    row = min(config.max_position_embeddings, settings.max_model_length or 2 * settings.max_completion_length)
    tokens = max(settings.max_tokens_per_forward, row)
    trained = -(-tokens * min(row, settings.max_completion_length) // row)
    calls = min(settings.engine_batch, settings.batch_size * settings.num_generations)  # one of each rollout of a step
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_call = 2 * config.num_hidden_layers * heads * width * (torch.finfo(model.dtype).bits // 8)
    adapters, batch = "lora={'r': 16}", "a smaller engine_batch"
    shorter = "a smaller max_model_length or max_completion_length"
    fewer = "a smaller max_tokens_per_forward" if tokens > row else shorter
    logits = _LOGIT_COPIES * 4 * trained * config.vocab_size
    activations = _activation_bytes(
        adapted or model,
        tokens,
        checkpointing=settings.gradient_checkpointing,
        offloading=settings.activation_offloading,
        logits=logits,
    )
    # four numbers a weight, and the hidden states of a forward in float32
    of_head = 0 if settings.critic is None else 4 * (4 * (config.hidden_size + 1) + tokens * config.hidden_size)
    reference = weights if settings.loss_settings.needs_reference and adapted is None else 0
    if settings.loss_settings.sync_ref_model:
        reference += 4 * count if adapted is not None or settings.bf16 else 0
    checkpointing = "" if settings.gradient_checkpointing else "gradient_checkpointing=True, or "
    if settings.device != "cpu" and not settings.activation_offloading:
        checkpointing += "activation_offloading=True, or "
    lasting = [
        Part(f"weights, {kind}", weights, "" if settings.bf16 else "bf16=True, load_in_4bit=True, or a smaller model"),
        Part("float32 copies of the trained weights", masters, adapters),
        Part("adapters", 0 if adapted is None else sum(4 * weight.numel() for weight in learned), "a smaller r"),
        Part(f"state of the optimizer, {settings.optim}", of_optimizer, f"{adapters}, or optim='adamw_8bit'"),
        Part("reference, a copy of the trained weights", reference, adapters),
        Part("value head: weights, gradient, state of the optimizer, hidden states", of_head, fewer),
        Part(f"keys and values of {calls} calls of {row:,} tokens", calls * row * of_call, f"{batch}, or {shorter}"),
    ]
    update = [
        Part("gradients", 4 * count, adapters),
        Part(f"activations of {tokens:,} tokens in one forward", activations, checkpointing + fewer),
        Part(f"logits of {trained:,} trained tokens", logits, fewer),
    ]
    engine = [Part(f"logits of {calls} calls", _ENGINE_COPIES * 4 * calls * config.vocab_size, batch)]
    turn = max(update, engine, key=lambda parts: sum(part.bytes for part in parts))
    return [part for part in (*lasting, *turn) if part.bytes]


def free_memory(device: str) -> int:
    """Return the available bytes of a GPU, or of the machine within this process's limits and control group."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.mem_get_info(kind)[0]
    memory = psutil.virtual_memory()
    free = min(memory.available, memory_capacity_bytes() - _used_by_group())
    process = psutil.Process()
    if hasattr(process, "rlimit") and (bound := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:
        free = min(free, bound - process.memory_info().vms)
    return max(0, free)


def _used_by_group() -> int:
    """Return the bytes in use by the control group, without cached files that can be dropped; 0 without a group."""
    try:
        with open("/sys/fs/cgroup/memory.current") as current, open("/sys/fs/cgroup/memory.stat") as stat:
            fields = dict(line.split() for line in stat)
            return int(current.read()) - int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _without_numbers(settings: TrainingSettings) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Return the model on torch's `meta` device, and the model with its adapters."""
    config = AutoConfig.from_pretrained(settings.model, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False, attn_implementation="sdpa"
        ).eval()
        return model, None if settings.lora is None else with_lora(model, settings.lora, 0)


def _saved_by_four_bits(model: PreTrainedModel) -> int:
    """Return the bytes that linear layers need less: half a byte a weight, and a float32 number per block of 64."""
    bitsandbytes_for("load_in_4bit=True")
    last = model.get_output_embeddings()
    linear = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not last]
    frozen = [weight for weight in linear if not weight.requires_grad]  # not those of the adapters
    return sum(weight.nbytes - weight.numel() // 2 - 4 * -(-weight.numel() // 64) for weight in frozen)


class _Attended(torch.autograd.Function):
    """Keeps for the backward pass the tensors of an attention kernel that does not store its scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output


def _counting_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    return _Attended.apply(query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_COUNTING, _counting_attention)


def _activation_bytes(
    model: PreTrainedModel, tokens: int, *, checkpointing: bool, offloading: bool, logits: int
) -> int:
    """Return the bytes that a forward pass of `tokens` tokens keeps on the device for its backward pass, without its
    logits: with checkpointing or offloading these are free when the first layer is recomputed or copied back."""
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}
    saved_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved_bytes[storage._cdata] = storage.nbytes()
        return tensor

    adapted: Any = model
    inner: Any = adapted.get_base_model() if hasattr(model, "get_base_model") else model
    inner.set_attn_implementation(_COUNTING)
    inputs = torch.zeros((1, _MEASURED_TOKENS), dtype=torch.int64, device="meta")
    first = torch.zeros((1, _MEASURED_TOKENS), dtype=torch.bool)
    first[0, 0] = True
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), head_sees_only(model, first):
        output = inner(input_ids=inputs, use_cache=False)
    whole = sum(saved_bytes.values()) * tokens // _MEASURED_TOKENS
    del output
    config = model.config.get_text_config()
    if offloading:
        return max(0, whole // config.num_hidden_layers - logits)
    if not checkpointing:
        return whole
    inputs_of_layers = config.num_hidden_layers * tokens * config.hidden_size * (torch.finfo(model.dtype).bits // 8)
    return inputs_of_layers + max(0, whole // config.num_hidden_layers - logits)
