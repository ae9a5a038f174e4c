"""The loss: cases by hand, invariants over every pair of settings, and an independent slow version."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.losses.objective import LossInputs, PolicyLoss, is_finite, policy_loss
from tests.training.losses.batches import ROLLOUTS, loss_of, random_rows, weights_of, whole_loss

SETTINGS: tuple[tuple[dict[str, Any], ...], ...] = (
    (
        *({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "gspo")),
        {"loss_type": "dapo", "delta": 1.5},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    tuple({"aggregation": name} for name in ("token", "sequence", "rollout", "constant")),
    (
        {},
        *(
            {"beta": 0.1, "kl_estimator": name, "use_bias_correction_kl": unbiased}
            for name in ("k1", "k2", "k3")
            for unbiased in (True, False)
        ),
        {"beta": 0.1, "use_kl_in_reward": True},
    ),
    (
        {},
        *(
            {
                "importance_sampling_correction": True,
                "importance_sampling_mode": mode,
                "importance_sampling_clip_max": high,
                "importance_sampling_clip_min": low,
            }
            for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
            for high, low in ((1.3, None), (1.3, 0.7), (None, 0.7))
        ),
    ),
    ({}, {"entropy_coef": 0.01}),
)
"""The values of each dimension of the cross-product."""


def one_token(logprob: Tensor, sampler_logprob: Tensor, advantage: float, **settings: Any) -> PolicyLoss:
    """Return the loss of one token of weight 1; its log-probabilities are (1, 1)."""
    inputs = LossInputs(
        mask=torch.ones(1, 1, dtype=torch.bool),
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1, 1),
        tokens=1,
        sampler_logprobs=sampler_logprob,
    )
    return policy_loss(LossSettings(**settings), inputs, logprob, torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "clipped"),
    [
        (1.5, 2.0, {}, -1.28 * 2, 2),
        (0.5, 2.0, {}, -0.5 * 2, 0),
        (0.5, -2.0, {}, 0.8 * 2, 1),
        (1.5, -2.0, {}, 1.5 * 2, 0),
        (1.25, 2.0, {"epsilon_high": None}, -1.2 * 2, 2),
        (5.0, -2.0, {"delta": 3.0}, 3.0 * 2, 3),
        (5.0, 2.0, {"delta": 3.0}, -1.28 * 2, 2),
        (4.0, 2.0, {"loss_type": "cispo", "epsilon_high": 3.0}, -3.0 * 2 * math.log(4.0), 2),
        (2.0, 2.0, {"loss_type": "cispo", "epsilon_high": 3.0}, -2.0 * 2 * math.log(2.0), 0),
    ],
)
def test_the_loss_of_one_token_by_hand(
    ratio: float, advantage: float, settings: dict[str, Any], loss: float, clipped: int
) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    result = one_token(new, torch.zeros(1, 1), advantage, **settings)
    assert float(result.loss.detach()) == pytest.approx(loss)
    assert int(result.tokens.clipped) == clipped
    assert float(result.clip_fraction) == (clipped > 0)
    assert float(result.tokens.ratio) == pytest.approx(ratio)
    assert float(result.approx_kl) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-5)
    assert float(result.max_ratio_error) == pytest.approx(abs(ratio - 1))


def test_the_gradient_on_a_vocabulary_of_two_tokens() -> None:
    # one token, p = softmax(z); on the first pass the ratio is 1, so dloss/dz_k = -A * (1[k = chosen] - p_k)
    logits = torch.tensor([0.3, -0.2], requires_grad=True)
    chosen, advantage = 0, 1.7
    logprob = torch.log_softmax(logits, dim=0)[chosen].reshape(1, 1)
    one_token(logprob, logprob.detach(), advantage).loss.backward()
    p = torch.softmax(logits.detach(), dim=0)
    expected = [-advantage * (1 - float(p[0])), advantage * float(p[1])]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_the_corrected_penalty_is_that_of_the_divergence_whoever_sampled(estimator: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, reference, sampler = torch.randn(3, 1, 5, generator=generator)  # (1, 5): a vocabulary of five tokens
    logits.requires_grad_()
    logprobs, reference, sampler = (values.log_softmax(dim=-1) for values in (logits, reference, sampler))
    inputs = LossInputs(  # each token once, with the weight of its probability: the exact mean over samples
        mask=torch.ones(1, 5, dtype=torch.bool),
        advantages=torch.zeros(1),
        weights=sampler.exp(),
        tokens=5,
        sampler_logprobs=sampler,
        reference_logprobs=reference,
    )
    result = policy_loss(LossSettings(beta=1.0, kl_estimator=estimator), inputs, logprobs, torch.zeros(1, 5))
    [gradient] = torch.autograd.grad(result.loss, logits, retain_graph=True)
    [expected] = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    assert torch.allclose(gradient, expected, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_loss_equals_a_slow_version(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    number = st.floats(-3, 0)
    new = [[data.draw(number) for _ in range(length)] for _ in range(rows)]
    old = [[data.draw(number) for _ in range(length)] for _ in range(rows)]
    mask = [[1, *(data.draw(st.integers(0, 1)) for _ in range(length - 1))] for _ in range(rows)]
    advantages = [data.draw(st.floats(-2, 2)) for _ in range(rows)]
    total = sum(map(sum, mask))
    slow = 0.0
    for b, t in itertools.product(range(rows), range(length)):
        ratio = math.exp(new[b][t] - old[b][t])
        clipped = min(max(ratio, 0.8), 1.28)
        slow -= mask[b][t] / total * min(ratio * advantages[b], clipped * advantages[b])
    given_rows = {
        "mask": torch.tensor(mask) > 0,
        "advantages": torch.tensor(advantages),
        "logprobs": torch.tensor(new),
        "entropy": torch.zeros(rows, length),
        **dict.fromkeys(("old_logprobs", "sampler_logprobs", "reference_logprobs"), torch.tensor(old)),
    }
    fast, _, _ = whole_loss(LossSettings(), given_rows, torch.arange(rows))
    assert float(fast.loss.detach()) == pytest.approx(slow, rel=1e-4, abs=1e-5)


def _check(case: dict[str, Any], refused: set[str]) -> None:
    """Micro-batches add up to the mini-batch, and the order of the rows changes nothing; or the case is refused."""
    rows, order = random_rows(), torch.tensor([4, 2, 0, 5, 3, 1])
    tokens = int(rows["mask"].sum())
    try:
        settings = LossSettings(**case)
    except BadRequestError as error:
        refused.add(str(error).split(": ")[1].split(" (with")[0])
        return
    whole, gradient, entropy_gradient = whole_loss(settings, rows)
    assert is_finite(whole.loss, gradient, entropy_gradient), case
    assert not gradient[~rows["mask"]].any(), case
    assert bool(entropy_gradient.any()) == (settings.entropy_coef > 0), case
    permuted = {name: value[order] for name, value in rows.items()}
    again, moved, _ = whole_loss(settings, permuted, ROLLOUTS[order])
    assert torch.allclose(again.loss, whole.loss, atol=1e-6), case
    assert torch.allclose(moved, gradient[order], atol=1e-6), case
    weights = weights_of(settings, rows)
    parts = [loss_of(settings, rows, weights, tokens, slice(at, at + 3)) for at in (0, 3)]
    assert torch.allclose(torch.cat([part for _, part, _ in parts]), gradient, atol=1e-7), case
    figures = [part.figures() for part, _, _ in parts]
    for name, value in whole.figures().items():
        together = max if name == "max_ratio_error" else sum
        assert value == pytest.approx(together(part[name] for part in figures), abs=1e-5), (name, case)


REFUSED = {
    "kl_estimator='k1' and use_bias_correction_kl=False",
    "loss_type='gspo' and use_bias_correction_kl=True",
}


def test_every_pair_of_settings_runs_and_does_not_depend_on_how_rows_are_cut() -> None:
    refused = set[str]()
    for one, other in itertools.combinations(SETTINGS, 2):
        for case in itertools.product(one, other):
            _check(case[0] | case[1], refused)
    assert refused == REFUSED


@pytest.mark.heavy
def test_every_combination_of_settings_runs_and_does_not_depend_on_how_rows_are_cut() -> None:
    refused = set[str]()
    for parts in itertools.product(*SETTINGS):
        _check(dict(itertools.chain(*(part.items() for part in parts))), refused)
    assert refused == REFUSED


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_splitting_a_rollout_into_rows_changes_nothing(loss_type: Any, mode: Any) -> None:
    settings = LossSettings(
        loss_type=loss_type,
        epsilon_high=1.2 if loss_type == "cispo" else 0.28,
        beta=0.1,
        entropy_coef=0.1,
        importance_sampling_correction=True,
        importance_sampling_mode=mode,
    )
    rows = random_rows()
    whole, gradient, _ = whole_loss(settings, rows, torch.arange(6))
    halves = {name: torch.cat([value, value]) for name, value in rows.items()}
    halves["mask"][:6, 4:] = False
    halves["mask"][6:, :4] = False
    split, parts, _ = whole_loss(settings, halves, torch.arange(6).repeat(2))
    assert float(split.loss.detach()) == pytest.approx(float(whole.loss.detach()), abs=1e-6)
    assert torch.allclose(parts[:6] + parts[6:], gradient, atol=1e-7)


def test_the_figures_of_tokens_make_the_loss_again() -> None:
    rows = random_rows()
    settings = LossSettings(beta=0.1, importance_sampling_correction=True, importance_sampling_mode="token_mask")
    result, _, _ = whole_loss(settings, rows)
    figures, advantages = result.tokens, rows["advantages"][:, None]
    gain = torch.minimum(figures.ratio * advantages, figures.ratio.clamp(0.8, 1.28) * advantages)
    again = (figures.weight * (settings.beta * figures.kl - figures.correction * gain)).sum()
    assert float(again) == pytest.approx(float(result.loss.detach()), abs=1e-6)
    clipped = (figures.ratio * advantages > gain + 1e-7) & rows["mask"]
    assert torch.equal(figures.clipped > 0, clipped)


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta=0.1 requires the reference"):
        one_token(torch.zeros(1, 1), torch.zeros(1, 1), 1.0, beta=0.1)
