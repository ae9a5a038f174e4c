"""The value head: one linear layer on the hidden states from which the policy predicts its next token."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PREFIX: Final = "value_head."
"""Of the names of its weights in a state: the model has none of them."""


class ValueHead(nn.Module):
    """Gives the value of the state before a token. It begins with the value 0 everywhere, and is kept in float32.

    It is no part of the model: what is exported or served is the policy alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        output = cast("nn.Module | None", model.get_output_embeddings())
        weight = getattr(output, "weight", None)
        if not isinstance(weight, Tensor):
            raise ValueError(f"a value head needs a model with an output layer; {model.config.model_type} has none")
        self.linear = nn.Linear(weight.shape[-1], 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden: (N, H) of any float type; result: (N,) float32."""
        return self.linear(hidden.float())[..., 0]

    def learned(self) -> dict[str, nn.Parameter]:
        """Return its weights by the names that they have in a state."""
        return {f"{PREFIX}{name}": weight for name, weight in self.linear.named_parameters()}
