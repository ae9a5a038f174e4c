"""Weights, optimizer and random states of a policy as files, and the digest that identifies a state of weights.

Tensors are in safetensors files, the rest is JSON: reading a checkpoint runs no code from it. The model has the format
of transformers and peft, so `from_pretrained` can load the folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentlightning.engine.served import ServedModel
from agentlightning.engine.torch_setup import no_progress_bar
from agentlightning.training.checkpoint import BrokenCheckpointError, sha256_of
from agentlightning.training.learner.parameters import PREFIX
from agentlightning.training.learner.policy import Policy, PolicyState
from agentlightning.training.optimizer_settings import DEFAULT_OPTIM
from agentlightning.training.settings import TrainingSettings

OPTIMIZER: Final = "optimizer.safetensors"
REFERENCE: Final = "reference.safetensors"
ADAPTER: Final = "adapter_model.safetensors"
_SCALARS: Final = "optimizer.json"


def digest_of(policy: ServedModel) -> str:
    """Return the SHA-256 over name, type, shape and bytes of every trained parameter, in the order of their names.

    Equal digests mean equal weights, bit for bit. The frozen base model of an adapter is not in the digest.
    """
    digest = hashlib.sha256()
    with policy.lock:
        for name, tensor in sorted(policy.model.named_parameters(), key=itemgetter(0)):
            if tensor.requires_grad:
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights (only those of an adapter, if there is one), tokenizer, optimizer and random states into a folder.

    Raises:
        OSError: a file cannot be written, such as on a full disk.
    """
    try:
        with policy.lock, no_progress_bar():
            policy.model.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            state = policy.state()
            rounded = policy.model.dtype != torch.float32
            weights = {name: weight for name, weight in state.weights.items() if rounded or name.startswith(PREFIX)}
            kept = {name: each for name, each in state.optimizer.items() if isinstance(each, Tensor)}
            tensors, places = dict[str, Tensor](), set[int]()
            for name, each in (kept | weights).items():
                tensor = each.detach().cpu().contiguous()  # bitsandbytes shares some among weights
                tensors[name] = tensor.clone() if tensor.data_ptr() in places else tensor
                places.add(tensor.data_ptr())
            save_file(tensors, folder / OPTIMIZER)
            if state.reference:
                own = {name: each.detach().cpu().contiguous() for name, each in state.reference.items()}
                save_file(own, folder / REFERENCE)
            states = {
                "optim": state.optim,
                "optimizer": {name: each for name, each in state.optimizer.items() if name not in kept},
                "max_tokens": state.max_tokens_per_forward,
                "steps": state.steps_taken,
                "policy": state.random,
                "torch": _torch_state(),
            }
    except SafetensorError as error:  # safetensors reports errors of the file system like this
        raise OSError(str(error)) from error
    (folder / _SCALARS).write_text(json.dumps(states))


def restore_policy(
    policy: Policy, folder: Path, *, weight_version: int, digest: str, serves_only: bool = False
) -> None:
    """Restore the state that `save_policy` wrote. The policy must have been loaded from the initial model of the
    training or, without an adapter, from `folder` itself. With `serves_only`, the weights of its model are enough:
    those of a critic or a reference, and the state of the optimizer, are ignored.

    Raises:
        BrokenCheckpointError: the files differ from what was written.
        ValueError: they are of another optimizer, another model or other adapters.
    """
    with policy.lock:
        if (folder / ADAPTER).is_file():
            from peft import set_peft_model_state_dict

            adapted: Any = policy.model
            set_peft_model_state_dict(adapted, load_file(folder / ADAPTER))
        elif digest_of(policy) != digest:
            with no_progress_bar(), torch.no_grad():
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=policy.model.dtype, local_files_only=True, trust_remote_code=False
                )
                for name, weight in model.named_parameters():
                    policy.model.get_parameter(name).copy_(weight)
        if (present := digest_of(policy)) != digest:
            raise BrokenCheckpointError(
                f"The weights read from {str(folder)!r} have the digest {present}, not {digest}"
            )
        states = json.loads((folder / _SCALARS).read_bytes())
        tensors = load_file(folder / OPTIMIZER)
        own = policy.state()
        optim = states.get("optim", DEFAULT_OPTIM)  # before there were others
        optimizer = {name: each for name, each in tensors.items() if "/" in name} | states.get("optimizer", {})
        weights = own.weights | {name: each for name, each in tensors.items() if "/" not in name}
        reference = load_file(folder / REFERENCE) if (folder / REFERENCE).is_file() else {}
        if serves_only:
            weights = {name: weights[name] for name in own.weights}
            optim, optimizer, reference = own.optim, own.optimizer, own.reference
        numbers = weight_version, states["max_tokens"], states.get("steps", 0)
        policy.restore(PolicyState(weights, optim, optimizer, states["policy"], *numbers, reference))
        _restore_torch(states["torch"])


def model_in(folder: Path, base: str) -> str:
    """Return the folder to load the model of a checkpoint from: its own folder, or that of its adapter's base model."""
    return base if (folder / ADAPTER).is_file() else str(folder)


def load_policy(
    settings: TrainingSettings,
    folder: Path | None,
    *,
    weight_version: int = 0,
    digest: str = "",
    base: PreTrainedModel | None = None,
) -> Policy:
    """Return the policy that `save_policy` wrote into a folder; without a folder, the initial policy of a run.

    `base` is the model of the settings, if it is already loaded.
    """
    source = settings.model
    if (
        folder is not None and not settings.loss_settings.needs_reference
    ):  # the reference of that loss is the initial model
        source = model_in(folder, source)
    policy = Policy.load(
        source,
        model=base,
        learning_rate=settings.learning_rate,
        optimizer=settings,
        lora=settings.lora,
        bf16=settings.bf16,
        four_bit=settings.four_bit,
        device=settings.device,
        seed=settings.seed,
        keeps_reference=settings.loss_settings.needs_reference,
        moves_reference=settings.loss_settings.sync_ref_model,
        max_model_length=settings.max_model_length,
        max_tokens_per_forward=settings.max_tokens_per_forward,
        padding_free=settings.padding_free,
        gradient_checkpointing=settings.gradient_checkpointing,
        activation_offloading=settings.activation_offloading,
        value_learning_rate=None if settings.critic is None else settings.critic.value_learning_rate,
    )
    if folder is not None:
        restore_policy(policy, folder, weight_version=weight_version, digest=digest)
    return policy


def fingerprint_of(model: str | Path) -> str:
    """Return the SHA-256 over the names and contents of a model's files: weights, settings, tokenizer, template."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(model), "config.json")
        if not isinstance(config, str):
            return "unknown"
        folder = Path(config).parent
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        digest.update(f"{file.relative_to(folder).as_posix()} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def _torch_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a query to a GPU that the run does not use would take memory on it
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _restore_torch(states: Mapping[str, str]) -> None:
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif int(name.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, cast("Any", name))
