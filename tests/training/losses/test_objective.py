"""The loss: cases by hand, invariants over every pair of settings, and an independent slow version."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import LossInputs, LossSettings
from agentlightning.training.losses.objective import BatchInputs, PolicyLoss, highest_entropy, is_finite, policy_loss
from tests.training.losses.batches import ROLLOUTS, loss_of, random_rows, weights_of, whole_loss

SETTINGS: tuple[tuple[dict[str, Any], ...], ...] = (
    (
        *({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "gspo")),
        {"loss_type": "dapo", "delta": 1.5},
        {"loss_type": "cispo", "epsilon_high": 1.2},
        *({"loss_type": name} for name in ("sapo", "luspo", "vespo")),
        *({"loss_type": name, "epsilon": 0.05, "epsilon_high": 0.1} for name in ("dppo", "ipo")),
        {"loss": lambda inputs: -(inputs.ratio * inputs.advantages)},
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
    ({}, {"off_policy_mask_threshold": 0.1}, {"top_entropy_quantile": 0.3}, {"kl_tau": 0.01}),
)
"""The values of each dimension of the cross-product."""


def one_token(logprob: Tensor, sampler_logprob: Tensor, advantage: float, **settings: Any) -> PolicyLoss:
    """Return the loss of one token of weight 1; its log-probabilities are (1, 1)."""
    inputs = BatchInputs(
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
        (1.5, 2.0, {"loss_type": "sapo"}, -4 / (1 + math.exp(-0.5)) * 2, 0),
        (1.5, -2.0, {"loss_type": "sapo"}, 4 / 1.05 / (1 + math.exp(-1.05 * 0.5)) * 2, 0),
        (2.0, 2.0, {"loss_type": "vespo"}, -(2.0**2) * math.exp(3.0 * (1 - 2.0)) * 2 * math.log(2.0), 0),
        # the probability was 1, and is the ratio: an increase by 0.5, or a decrease by 0.5
        (1.5, 2.0, {"loss_type": "dppo", "epsilon_high": 0.4}, 0.0, 2),
        (1.5, 2.0, {"loss_type": "dppo", "epsilon_high": 0.6}, -1.5 * 2, 0),
        (1.5, -2.0, {"loss_type": "dppo", "epsilon_high": 0.4}, 1.5 * 2, 0),
        (0.5, -2.0, {"loss_type": "dppo", "epsilon": 0.4}, 0.0, 1),
        (0.5, 2.0, {"loss_type": "dppo", "epsilon": 0.4}, -0.5 * 2, 0),
        (0.5, 2.0, {"loss_type": "ipo", "epsilon": 0.4}, 0.0, 1),
        (1.5, -2.0, {"loss_type": "ipo", "epsilon_high": 0.4}, 0.0, 2),
        (0.5, -2.0, {"off_policy_mask_threshold": 0.6}, 0.0, 1),
        (0.5, -2.0, {"off_policy_mask_threshold": 0.7}, 0.8 * 2, 1),
        (0.5, 2.0, {"off_policy_mask_threshold": 0.6}, -0.5 * 2, 0),
        (2.0, 0.0, {"kl_tau": 0.1}, 0.1 * math.log(2.0) ** 2, 0),
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
    inputs = BatchInputs(  # each token once, with the weight of its probability: the exact mean over samples
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
    "loss_type='luspo' and use_bias_correction_kl=True",
    "loss_type='vespo' and importance_sampling_mode='sequence_truncate'",
    "loss_type='vespo' and importance_sampling_mode='sequence_mask'",
}


def test_every_pair_of_settings_runs_and_does_not_depend_on_how_rows_are_cut() -> None:
    refused = set[str]()
    for one, other in itertools.combinations(SETTINGS, 2):
        for case in itertools.product(one, other):
            _check(case[0] | case[1], refused)
    assert refused == REFUSED


@pytest.mark.heavy
def test_every_three_settings_run_together_and_do_not_depend_on_how_rows_are_cut() -> None:
    refused = set[str]()
    for dimensions in itertools.combinations(SETTINGS, 3):
        for parts in itertools.product(*dimensions):
            _check(dict(itertools.chain(*(part.items() for part in parts))), refused)
    assert refused == REFUSED


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "dppo", "ipo"])
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


def test_a_sequence_is_removed_as_a_whole_and_its_penalty_stays() -> None:
    rows = random_rows() | {"advantages": torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, -1.0])}
    distance = ((rows["sampler_logprobs"] - rows["logprobs"]) * rows["mask"]).sum(dim=1) / rows["mask"].sum(dim=1)
    dropped = (rows["advantages"] < 0) & (distance > 0.05)
    assert 0 < int(dropped.sum()) < 4
    plain = whole_loss(LossSettings(beta=0.1), rows)[0]
    masked = whole_loss(LossSettings(beta=0.1, off_policy_mask_threshold=0.05), rows)[0]
    assert torch.equal(masked.tokens.correction == 0, dropped[:, None] | ~rows["mask"])
    assert float(masked.masked_fraction) == pytest.approx(int(rows["mask"][dropped].sum()) / int(rows["mask"].sum()))
    assert torch.equal(masked.tokens.kl, plain.tokens.kl)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_the_tokens_of_the_highest_entropy_are_kept(share: float) -> None:
    rows = random_rows()
    kept = highest_entropy(rows["entropy"], rows["mask"], share)
    of_mask = rows["entropy"][rows["mask"]].sort(descending=True).values
    assert int(kept.sum()) in (1 + int(share * (len(of_mask) - 1)), 2 + int(share * (len(of_mask) - 1)))
    assert float(rows["entropy"][kept].min()) == float(of_mask[int(kept.sum()) - 1])
    _, gradient, entropy_gradient = whole_loss(LossSettings(top_entropy_quantile=share, entropy_coef=0.1), rows)
    assert not gradient[~kept].any()
    assert torch.equal(entropy_gradient != 0, kept)


@pytest.mark.parametrize(
    ("settings", "length"),
    [({"loss_type": "luspo"}, 1), ({"loss_type": "luspo", "loss_scale_factor": 7}, 7), ({"loss_type": "dr_grpo"}, 99)],
)
def test_the_length_by_which_a_constant_aggregation_divides(settings: dict[str, Any], length: int) -> None:
    assert LossSettings(**settings).constant_length(99) == length


def squared(inputs: LossInputs) -> Tensor:
    return (inputs.ratio * inputs.advantages - inputs.settings.epsilon).square()


def test_a_custom_loss_is_a_function_or_its_import_path_and_is_penalised_and_weighted_as_any_other() -> None:
    rows = random_rows()
    more: dict[str, Any] = {"beta": 0.1, "kl_tau": 0.01, "epsilon": 0.3, "importance_sampling_correction": True}
    by_function = whole_loss(LossSettings(loss=squared, **more), rows)
    by_path = whole_loss(LossSettings(loss=f"{__name__}:squared", **more), rows)
    assert torch.equal(by_function[1], by_path[1])
    figures, advantages = by_function[0].tokens, rows["advantages"][:, None]
    off = torch.where(rows["mask"], rows["logprobs"] - rows["sampler_logprobs"], 0.0).square()
    per_token = figures.correction * (figures.ratio * advantages - 0.3).square() + 0.1 * figures.kl + 0.01 * off
    assert float((figures.weight * per_token).sum()) == pytest.approx(float(by_function[0].loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda inputs: inputs.logprobs.sum(), r"a tensor \(6, 7\); got a tensor of shape \(\)"),
        (lambda inputs: inputs.advantages * inputs.logprobs.sum(), r"\(6, 7\); got a tensor of shape \(6, 1\)"),
        (lambda inputs: 1.5, r"a tensor \(6, 7\); got float"),
        (lambda inputs: None, r"a tensor \(6, 7\); got NoneType"),
        (lambda inputs: inputs.sampler_logprobs, "without gradient; compute it from inputs.logprobs"),
    ],
)
def test_a_custom_loss_with_a_wrong_result_is_refused(loss: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        whole_loss(LossSettings(loss=loss), random_rows())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"loss": "my_losses"},
            "loss='my_losses' cannot be imported: No module named 'my_losses'. Pass a function, or",
        ),
        ({"loss": f"{__name__}:squarred"}, "has no attribute 'squarred'"),
        ({"loss": ":squared"}, "loss=':squared' cannot be imported"),
        ({"loss": "losses:<lambda>"}, "other programs cannot import. Define it in a module"),
        ({"loss": "__main__:mine"}, "a function of the program that was started"),
        ({"loss": partial(squared)}, "Put the parameters of a partial function, of an object or of a method into"),
        ({"loss_type": "grpo", "vespo_k_pos": 1.0}, "loss_type='grpo' and vespo_k_pos=1.0: this loss does not use it"),
        ({"sapo_temperature_neg": 2.0}, "loss_type='dapo' and sapo_temperature_neg=2.0"),
        ({"loss": 3}, "loss must be a function of an agl.LossInputs, or its import path; got 3"),
        ({"loss": f"{__name__}:SETTINGS"}, "loss must be a function"),
        ({"loss": squared, "loss_type": "gspo"}, "a custom loss replaces that of loss_type; omit one of them"),
        ({"loss_type": "sapo", "delta": 2.0}, "this loss does not support delta; omit it"),
        ({"loss_type": "dppo", "epsilon_high": 1.5}, "a change of a probability; set at most 1"),
        ({"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold must be a number above 0; got 0.0"),
        ({"top_entropy_quantile": 1.2}, "top_entropy_quantile must be a number of at least 0 and at most 1; got 1.2"),
        ({"kl_tau": -1}, "kl_tau must be a number of at least 0; got -1"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos must be a number above 0; got 0"),
    ],
)
def test_wrong_settings_of_losses_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(error)):
        LossSettings(**settings)


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta=0.1 requires the reference"):
        one_token(torch.zeros(1, 1), torch.zeros(1, 1), 1.0, beta=0.1)
