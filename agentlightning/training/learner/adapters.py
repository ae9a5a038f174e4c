"""Adapters of peft on a model: small matrices that learn in the place of its weights (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """Return the model with adapters, which alone learn. `settings` are arguments of `peft.LoraConfig`."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        return adapted
