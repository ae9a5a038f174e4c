"""The learned weights in float32, whatever the model computes in.

A model in bfloat16 has 8 bits of mantissa: a step of 1e-5 on a weight of 1 would be lost. So each learned weight
that is not float32 has a float32 master copy, which the optimizer steps; the gradient, too, is summed in float32, over
all forwards of a step (mixed-precision training, arXiv:1710.03740, section 3.1). Adapters of peft are float32 anyway.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentlightning.errors import BadRequestError


class LearnedWeights:
    """The weights that learn, by name, in float32: those of the model itself, or master copies of them."""

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


def _add_gradient(master: torch.Tensor, live: torch.Tensor) -> None:
    gradient = live.grad
    live.grad = None
    if gradient is not None:
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)


class Checkpointing:
    """Lets the layers keep their inputs alone for the backward pass and compute the rest anew (arXiv:1604.06174)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare the model.

        Raises:
            BadRequestError: it has no layers that can do it.
        """
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        if not model.supports_gradient_checkpointing or not self._layers:
            raise BadRequestError(
                f"gradient_checkpointing=True: {model.config.model_type} has no layers that can do it"
            )
        for layer in self._layers:
            layer.gradient_checkpointing = True  # what transformers' own method of this purpose sets; its name changed
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            for name in ("dropout", "hidden_dropout", "activation_dropout"):  # probabilities that a layer uses itself
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Switch it on. transformers looks at the layers' training mode for it, in which they cannot generate; what
        they hold, dropout included, stays in evaluation mode."""
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False
