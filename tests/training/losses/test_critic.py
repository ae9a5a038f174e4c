"""Advantages of tokens and the loss of values: VERL's on random batches, and by hand for a rollout of several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.batch import make_batch
from agentlightning.training.loss_settings import CriticSettings
from agentlightning.training.losses.critic import gae, value_loss, whitened, with_credit
from agentlightning.training.losses.weights import token_weights

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())["critic"]


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("batch", GOLDEN, ids=["batch 0", "batch 1"])
def test_advantages_and_returns_are_those_of_verl(batch: dict[str, Any], case: int) -> None:
    gamma, lam, advantages, returns = batch["estimates"][case]
    mask = torch.tensor(batch["mask"]) > 0
    assert not mask.all()
    estimate, of = gae(torch.tensor(batch["rewards"]), torch.tensor(batch["values"]), mask, gamma=gamma, lam=lam)
    assert torch.allclose(whitened(estimate, mask)[mask], torch.tensor(advantages)[mask], rtol=0, atol=1e-6)
    assert torch.allclose(of[mask], torch.tensor(returns)[mask], rtol=0, atol=1e-6)


def test_credit_passes_over_tool_tokens_and_rows_in_the_order_of_the_calls() -> None:
    """Calls 0 and 2 are in one row with a tool's tokens between them, call 1 is in a row of its own."""
    first = Sample("r", "a", [1, 5, 6, 9, 9, 7], [0, 1, 1, 0, 0, 1], [0, -1, -1, 0, 0, -1], [], [])
    second = Sample("r", "a", [1, 8], [0, 1], [0, -1], [], [])
    first.turns.extend([(0, 2), (2, 1)])
    second.turns.append((1, 1))
    batch = make_batch([second, first], [1.0, 1.0])
    values = torch.tensor([[0.0, 0.3, 0, 0, 0, 0], [0.0, 0.1, 0.2, 0.7, 0.7, 0.5]])
    penalty = torch.zeros_like(values)
    penalty[1, 1] = 0.05  # only the first token has gone from the reference
    credit = with_credit(batch, values, penalty, CriticSettings(gamma=0.9, lam=0.5, whiten_advantages=False))
    # tokens in order: 5 (0.1), 6 (0.2), 8 (0.3), 7 (0.5, and the reward of 1)
    of_7 = 1 - 0.5
    of_8 = 0.9 * 0.5 - 0.3 + 0.45 * of_7
    of_6 = 0.9 * 0.3 - 0.2 + 0.45 * of_8
    of_5 = -0.05 + 0.9 * 0.2 - 0.1 + 0.45 * of_6
    assert credit.advantages.tolist()[0] == pytest.approx([0, of_8, 0, 0, 0, 0], abs=1e-6)
    assert credit.advantages.tolist()[1] == pytest.approx([0, of_5, of_6, 0, 0, of_7], abs=1e-6)
    assert credit.returns is not None
    assert credit.returns.tolist()[1] == pytest.approx([0, of_5 + 0.1, of_6 + 0.2, 0, 0, 1.0], abs=1e-6)


def test_rollouts_do_not_see_each_other_and_the_order_of_rows_changes_nothing() -> None:
    rows = [Sample(name, "a", [1, 2, 3], [0, 1, 1], [0, -1, -1], [], [], None, [(0, 2)]) for name in "xyz"]
    values = torch.tensor([[0.0, 0.1, 0.2], [0.0, 0.3, 0.4], [0.0, 0.5, 0.6]])
    critic = CriticSettings(whiten_advantages=False)
    whole = with_credit(make_batch(rows, [1.0, 0.0, 2.0]), values, torch.zeros(3, 3), critic)
    turned = with_credit(make_batch(rows[::-1], [2.0, 0.0, 1.0]), values.flip(0), torch.zeros(3, 3), critic)
    assert torch.equal(whole.advantages, turned.advantages.flip(0))
    alone = with_credit(make_batch(rows[1:2], [0.0]), values[1:2], torch.zeros(1, 3), critic)
    assert torch.equal(whole.advantages[1:2], alone.advantages)


def test_one_token_alone_is_whitened_to_nothing() -> None:
    assert whitened(torch.tensor([3.0, 9.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", [0, 1])
@pytest.mark.parametrize("batch", GOLDEN, ids=["batch 0", "batch 1"])
def test_the_value_loss_and_its_gradient_are_those_of_verl(batch: dict[str, Any], case: int) -> None:
    cliprange, new, returns, loss, share, gradient = batch["losses"][case]
    mask, values = torch.tensor(batch["mask"]) > 0, torch.tensor(new).requires_grad_()
    weights, tokens = token_weights(mask, torch.arange(4)), int(mask.sum())
    old, targets = torch.tensor(batch["values"]), torch.tensor(returns)
    result = value_loss(values, old, targets, weights, cliprange=cliprange, tokens=tokens)
    result.loss.backward()
    assert values.grad is not None
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clip_fraction.item() == pytest.approx(share, abs=1e-6)
    assert (share > 0) == (case == 0)
    assert torch.allclose(values.grad, torch.tensor(gradient), rtol=0, atol=1e-6)
    assert values.grad.abs().max() > 1e-3
