"""The penalty towards the model as it was loaded: with adapters switched off, or with a frozen copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.loss_settings import LossSettings
from tests.training.learner.rows import make_advantages, make_rows

TOKENIZER = make_tokenizer()


def make_policy(**settings: Any) -> Policy:
    return Policy(make_model(TOKENIZER, seed=0), TOKENIZER, learning_rate=1e-2, **settings)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}], ids=["all weights", "adapters"])
def test_the_penalty_is_towards_the_model_as_it_was_loaded(lora: dict[str, Any] | None) -> None:
    rows, advantages = make_rows(8, len(TOKENIZER)), make_advantages(8)
    policy = make_policy(lora=lora, keeps_reference=True)
    loss = LossSettings(beta=0.5)
    first = policy.update(rows, advantages, UpdateSettings(loss=loss))
    assert first.figures["kl"] == pytest.approx(0.0, abs=1e-6)
    second = policy.update(rows, advantages, UpdateSettings(loss=loss))
    assert second.figures["kl"] > 1e-4
    before = np.concatenate([row["trainer_logprobs"] for row in first.rows])
    after = np.concatenate([row["trainer_logprobs"] for row in second.rows])
    expected = np.exp(before - after) - (before - after) - 1
    ratio = np.concatenate([row["ratio"] for row in second.rows])
    assert np.concatenate([row["kl"] for row in second.rows]) == pytest.approx(expected * ratio, abs=1e-5)


def test_a_penalty_without_a_reference_is_refused_before_a_weight_moves() -> None:
    policy = make_policy()
    with pytest.raises(ValueError, match="keeps_reference=True"):
        policy.update(make_rows(2, len(TOKENIZER)), make_advantages(2), UpdateSettings(loss=LossSettings(beta=0.5)))
    assert policy.weight_version == 0


def test_with_a_correction_ratios_are_to_the_learner_before_its_first_step() -> None:
    rows, advantages = make_rows(8, len(TOKENIZER)), make_advantages(8)
    loss = LossSettings(importance_sampling_correction=True, importance_sampling_mode="token_truncate")
    result = make_policy().update(rows, advantages, UpdateSettings(loss=loss, minibatch_rollouts=2))
    one_step = make_policy().update(rows, advantages, UpdateSettings(loss=loss))
    for row in one_step.rows:
        assert row["ratio"].tolist() == [1.0] * len(row["ratio"])
        assert row["correction"] == pytest.approx(
            np.minimum(np.exp(row["trainer_logprobs"] - row["engine_logprobs"]), 3), rel=1e-5
        )
    ratios = np.concatenate([row["ratio"] for row in result.rows])
    assert (np.abs(ratios - 1) < 1e-5).any()
    assert (np.abs(ratios - 1) > 1e-3).any()
    for row, other in zip(result.rows, one_step.rows, strict=True):
        assert row["correction"] == pytest.approx(other["correction"], rel=1e-4)


MOVED = LossSettings(beta=0.5, sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=3)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}], ids=["all weights", "adapters"])
def test_a_moving_reference_is_mixed_by_hand_after_every_third_optimizer_step(lora: dict[str, Any] | None) -> None:
    policy = make_policy(lora=lora, keeps_reference=True, moves_reference=True)
    expected = {name: weight.clone() for name, weight in policy.state().weights.items()}
    taken: list[None] = []

    def mix(*_: object) -> None:
        taken.append(None)
        if len(taken) % 3 == 0:
            for name, weight in policy.state().weights.items():
                expected[name] = 0.25 * weight + 0.75 * expected[name]

    policy._optimizer.optimizers[0].register_step_post_hook(mix)
    for seed in (0, 1):
        rows = make_rows(8, len(TOKENIZER), seed=seed)  # 4 rollouts: two steps of two, twice
        policy.update(rows, make_advantages(8), UpdateSettings(loss=MOVED, num_iterations=2, minibatch_rollouts=2))
    reference, weights = policy.state().reference, policy.state().weights
    assert (len(taken), policy.state().steps_taken, reference.keys()) == (8, 8, expected.keys())
    for name, weight in reference.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-6)
        assert not torch.equal(weight, weights[name])


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}], ids=["all weights", "adapters"])
def test_a_reference_that_becomes_the_policy_leaves_no_divergence(lora: dict[str, Any] | None) -> None:
    loss = LossSettings(beta=0.5, sync_ref_model=True, ref_model_mixup_alpha=1.0, ref_model_sync_steps=2)
    policy = make_policy(lora=lora, keeps_reference=True, moves_reference=True)
    kl = [
        policy.update(make_rows(8, len(TOKENIZER)), make_advantages(8), UpdateSettings(loss=loss)).figures["kl"]
        for _ in range(4)
    ]
    assert [kl[0], kl[2]] == pytest.approx([0, 0], abs=1e-6)  # at the start, and after the second step
    assert min(kl[1], kl[3]) > 1e-4


def test_a_loss_whose_reference_moves_requires_a_policy_that_moves_it() -> None:
    policy = make_policy(keeps_reference=True)
    with pytest.raises(ValueError, match="moves_reference=True"):
        policy.update(make_rows(8, len(TOKENIZER)), make_advantages(8), UpdateSettings(loss=MOVED))
    with pytest.raises(ValueError, match="The state has a moving reference, but this policy has no moving reference"):
        policy.restore(make_policy(keeps_reference=True, moves_reference=True).state())
