"""What asynchronous collection does not go together with is refused by name, when it is given."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"deterministic": True}, "max_staleness=1 and deterministic=True: which weights answer"),
        ({"use_kl_in_reward": True, "beta": 0.1}, "max_staleness=1 and use_kl_in_reward=True"),
        ({"max_num_gen_batches": 2}, "max_staleness=1 and max_num_gen_batches=2"),
        ({"importance_sampling_correction": True}, "importance_sampling_mode='sequence_mask' .* take 'token_truncate'"),
        ({"batch_size": 257}, "max_staleness=1 and batch_size=257: 514 groups would be in flight, .* at most 512"),
        ({"staleness_clip_max": 0}, "staleness_clip_max must be a number above 0; got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(agl.BadRequestError, match=text):
        agl.GRPO(model="m", max_staleness=1, **settings)


@pytest.mark.parametrize("value", [-1, 65, 0.5, True, "1"])
def test_a_staleness_that_is_no_small_number_of_versions_is_refused(value: object) -> None:
    with pytest.raises(agl.BadRequestError, match="max_staleness must be a whole number of at least 0 and at most 64"):
        agl.GRPO(model="m", max_staleness=value)


def test_token_wise_correction_several_policies_and_a_penalty_in_the_loss_go_together_with_it() -> None:
    agl.GRPO(model="m", max_staleness=2, importance_sampling_correction=True, importance_sampling_mode="token_mask")
    agl.GRPO(model="m", max_staleness=2, beta=0.1, policies=["planner", "solver"])
