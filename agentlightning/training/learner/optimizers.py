"""Makes the optimizer of `OptimizerSettings`, and reads and restores its state by the names of the weights.

A policy may have several of torch's optimizers, each for its own weights: `muon` has AdamW beside it, and an 8-bit
optimizer keeps the state of embeddings in 32 bits, as transformers' `Trainer` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Adafactor, PreTrainedModel

from agentlightning.engine.served import bitsandbytes_for
from agentlightning.errors import BadRequestError
from agentlightning.training.learner.parameters import PREFIX
from agentlightning.training.optimizer_settings import DEFAULT_OPTIM, OptimizerSettings

_NOT_DECAYED: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_PROBED: Final = 128


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that one of torch's optimizers steps."""

    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    names: list[str]


def parts_of(settings: OptimizerSettings, model: PreTrainedModel, names: Iterable[str]) -> list[Part]:
    """Return the optimizers and the names of their weights. `names`: of all weights that are trained.

    `muon` (Jordan et al., https://kellerjordan.github.io/posts/muon/) is for the matrices of hidden layers; embeddings,
    the output layer and all other weights use AdamW, as its author prescribes. Its steps are scaled to the size of
    AdamW's (arXiv:2502.16982, section 2.2), so that one learning rate and one weight decay serve both.

    Raises:
        BadRequestError: a package is missing.
    """
    names = list(names)
    if settings.optim == "muon":
        outside = _below(model, names, [*_embeddings(model), model.get_output_embeddings()])
        hidden = {name for name, weight in model.named_parameters() if weight.ndim == 2} - outside
        muon = _maker(torch.optim.Muon, settings, adjust_lr_fn="match_rms_adamw")
        adamw = partial(torch.optim.AdamW, **_adam(settings), fused=_has_fused(model))
        parts = [Part(muon, [name for name in names if name in hidden])]
        parts.append(Part(adamw, [name for name in names if name not in hidden]))
    elif settings.optim.endswith("8bit"):
        wide = _below(model, names, _embeddings(model))
        parts = [Part(_bitsandbytes(settings, 8), [name for name in names if name not in wide])]
        parts.append(Part(_bitsandbytes(settings, 32), [name for name in names if name in wide]))
    else:
        parts = [Part(_one(settings, model), names)]
    return [part for part in parts if part.names]


def make_optimizers(
    settings: OptimizerSettings,
    model: PreTrainedModel,
    weights: Mapping[str, nn.Parameter],
    learning_rate: float,
    value_learning_rate: float | None,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the weights. Each group has its first learning rate as `initial`; that of a value head
    is `value_learning_rate`."""
    decayed = set[str]()
    if settings.weight_decay:
        norms = _below(model, weights, [each for each in model.modules() if isinstance(each, nn.LayerNorm)])
        decayed = {name for name in weights if name not in norms and not _NOT_DECAYED.search(name.lower())}
    optimizers = list[torch.optim.Optimizer]()
    for part in parts_of(settings, model, weights):
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name in part.names:
            groups.setdefault((name.startswith(PREFIX), name in decayed), []).append(weights[name])
        as_groups = [
            {
                "params": members,
                "lr": learning_rate,
                "initial": value_learning_rate if of_head else learning_rate,
                "weight_decay": settings.weight_decay if decays else 0.0,
            }
            for (of_head, decays), members in groups.items()
        ]
        with _accepted(settings):
            optimizers.append(part.make(as_groups))
    return optimizers


@contextmanager
def _accepted(settings: OptimizerSettings) -> Generator[None]:
    """Name the setting if an optimizer refuses its arguments."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadRequestError(
            f"optim={settings.optim!r} does not accept optim_args={settings.optim_args!r}: {error}"
        ) from None


