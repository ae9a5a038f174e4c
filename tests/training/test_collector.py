"""The age of a group, and the record of one that is too old."""

from __future__ import annotations

from agentlightning.adapter.calls.calls import CallRef, ModelCall
from agentlightning.adapter.rows.samples import samples_from_calls
from agentlightning.training.collector import age_of_group, dropped_record
from agentlightning.training.ledger import ExclusionReason, Ledger, RolloutRecord


def call(name: str, version: int | None, attempt: str = "at", produced: int = 2) -> ModelCall:
    ref = CallRef("ro", attempt, name)
    return ModelCall(ref, 1, None, [7, 7], [7] * produced, [-1.0] * produced, "stop", version, "ok")


def record(
    calls: list[ModelCall], verdict: ExclusionReason | None = None, **exclusions: ExclusionReason
) -> RolloutRecord:
    exclusion_of = {CallRef("ro", one.ref.attempt_id, one.call_id): exclusions.get(one.call_id) for one in calls}
    counted = [one for one in calls if one.ref.attempt_id == "at" and exclusion_of[one.ref] is None]
    trainable = [] if verdict is not None else counted
    excluded = {ref: reason or verdict for ref, reason in exclusion_of.items() if (reason or verdict) is not None}
    return RolloutRecord(
        "ro", "at", "scored", verdict, 1.0, reading=samples_from_calls(trainable), calls=calls, exclusions=excluded
    )


def test_a_group_is_as_old_as_its_oldest_reply_that_may_be_trained() -> None:
    assert age_of_group([record([call("a", 5), call("b", 3)]), record([call("c", 4)])], 5) == 2
    assert age_of_group([record([call("a", 5), call("b", 3)], b="helper")], 5) == 0
    assert age_of_group([record([call("a", 5), call("b", 1, attempt="before")])], 5) == 0
    assert age_of_group([record([call("a", 4)], verdict="infrastructure_fault")], 5) is None
    assert age_of_group([record([call("a", 4)], verdict="no_reward")], 5) == 1  # its group may be judged yet
    assert age_of_group([record([call("a", 5, produced=0)])], 5) is None
    assert age_of_group([], 5) is None


def test_a_reply_of_unknown_weights_is_older_than_any() -> None:
    assert age_of_group([record([call("a", None)])], 5) == 6


def test_what_could_be_trained_of_a_group_that_is_too_old_is_excluded_with_that_reason() -> None:
    whole = record([call("a", 0), call("b", 0)], b="helper")
    dropped = dropped_record(whole, unjudged=False)
    assert (dropped.verdict, dropped.samples) == ("too_stale", [])
    ledger = Ledger(step=3)
    ledger.add(dropped)
    assert ledger.close().excluded == {"helper": 1, "too_stale": 1}


def test_a_rollout_that_is_excluded_already_keeps_its_reason_unless_it_waits_for_a_judge() -> None:
    failed = record([call("a", 0)], verdict="infrastructure_fault")
    unscored = record([call("a", 0)], verdict="no_reward")
    assert dropped_record(failed, unjudged=True) is failed
    assert dropped_record(unscored, unjudged=False) is unscored
    assert set(dropped_record(unscored, unjudged=True).exclusions.values()) == {"too_stale"}
