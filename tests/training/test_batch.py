"""Rows as padded tensors."""

from __future__ import annotations

import math

import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.batch import make_batch


def sample(tokens: list[int], mask: list[int], *, rollout: str = "r", logprob: float = -1.0) -> Sample:
    logprobs = [logprob * bit for bit in mask]
    return Sample(rollout, f"{rollout}-attempt", tokens, mask, logprobs, ["c"], [0])


def test_rows_are_padded_on_the_right_and_keep_their_meaning() -> None:
    batch = make_batch(
        [sample([5, 6, 7], [0, 1, 1], rollout="a"), sample([8, 9], [0, 1], rollout="b")], [1.0, -1.0], pad_id=99
    )
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 99]]
    assert batch.attention.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.logprobs.tolist() == [[0.0, -1.0, -1.0], [0.0, -1.0, 0.0]]
    assert batch.advantages.tolist() == [[1.0], [-1.0]]
    assert batch.rollouts.tolist() == [0, 1]
    assert batch.rows(torch.tensor([1])).tokens.tolist() == [[8, 9]]


@pytest.mark.parametrize(
    ("mask", "logprobs", "text"),
    [
        ([0], [0.0, 0.0], "the numbers must be equal"),
        ([1, 1], [0.0, 0.0], "prompt"),
        ([0, 0], [0.0, 0.0], "no token of the policy"),
        ([0, 1], [0.0, math.nan], "finite"),
    ],
)
def test_a_malformed_row_is_refused_by_the_name_of_its_rollout(
    mask: list[int], logprobs: list[float], text: str
) -> None:
    with pytest.raises(ValueError, match=f"ro-broken.*{text}"):
        make_batch([Sample("ro-broken", "at", [1, 2], mask, logprobs, [], [])], [1.0])
    with pytest.raises(ValueError, match="at least one row"):
        make_batch([], [])


def test_stale_tokens_are_those_that_other_weights_sampled() -> None:
    turns = [(0, 2), (1, 1)]
    mixed = Sample(
        "r", "a", [1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [0.0, -1.0, -1.0, 0.0, -1.0], ["c", "d"], [3, 4], None, turns
    )
    fresh = Sample("s", "a", [1, 2], [0, 1], [0.0, -1.0], ["e"], [4], None, [(0, 1)])
    batch = make_batch([mixed, fresh], [1.0, 1.0], weight_version=4)
    assert batch.stale is not None
    assert batch.stale.tolist() == [[False, True, True, False, False], [False] * 5]
    rows = batch.rows(torch.tensor([1])).stale
    assert rows is not None
    assert rows.tolist() == [[False, False]]
    assert make_batch([mixed, fresh], [1.0, 1.0]).stale is None
    assert make_batch([fresh], [1.0], weight_version=4).stale is None
    unknown = Sample("r", "a", [1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0], ["c", "d"], [4, 3])
    stale = make_batch([unknown], [1.0], weight_version=4).stale
    assert stale is not None, "without the tokens of each call a row is as old as its oldest call"
    assert stale.tolist() == [[False, True, True]]
