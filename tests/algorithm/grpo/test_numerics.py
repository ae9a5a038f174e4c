"""Advantages, loss and batches: hand-computed values, invariants, and an independent slow version."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter.rows.samples import Sample
from agentlightning.algorithm.grpo.learner.batch import make_batch
from agentlightning.algorithm.grpo.losses.advantages import group_advantages, relative_advantages
from agentlightning.algorithm.grpo.losses.objective import clipped_objective, is_finite, token_weights


def sample(tokens: list[int], mask: list[int], *, rollout: str = "r", logprob: float = -1.0) -> Sample:
    logprobs = [logprob * bit for bit in mask]
    return Sample(rollout, f"{rollout}-attempt", tokens, mask, logprobs, ["c"], [0])


# --- advantages ---------------------------------------------------------------------------------------------------


def test_advantages_of_a_hand_computed_group() -> None:
    # mean 0.5, population deviation 0.5
    assert relative_advantages([1.0, 0.0, 1.0, 0.0], eps=0.0) == [1.0, -1.0, 1.0, -1.0]
    # mean 0.25, deviation sqrt(3)/4: (1 - 0.25) / 0.4330 = 1.7321
    found = relative_advantages([1.0, 0.0, 0.0, 0.0], eps=0.0)
    assert found == pytest.approx([math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])
    assert relative_advantages([1.0, 0.0, 0.0, 0.0], scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]


def test_a_group_without_differences_has_no_advantage() -> None:
    assert relative_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert relative_advantages([3.0]) == [0.0]
    assert relative_advantages([]) == []


def test_groups_do_not_see_each_other() -> None:
    assert group_advantages([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"], eps=0.0) == [1.0, 0.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="one group per reward"):
        group_advantages([1.0], [])
    with pytest.raises(ValueError, match="finite"):
        group_advantages([math.nan, 1.0], [0, 0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.randoms())
def test_advantages_sum_to_zero_and_follow_the_rollouts(rewards: list[float], rng: object) -> None:
    found = relative_advantages(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-6)
    order = list(range(len(rewards)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    assert relative_advantages([rewards[i] for i in order]) == pytest.approx([found[i] for i in order], abs=1e-6)


# --- loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_of_three_tokens_by_hand() -> None:
    # ratios 1.5 (clipped to 1.28 as A > 0), 0.5 (not clipped as A > 0), and a token that is not trained
    old = torch.tensor([[0.0, 0.0, 0.0]])
    new = torch.tensor([[math.log(1.5), math.log(0.5), 5.0]])
    weights = token_weights(torch.tensor([[1, 1, 0]]), torch.tensor([0]))
    found = clipped_objective(new, old, torch.tensor([2.0]), weights, (0.2, 0.28))
    assert float(found.loss) == pytest.approx(-(1.28 * 2 + 0.5 * 2) / 2)
    assert float(found.clip_fraction) == pytest.approx(0.5)
    kl = ((1.5 - 1 - math.log(1.5)) + (0.5 - 1 - math.log(0.5))) / 2
    assert float(found.approx_kl) == pytest.approx(kl, rel=1e-5)
    # with A < 0 it is the low side that is clipped: 0.5 becomes 0.8, and 1.5 counts in full
    found = clipped_objective(new, old, torch.tensor([-2.0]), weights, (0.2, 0.28))
    assert float(found.loss) == pytest.approx((1.5 * 2 + 0.8 * 2) / 2)


def test_the_gradient_on_a_vocabulary_of_two_tokens() -> None:
    # one token, p = softmax(z); on the first pass the ratio is 1, so dloss/dz_k = -A * (1[k = chosen] - p_k)
    logits = torch.tensor([0.3, -0.2], requires_grad=True)
    chosen, advantage = 0, 1.7
    logprob = torch.log_softmax(logits, dim=0)[chosen].reshape(1, 1)
    loss = clipped_objective(logprob, logprob.detach(), torch.tensor([advantage]), torch.ones(1, 1)).loss
    loss.backward()
    p = torch.softmax(logits.detach(), dim=0)
    expected = [-advantage * (1 - float(p[0])), advantage * float(p[1])]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_clipped_token_gives_no_gradient() -> None:
    logprob = torch.tensor([[math.log(2.0)]], requires_grad=True)
    clipped_objective(logprob, torch.zeros(1, 1), torch.tensor([1.0]), torch.ones(1, 1)).loss.backward()
    assert logprob.grad is not None
    assert float(logprob.grad) == 0.0


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_weights_sum_to_one_and_do_not_change_when_a_rollout_is_split(aggregation: str) -> None:
    whole = token_weights(torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]]), torch.tensor([7, 9]), aggregation)  # type: ignore[arg-type]
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]])
    split = token_weights(mask, torch.tensor([7, 7, 9]), aggregation)  # type: ignore[arg-type]
    assert float(whole.sum()) == pytest.approx(1.0)
    assert sorted(whole[whole > 0].tolist()) == pytest.approx(sorted(split[split > 0].tolist()))
    of_first = 0.75 if aggregation == "token" else 0.5
    assert float(split[:2].sum()) == pytest.approx(of_first)


def test_weights_refuse_a_mask_without_tokens() -> None:
    with pytest.raises(ValueError, match="no token"):
        token_weights(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match="aggregation"):
        token_weights(torch.ones(1, 2), torch.tensor([0]), "words")  # type: ignore[arg-type]


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
    for b in range(rows):
        for t in range(length):
            ratio = math.exp(new[b][t] - old[b][t])
            clipped = min(max(ratio, 0.8), 1.28)
            slow -= mask[b][t] / total * min(ratio * advantages[b], clipped * advantages[b])
    weights = token_weights(torch.tensor(mask), torch.arange(rows))
    fast = clipped_objective(torch.tensor(new), torch.tensor(old), torch.tensor(advantages), weights)
    assert float(fast.loss) == pytest.approx(slow, rel=1e-4, abs=1e-5)


def test_numbers_that_are_not_finite_are_found() -> None:
    assert is_finite(torch.ones(2), torch.zeros(1))
    assert not is_finite(torch.tensor([1.0, math.nan]))
    assert not is_finite(torch.tensor(math.inf))


# --- batches ------------------------------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right_and_keep_their_meaning() -> None:
    batch = make_batch(
        [sample([5, 6, 7], [0, 1, 1], rollout="a"), sample([8, 9], [0, 1], rollout="b")], [1.0, -1.0], pad_id=99
    )
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 99]]
    assert batch.attention.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.logprobs.tolist() == [[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]]
    assert batch.advantages.tolist() == [1.0, -1.0]
    assert batch.rollouts.tolist() == [0, 1]
    assert batch.rows(torch.tensor([1])).tokens.tolist() == [[8, 9]]


@dataclass
class Broken:
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rollout_id: str = "ro-broken"
    attempt_id: str = "at"
    call_ids: list[str] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Broken([1, 2], [0], [0.0, 0.0]), "do not match"),
        (Broken([1, 2], [1, 1], [0.0, 0.0]), "prompt"),
        (Broken([1, 2], [0, 0], [0.0, 0.0]), "no token of the row"),
        (Broken([1, 2], [0, 1], [0.0, math.nan]), "finite"),
    ],
)
def test_a_malformed_row_is_refused_by_the_name_of_its_rollout(row: Broken, text: str) -> None:
    with pytest.raises(ValueError, match=f"ro-broken.*{text}"):
        make_batch([row], [1.0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one row"):
        make_batch([], [])
