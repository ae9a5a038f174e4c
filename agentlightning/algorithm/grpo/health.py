"""Whether a policy still works: weights that broke give no probabilities, so nothing can be sampled or learned."""

from __future__ import annotations

import torch

from agentlightning.algorithm.grpo.policy import Policy


def gives_probabilities(policy: Policy) -> bool:
    """Return whether all weights are finite and the model gives finite logits for the shortest prompt."""
    with policy.lock, torch.inference_mode():
        if not all(bool(parameter.isfinite().all()) for parameter in policy.model.parameters()):
            return False
        shortest = torch.tensor([[policy.tokenizer.eos_token_id]], device=policy.model.device)  # (1, 1)
        return bool(policy.model(input_ids=shortest).logits.isfinite().all())
