"""The decoupled objective: a stale token is compared with the learner, and its weight is the ratio to older weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.losses.importance import stale_figures, staleness_weights
from agentlightning.training.losses.objective import BatchInputs, policy_loss
from tests.training.losses.batches import random_rows, weights_of, whole_loss

LOSSES: tuple[dict[str, Any], ...] = (
    {"loss_type": "dapo"},
    {"loss_type": "gspo"},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"importance_sampling_correction": True, "importance_sampling_mode": "token_mask"},
)


@pytest.mark.parametrize("settings", LOSSES)
def test_without_a_stale_token_the_loss_is_the_synchronous_one_bit_for_bit(settings: dict[str, Any]) -> None:
    rows = random_rows()
    whole, gradient, _ = whole_loss(LossSettings(**settings), rows)
    other, same, _ = whole_loss(LossSettings(**settings), {**rows, "stale": torch.zeros_like(rows["mask"])})
    assert torch.equal(whole.loss, other.loss)
    assert torch.equal(gradient, same)


def test_the_loss_of_stale_tokens_is_that_of_the_paper() -> None:
    settings, rows = LossSettings(aggregation="token", staleness_clip_max=None), random_rows(seed=3)
    result, _, _ = whole_loss(settings, {**rows, "stale": rows["mask"]})
    total = 0.0
    for row, column in rows["mask"].nonzero().tolist():
        new, proximal, behaviour = (
            float(rows[name][row, column]) for name in ("logprobs", "old_logprobs", "sampler_logprobs")
        )
        ratio, advantage = math.exp(new - proximal), float(rows["advantages"][row])
        clipped = min(max(ratio, 0.8), 1.28)
        total -= math.exp(proximal - behaviour) * min(ratio * advantage, clipped * advantage)
    assert float(result.loss.detach()) == pytest.approx(total / int(rows["mask"].sum()), rel=1e-5)


def test_in_the_first_optimizer_step_the_ratio_of_a_stale_token_is_one_and_its_weight_is_the_importance_ratio() -> None:
    settings, rows = LossSettings(), random_rows()
    mask = rows["stale"] = rows["mask"]
    del rows["old_logprobs"]
    result, gradient, _ = whole_loss(settings, rows)
    weights = (rows["logprobs"] - rows["sampler_logprobs"]).exp().clamp(max=5.0)
    assert torch.equal(result.tokens.ratio[mask], torch.ones(int(mask.sum())))
    torch.testing.assert_close(result.tokens.correction[mask], weights[mask])
    expected = -weights_of(settings, rows) * weights * rows["advantages"][:, None]
    torch.testing.assert_close(gradient[mask], expected[mask])


def test_fresh_tokens_beside_stale_ones_are_treated_as_ever() -> None:
    settings = LossSettings(importance_sampling_correction=True, importance_sampling_mode="token_truncate")
    rows = random_rows()
    stale = rows["mask"].clone()
    stale[:3] = False
    mixed, _, _ = whole_loss(settings, {**rows, "stale": stale})
    fresh, _, _ = whole_loss(settings, rows)
    assert torch.equal(mixed.tokens.correction[:3], fresh.tokens.correction[:3])
    assert torch.equal(mixed.tokens.ratio, fresh.tokens.ratio)


def test_a_weight_is_held_at_its_bound_and_has_no_gradient() -> None:
    proximal = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    sampler = torch.tensor([[-3.0, 1.0, -9.0]])
    weights = staleness_weights(proximal, sampler, torch.tensor([[True, True, False]]), 5.0)
    torch.testing.assert_close(weights, torch.tensor([[5.0, math.exp(-1.0), 1.0]]))
    assert not weights.requires_grad


def test_three_tokens_by_hand_of_which_one_is_fresh() -> None:
    mask = torch.tensor([[False, True, True, True]])
    stale = torch.tensor([[False, False, True, True]])
    now = torch.tensor([[0.0, math.log(0.55), math.log(0.1), math.log(0.8)]])
    sampler = torch.tensor([[0.0, math.log(0.5), math.log(0.4), math.log(0.2)]])
    figures = stale_figures(now, sampler, mask, stale, 3)
    assert figures["fresh_kl"] == pytest.approx((1.1 - 1 - math.log(1.1)) / 3, rel=1e-4)
    assert figures["stale_kl"] == pytest.approx((0.25 - 1 - math.log(0.25) + 4 - 1 - math.log(4)) / 3)
    weights = mask / 3
    inputs = {"mask": mask, "weights": weights, "tokens": 3, "sampler_logprobs": sampler, "stale": stale}
    result = policy_loss(LossSettings(), BatchInputs(advantages=torch.ones(1, 1), **inputs), now, torch.zeros_like(now))
    assert float(result.max_ratio_error) == pytest.approx(0.1, rel=1e-4), "what engine and learner differ in, not age"
    assert float(result.approx_kl) == pytest.approx(figures["fresh_kl"] + figures["stale_kl"], rel=1e-5)
    every = replace(BatchInputs(advantages=torch.ones(1, 1), **inputs), stale=None)
    assert float(policy_loss(LossSettings(), every, now, torch.zeros_like(now)).max_ratio_error) == pytest.approx(3.0)
