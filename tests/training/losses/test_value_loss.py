"""The loss of values, its gradient and the share of bounded ones are those of VERL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentlightning.training.losses.critic import value_loss
from agentlightning.training.losses.weights import token_weights
from tests.training.losses.test_gae import GOLDEN


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("batch", GOLDEN, ids=["batch 0", "batch 1"])
def test_the_value_loss_and_its_gradient_are_those_of_verl(batch: dict[str, Any], case: int) -> None:
    cliprange, new, returns, loss, share, gradient = batch["losses"][case]
    mask, values = torch.tensor(batch["mask"]) > 0, torch.tensor(new).requires_grad_()
    weights, tokens = token_weights(mask, torch.arange(4)), int(mask.sum())
    old, wanted = torch.tensor(batch["values"]), torch.tensor(returns)
    found = value_loss(values, old, wanted, weights, cliprange=cliprange, tokens=tokens)
    found.loss.backward()
    assert values.grad is not None
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert found.clip_fraction.item() == pytest.approx(share, abs=1e-6)
    assert (share > 0) == (case == 0)
    assert torch.allclose(values.grad, torch.tensor(gradient), rtol=0, atol=1e-6)
    assert values.grad.abs().max() > 1e-3
