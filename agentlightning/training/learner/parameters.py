"""The trained weights of a model: adapters, float32 copies, checkpointing, offloading, the reference, the value head.

A model in bfloat16 has 8 bits of mantissa, so a step of 1e-5 on a weight of 1 would be lost. Each trained weight that
is not float32 therefore has a float32 master copy, which the optimizer updates; the gradient is also summed in float32,
over all forward passes of a step (mixed-precision training, arXiv:1710.03740, section 3.1). Adapters are always
float32.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentlightning.errors import BadRequestError


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Return the model with adapters (LoRA, arXiv:2106.09685); only the adapters are trained. `settings` are arguments
    of `peft.LoraConfig`."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        return adapted


class MasterWeights:
    """The trained weights by name, in float32: those of the model itself, or their master copies."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._live = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        for name, live in self._live.items():
            if live.dtype == torch.float32:
                self.masters[name] = live
                continue
            master = nn.Parameter(live.detach().float())
            self.masters[name] = master
            live.register_post_accumulate_grad_hook(partial(_add_gradient, master))

    def publish(self) -> None:
        """Round the master copies into the model."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if self._live[name] is not master:
                    self._live[name].copy_(master)


def _add_gradient(master: Tensor, live: Tensor) -> None:
    gradient = live.grad
    live.grad = None
    if gradient is not None:
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)


class Checkpointing:
    """Makes the layers keep only their inputs for the backward pass and recompute the rest (arXiv:1604.06174)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare the model.

        Raises:
            BadRequestError: it has no layers that support it.
        """
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        if not model.supports_gradient_checkpointing or not self._layers:
            raise BadRequestError(
                f"gradient_checkpointing=True: {model.config.model_type} has no layers that support it"
            )
        for layer in self._layers:
            layer.gradient_checkpointing = True  # what transformers' own method of this purpose sets; its name changed
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            for name in ("dropout", "hidden_dropout", "activation_dropout"):  # probabilities that a layer uses itself
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Enable checkpointing in the block. transformers requires the layers' training mode, in which they cannot
        generate; the modules inside, including dropout, stay in evaluation mode."""
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


class Offloading(torch.autograd.graph.save_on_cpu):
    """Keeps in the machine's memory what the backward pass needs, except the weights, until it needs it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(pin_memory=model.device.type == "cuda")
        pack, unpack = self.pack_hook, self.unpack_hook
        lasting = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

        def keep(tensor: Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in lasting else pack(tensor)

        def restored(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else unpack(kept)

        self.pack_hook, self.unpack_hook = keep, restored


class Reference:
    """The reference of the KL penalty: the model as loaded, or a mean that follows the policy. Make it before the first
    update.

    If all weights are trained, it is a frozen copy, which doubles the memory of the weights. With adapters it is the
    live model with its adapters disabled; one that moves has a copy of the adapters, which takes their place.
    """

    def __init__(self, model: Any, *, moves: bool = False) -> None:
        """Take the model as it is. `moves`: `mix` will be called."""
        self._model = model
        has_adapters = hasattr(model, "disable_adapter")
        self._copy = None if has_adapters else copy.deepcopy(model).requires_grad_(False).eval()
        self._live: dict[str, nn.Parameter] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._frozen = self._live if self._copy is None else dict(self._copy.named_parameters())
        own = {name: self._frozen[name].detach() for name in self._live} if moves else {}
        self.weights: dict[str, Tensor] = {
            name: each.float().clone() if has_adapters else each.float() for name, each in own.items()
        }
        """The weights that move, by name, in float32; empty without `moves`."""

    @contextmanager
    def __call__(self) -> Generator[PreTrainedModel]:
        """Open the reference. With adapters, the model must not be used for anything else meanwhile."""
        if self._copy is not None:
            yield self._copy
            return
        if not self.weights:
            with self._model.disable_adapter():
                yield self._model
            return
        own = {name: weight.data for name, weight in self._live.items()}
        try:
            for name, weight in self._live.items():
                weight.data = self.weights[name]
            yield self._model
        finally:
            for name, weight in self._live.items():
                weight.data = own[name]

    def mix(self, alpha: float, policy: Mapping[str, Tensor]) -> None:
        """Add `alpha` times the policy's weights to 1 - `alpha` times those of the reference (TR-DPO, arXiv:2404.09656,
        equation 5). `policy`: the master copies of the weights by name."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.mul_(1 - alpha).add_(policy[name], alpha=alpha)
        self.publish()

    def publish(self) -> None:
        """Round the weights that move into the copy of the model."""
        with torch.no_grad():
            for name, weight in self.weights.items() if self._copy is not None else ():
                if self._frozen[name].dtype != torch.float32:
                    self._frozen[name].copy_(weight)


PREFIX: Final = "value_head."
"""Prefix of the names of the value head's weights in a state; no weight of the model has this prefix."""


class ValueHead(nn.Module):
    """The value of the state before a token: one float32 linear layer on the hidden states from which the policy
    predicts its next token. All values are 0 at the start.

    It is not part of the model: only the policy is exported and served.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        output = cast("nn.Module | None", model.get_output_embeddings())
        weight = getattr(output, "weight", None)
        if not isinstance(weight, Tensor):
            raise ValueError(f"A value head requires a model with an output layer; {model.config.model_type} has none")
        self.linear = nn.Linear(weight.shape[-1], 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values. Shapes: hidden: (N, H) of any float type; result: (N,) float32."""
        return self.linear(hidden.float())[..., 0]

    def learned(self) -> dict[str, nn.Parameter]:
        """Return its weights by their names in a state."""
        return {f"{PREFIX}{name}": weight for name, weight in self.linear.named_parameters()}
