"""The rows for TRL: one for each rollout, masked where nothing is learned."""

from __future__ import annotations

import pytest

from agentlightning.adapter.rows.samples import Sample, SampleReading
from agentlightning.errors import BadRequestError
from agentlightning.training.external.trl.rows import as_output, trl_rows
from agentlightning.training.ledger import ExclusionReason, RolloutRecord
from agentlightning.training.rows import StepRows


def _sample(name: str, first: int = 5) -> Sample:
    return Sample(name, "a", [first, 6, 7, 8, 9], [0, 0, 1, 0, 1], [0.0, 0.0, -0.5, 0.0, -0.25], ["c"], [0])


def _record(
    name: str, *samples: Sample, reward: float | None = 1.0, verdict: ExclusionReason | None = None
) -> RolloutRecord:
    return RolloutRecord(name, "a", "scored", verdict, reward, reading=SampleReading(list(samples), []))


def test_a_row_is_split_before_the_first_token_of_the_policy_and_others_between_are_masked() -> None:
    rows = StepRows(samples=[_sample("r")], records=[_record("r", _sample("r"), reward=0.5)])
    assert as_output(trl_rows(rows, 1, filler=2, masks_equal=False)) == {
        "prompt_ids": [[5, 6]],
        "completion_ids": [[7, 8, 9]],
        "logprobs": [[-0.5, 0.0, -0.25]],
        "env_mask": [[1, 0, 1]],
        "agl_reward": [0.5],
    }


def test_an_excluded_rollout_is_a_masked_row_without_a_reward_and_one_beyond_the_count_has_none() -> None:
    crash, late = (_record(name, reward=0.0, verdict="infrastructure_fault") for name in ("crash", "late"))
    step = StepRows(samples=[_sample("good")], records=[crash, _record("good", _sample("good")), late])
    rows = trl_rows(step, 2, filler=2, masks_equal=False)
    assert [row.agl_reward for row in rows] == [None, 1.0]
    assert [row.is_trained for row in rows] == [False, True]
    assert rows[0].env_mask == [0]


@pytest.mark.parametrize("masks_equal", [False, True])
def test_a_row_of_a_group_that_teaches_nothing_counts_only_where_nothing_but_its_reward_moves_the_weights(
    masks_equal: bool,
) -> None:
    step = StepRows(without_signal=[_sample("idle")], records=[_record("idle", _sample("idle"))])
    [row] = trl_rows(step, 1, filler=2, masks_equal=masks_equal)
    assert row.agl_reward == (None if masks_equal else 1.0)
    assert not row.is_trained


def test_several_rows_of_one_rollout_are_refused_with_the_rollout_and_the_way_out() -> None:
    both = [_sample("r"), _sample("r", first=4)]
    with pytest.raises(BadRequestError, match=r"Rollout r has 2 token rows.*Use agl\.GRPO"):
        trl_rows(StepRows(samples=both, records=[_record("r", *both)]), 1, filler=2, masks_equal=False)