def state_of(optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return what the optimizers keep per weight, as `KIND/NAME`. Its tensors are live."""
    return {
        f"{kind}/{name}": value
        for name, weight in weights.items()
        for optimizer in optimizers
        if weight in optimizer.state
        for kind, value in optimizer.state[weight].items()
    }


def restore_state(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    """Replace the state of the optimizers by that of `state_of`."""
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        kind, _, name = key.partition("/")
        by_name.setdefault(name, {})[kind] = value.clone() if isinstance(value, Tensor) else value
    names = {weight: name for name, weight in weights.items()}
    for optimizer in optimizers:
        groups = optimizer.state_dict()["param_groups"]
        numbers = chain.from_iterable(group["params"] for group in groups)
        own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        states = {number: by_name.get(names[weight]) for number, weight in zip(numbers, own, strict=True)}
        states = {number: state for number, state in states.items() if state is not None}
        optimizer.load_state_dict({"state": states, "param_groups": groups})


def rehearse(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take a step of learning rate 0 on gradients of 0 and forget its state: it runs out of memory where the first
    step would, before a weight changes."""
    rates = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    try:
        for group, _ in rates:
            group["lr"] = 0.0
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        for optimizer in optimizers:
            optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for optimizer in optimizers:
            optimizer.state.clear()
            optimizer.zero_grad(set_to_none=True)


def state_bytes(settings: OptimizerSettings, model: PreTrainedModel, counts: Mapping[str, int]) -> int:
    """Return the bytes of the numbers that the optimizer keeps per weight, measured with a step on one small matrix.
    `counts`: number of weights by name."""
    total = 0
    for part in parts_of(settings, model, counts):
        probe = nn.Parameter(torch.zeros(_PROBED, _PROBED))
        probe.grad = torch.zeros_like(probe)
        with _accepted(settings):
            optimizer = part.make([{"params": [probe], "lr": 0.0}])
            optimizer.step()
        tensors = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
        size = sum(tensor.nbytes for tensor in tensors if tensor.numel() >= probe.numel())
        total += size * sum(counts[name] for name in part.names) // probe.numel()
    return total


def _one(settings: OptimizerSettings, model: PreTrainedModel) -> Callable[..., torch.optim.Optimizer]:
    name = settings.optim
    if name == DEFAULT_OPTIM:
        return _maker(torch.optim.AdamW, settings, **_adam(settings), fused=_has_fused(model))
    if name == "adamw_torch":
        return _maker(torch.optim.AdamW, settings, **_adam(settings))
    if name == "adafactor":
        return _maker(Adafactor, settings, scale_parameter=False, relative_step=False)
    of_torch = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return _maker(of_torch[name], settings) if name in of_torch else _bitsandbytes(settings, 32)


def _bitsandbytes(settings: OptimizerSettings, bits: int) -> Callable[..., torch.optim.Optimizer]:
    name = settings.optim
    their = bitsandbytes_for(f"optim={name!r}").optim
    if "rmsprop" in name:
        return _maker(their.RMSprop, settings, optim_bits=bits)
    options: dict[str, Any] = {"optim_bits": bits}
    if "lion" in name:
        return _maker(their.Lion, settings, betas=_adam(settings)["betas"], **options)
    if "ademamix" in name:
        betas = (settings.adam_beta1, settings.adam_beta2, 0.9999)
        return _maker(their.AdEMAMix, settings, **{**_adam(settings), "betas": betas}, alpha=5.0, **options)
    return _maker(their.AdamW, settings, **_adam(settings), **options)


def _maker(cls: Any, settings: OptimizerSettings, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return partial(cls, **{**options, **(settings.optim_args or {})})


def _adam(settings: OptimizerSettings) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}


def _has_fused(model: PreTrainedModel) -> bool:
    return model.device.type in ("cpu", "cuda", "meta")


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, nn.Embedding)] + [model.get_input_embeddings()]


def _below(model: PreTrainedModel, names: Iterable[str], modules: Iterable[object]) -> set[str]:
    """Return the names of the weights in these modules, with those of their adapters."""
    identities = set(map(id, modules))
    places = tuple(f"{name}." for name, module in model.named_modules() if id(module) in identities)
    return {name for name in names if name.startswith(places)}
