"""The weight of each token in the loss, for each way of averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentlightning.training.losses.weights import token_weights

WHOLE = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
SPLIT = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]])  # the first rollout in two rows


@pytest.mark.parametrize(("aggregation", "of_first"), [("token", 0.75), ("rollout", 0.5), ("constant", 0.3)])
def test_weights_do_not_change_when_a_rollout_is_split(aggregation: Any, of_first: float) -> None:
    whole = token_weights(WHOLE, torch.tensor([7, 9]), aggregation, constant_length=5)
    split = token_weights(SPLIT, torch.tensor([7, 7, 9]), aggregation, constant_length=5)
    assert sorted(whole[whole > 0].tolist()) == pytest.approx(sorted(split[split > 0].tolist()))
    assert float(split[:2].sum()) == pytest.approx(of_first)
    assert float(split.sum()) == pytest.approx(0.4 if aggregation == "constant" else 1.0)


def test_a_sequence_is_a_row() -> None:
    weights = token_weights(SPLIT, torch.tensor([7, 7, 9]), "sequence")
    assert weights.sum(dim=1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout", "constant"])
def test_rows_without_a_token_count_for_nothing_and_a_share_scales_all(aggregation: Any) -> None:
    empty = torch.cat([SPLIT, torch.zeros(2, 4, dtype=torch.int64)])
    plain = token_weights(SPLIT, torch.tensor([7, 7, 9]), aggregation, constant_length=5)
    padded = token_weights(empty, torch.tensor([7, 7, 9, 9, 11]), aggregation, constant_length=5, share=0.5)
    assert torch.allclose(padded[:3], plain * 0.5)


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        token_weights(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match="aggregation must be 'token', 'sequence', 'rollout' or 'constant'"):
        token_weights(torch.ones(1, 2), torch.tensor([0]), "words")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="constant_length"):
        token_weights(torch.ones(1, 2), torch.tensor([0]), "constant")
