"""The rows of a step: their weight in its mean, and their entries in the ledger."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch

from agentlightning.adapter.calls.calls import CallRef, ModelCall
from agentlightning.adapter.rows.samples import Sample, SampleReading
from agentlightning.training.ledger import ExclusionReason, Ledger, RolloutRecord, Trained
from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.losses.objective import BatchInputs, policy_loss
from agentlightning.training.losses.weights import token_weights
from agentlightning.training.rows import StepRows, choose_rows
from agentlightning.training.settings import GRPOSettings

Aggregation = Literal["token", "rollout"]


def _sample(rollout: str, produced: int) -> Sample:
    """A row of two prompt tokens and `produced` ones of the policy."""
    mask = [0, 0] + [1] * produced
    return Sample(rollout, "at", [7] * len(mask), mask, [0.0, 0.0] + [-1.0] * produced, [f"call-{rollout}"], [0])


def test_rows_have_the_weight_that_they_would_have_beside_those_that_teach_nothing() -> None:
    rows = StepRows([_sample("a", 3), _sample("b", 2), _sample("b", 1)], [1.0, -1.0, -1.0])
    assert rows.share("token") == rows.share("rollout") == 1.0
    rows.without_signal = [_sample(f"idle {number}", 1) for number in range(6)]
    assert rows.share("token") == 6 / 12
    assert rows.share("rollout") == 2 / 8


def test_no_rows_have_no_weight() -> None:
    assert StepRows(without_signal=[_sample("a", 4)]).share("token") == 0.0


@pytest.mark.parametrize("aggregation", ["token", "sequence", "rollout", "constant"])
def test_leaving_out_rows_without_an_advantage_and_scaling_the_others_is_the_same_loss(
    aggregation: Aggregation,
) -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0]])  # (3, 4)
    rows = StepRows([_sample("a", 3), _sample("b", 2)], [1.0, -2.0], without_signal=[_sample("c", 1)])
    share = rows.share(aggregation)
    whole, part = (_loss(mask[:rows], aggregation, share) for rows, share in ((3, 1.0), (2, share)))
    assert part == pytest.approx(whole)


def _loss(mask: torch.Tensor, aggregation: Aggregation, share: float) -> float:
    """Return the loss of the first rows of three rollouts, the last of which has no advantage."""
    rows = len(mask)
    inputs = BatchInputs(
        mask=mask > 0,
        advantages=torch.tensor([[1.0], [-2.0], [0.0]])[:rows],
        weights=token_weights(mask, torch.arange(rows), aggregation, constant_length=4, share=share),
        tokens=6,
        sampler_logprobs=torch.full((rows, 4), -1.0),
    )
    return float(policy_loss(LossSettings(), inputs, torch.full((rows, 4), -1.1), torch.zeros(rows, 4)).loss)


@pytest.mark.parametrize(("trained", "counts"), [(True, (2, {})), (False, (0, {"step_skipped": 2}))])
def test_the_ledger_is_told_whether_the_rows_were_trained(trained: bool, counts: tuple[int, dict[str, int]]) -> None:
    rows = StepRows([_sample("a", 3), _sample("b", 2)], [1.0, -1.0])
    ledger = Ledger(step=1)
    ledger.capture([_call("a", 3), _call("b", 2)])
    rows.enter(ledger, trained=lambda _: trained)
    summary = ledger.close()
    assert (summary.trained, summary.excluded) == counts


def _call(rollout: str, produced: int) -> ModelCall:
    ref = CallRef(rollout, "at", f"call-{rollout}")
    return ModelCall(ref, 1, None, [7, 7], [7] * produced, [-1.0] * produced, "stop", 0, "ok")


def _record(rollout: str, reward: float, *, finish: str = "stop", **dimensions: float) -> RolloutRecord:
    """A rollout of one call of three tokens."""
    call = ModelCall(CallRef(rollout, "at", f"call-{rollout}"), 1, None, [7, 7], [7] * 3, [-1.0] * 3, finish, 0, "ok")
    reading = SampleReading([_sample(rollout, 3)], [])
    return RolloutRecord(rollout, "at", "scored", None, reward, dimensions, reading, [call])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_rewards": "batch"},
        {"advantage": "reinforce_plus_plus_baseline"},
        {"reward_weights": {"x": 1.0}, "multi_objective_aggregation": "normalize_then_sum"},
    ],
)
def test_groups_that_were_replaced_change_no_advantage(options: dict[str, Any]) -> None:
    settings = GRPOSettings(model="m", max_num_gen_batches=2, **options)
    records = [_record(f"k{i}", r, x=r) for i, r in enumerate((0.0, 1.0, 0.0, 3.0))]
    equal = [_record(f"e{i}", 5.0, x=5.0) for i in range(6)]
    alone = choose_rows(records, [1, 1, 2, 2], Ledger(step=1), settings)
    ledger = Ledger(step=1)
    rows = choose_rows([*equal, *records], [0] * 6 + [1, 1, 2, 2], ledger, settings, replaced={0})
    assert rows.advantages == alone.advantages
    assert (rows.mean_reward, rows.rewards) == (1.0, [5.0] * 6 + [0.0, 1.0, 0.0, 3.0])
    assert (rows.share("token"), rows.share("sequence"), rows.share("rollout")) == (1.0, 1.0, 1.0)
    rows.enter(ledger, trained=lambda _: True)
    assert ledger.close().excluded == {"equal_rewards": 6}


def test_a_cut_rollout_counts_in_no_mean_whether_its_group_teaches_or_not() -> None:
    settings = GRPOSettings(model="m", mask_truncated_completions=True)
    taught = [_record("a", 0.0), _record("b", 1.0), _record("c", 1.0, finish="length")]
    idle = [_record("d", 1.0), _record("e", 1.0, finish="length")]
    rows = choose_rows([*taught, *idle], [0, 0, 0, 1, 1], Ledger(step=1), settings)
    assert [sample.rollout_id for sample in rows.samples] == ["a", "b"]
    assert [(sample.rollout_id, sum(sample.mask)) for sample in rows.without_signal] == [("d", 3)]


def _turns(
    rollout: str, reward: float, emitted: dict[int, float], prompts: str = "pq", agents: str = "  "
) -> RolloutRecord:
    """A rollout of two calls of two tokens each, in one row, with rewards by the number of the call; further prompts
    are those of calls without a row."""
    calls = [
        ModelCall(
            CallRef(rollout, "at", f"{n}"), n, None, [ord(prompt)], [7, 7], [-1.0] * 2, "stop", 0, "ok", False, agent
        )
        for n, (prompt, agent) in enumerate(zip(prompts, agents.ljust(len(prompts)), strict=True))
    ]
    mask = [0, 1, 1, 0, 1, 1]
    sample = Sample(rollout, "at", [7] * 6, mask, [-1.0] * 6, ["0", "1"], [0, 0], turns=[(0, 2), (1, 2)])
    rewards = {calls[n].ref: value for n, value in emitted.items()}
    left_out = {call.ref: cast("ExclusionReason", "row_limit") for call in calls[2:]}
    reading = SampleReading([sample], [])
    return RolloutRecord(
        rollout, "at", "scored", None, reward, {}, reading, calls[::-1], left_out, call_rewards=rewards
    )


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        # A of the rollout is 1 and -1; returns 1 + 0 and 0 + 0, so A of the turns is 0.5, -0.5 and 0, 0
        ({"turn_advantage_weight": 1.0}, [1.0 + 0.5, 1.0], [-1.0 - 0.5, -1.0]),
        ({"turn_advantage_weight": 4.0}, [1.0 + 2.0, 1.0], [-1.0 - 2.0, -1.0]),
        ({"turn_advantage_weight": 1.0, "turn_group": "state"}, [1.0, 1.0], [-1.0, -1.0]),  # no prompt is shared
        ({}, 1.0, -1.0),
    ],
)
def test_rewards_of_calls_are_added_to_the_advantages_of_their_rollouts(
    options: dict[str, Any], first: object, second: object
) -> None:
    settings = GRPOSettings(model="m", scale_rewards="none", **options)
    records = [_turns("a", 3.0, {0: 1.0}, "pq"), _turns("b", 1.0, {}, "rs")]
    ledger = Ledger(step=1)
    rows = choose_rows(records, [0, 0], ledger, settings)
    assert rows.advantages == [first, second]
    rows.enter(ledger, trained=lambda _: True)
    entered = [end.advantage for end in ledger.endings().values() if isinstance(end, Trained)]
    flat = [value for each in (first, second) for value in (each if isinstance(each, list) else [each, each])]
    assert entered == flat


def test_without_rewards_of_calls_the_last_call_has_that_of_the_rollout() -> None:
    settings = GRPOSettings(model="m", scale_rewards="none", turn_advantage_weight=1.0, turn_gamma=0.5)
    records = [_turns("a", 3.0, {}), _turns("b", 1.0, {})]
    rows = choose_rows(records, [0, 0], Ledger(step=1), settings)
    assert rows.advantages == [[1.0 + 0.5, 1.0 + 1.0], [-1.0 - 0.5, -1.0 - 1.0]]  # returns 1.5 and 3; 0.5 and 1


@pytest.mark.parametrize(
    ("options", "one", "two", "expected"),
    [
        # calls of two agents are not compared with each other; returns 2 and 2, 4 and 3
        ({}, {"agents": "xy"}, {"agents": "yx"}, [[-0.5, -1.0], [1.0, 0.5]]),
        # the second call of the one and the first of the other have the same prompt; returns 2, 2 and 4, 3
        ({"turn_group": "state"}, {"prompts": "pq"}, {"prompts": "qr"}, [[0.0, -1.0], [1.0, 0.0]]),
        # a third call, without a row, earned 1 of the first rollout: returns 3, 3 and 4, 3
        ({}, {"prompts": "pqr", "emitted": {1: 2.0, 2: 1.0}}, {"prompts": "pq"}, [[-0.5, 0.0], [0.5, 0.0]]),
    ],
)
def test_which_calls_are_compared(options: dict[str, Any], one: Any, two: Any, expected: list[list[float]]) -> None:
    settings = GRPOSettings(model="m", scale_rewards="none", turn_advantage_weight=1.0, **options)
    records = [
        _turns("a", 5.0, **{"emitted": {1: 2.0}, **one}),
        _turns("b", 5.0, **{"emitted": {0: 1.0, 1: 3.0}, **two}),
    ]
    other = [_turns("c", 5.0, {0: 70.0}, "pq"), _turns("d", 5.0, {1: 90.0}, "pq")]  # another task, and a replaced one
    rows = choose_rows([*records, *other], [0, 0, 1, 1], Ledger(step=1), settings, replaced={1})
    assert rows.advantages[:2] == [pytest.approx(own) for own in expected]


@pytest.mark.parametrize("options", [{}, {"turn_group": "state"}])
def test_a_group_whose_calls_have_no_advantage_is_excluded(options: dict[str, Any]) -> None:
    settings = GRPOSettings(model="m", turn_advantage_weight=1.0, **options)
    records = [_turns("a", 1.0, {0: 1.0}, "pqx"), _turns("b", 1.0, {0: 1.0}, "rs")]
    rows = choose_rows(records, [0, 0], Ledger(step=1), settings)
    assert (rows.samples, rows.group_counts["equal_rewards"]) == ([], 1)


def test_a_group_with_equal_rewards_is_trained_if_its_calls_differ() -> None:
    ledger, settings = Ledger(step=1), GRPOSettings(model="m", scale_rewards="none", turn_advantage_weight=1.0)
    records = [_turns("a", 1.0, {0: 1.0}), _turns("b", 1.0, {1: 1.0})]
    rows = choose_rows(records, [0, 0], ledger, settings)
    assert rows.advantages == [[0.0, -0.5], [0.0, 0.5]]  # both returns of the first call are 1
    same = choose_rows([_turns("a", 1.0, {0: 1.0}), _turns("b", 1.0, {0: 1.0})], [0, 0], Ledger(step=1), settings)
    assert (same.advantages, len(same.without_signal)) == ([], 2)


def test_the_ages_are_those_of_every_trained_call() -> None:
    rows = StepRows([Sample("a", "at", [], [], [], ["a", "b"], [3, 5]), Sample("a", "at", [], [], [], ["c"], [4])])
    assert rows.ages(5) == [2, 0, 1]
    assert rows.figures(5)["versions_behind"] == 1.0
    assert StepRows().figures(5)["versions_behind"] is None
