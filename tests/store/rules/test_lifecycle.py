"""Every status of a rollout with every status of its attempt, and the result of each change for both.

The tables say it again in full; `store/rules/lifecycle.py` is not asked. The conformance suite has the plain pairs on
every backend; here is the product of both machines.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptStatus, RolloutConfig, RolloutStatus
from tests.store.parts import required, span_of

ATTEMPTS: tuple[Any, ...] = get_args(AttemptStatus)
ROLLOUTS: tuple[Any, ...] = get_args(RolloutStatus)
TERMINAL = ("failed", "succeeded", "cancelled")

#                 to: preparing running failed succeeded unresponsive timeout   ("=" no change, "x" ConflictError)
ATTEMPT_TABLE = {
    "preparing":    "=         .       .      .         .            .",
    "running":      ".         =       .      .         .            .",
    "failed":       "x         x       =      x         x            x",
    "succeeded":    "x         x       x      =         x            x",
    "unresponsive": ".         .       .      .         =            .",
    "timeout":      "x         x       .      .         x            =",
}  # fmt: skip
FOLLOWS = {
    "preparing": "preparing",
    "running": "running",
    "failed": "failed",
    "succeeded": "succeeded",
    "unresponsive": "failed",
    "timeout": "failed",
}
"""The status of a rollout that has not ended after its latest attempt, when no retry is left."""
AFTER_SPAN = {"preparing": "running", "running": "running", "unresponsive": "running"}
"""Status of the latest attempt after a span; others do not change. An older attempt stays unresponsive."""


async def given(store: LightningStore, rollout: Any, attempt: Any, *, older: bool, retries: bool) -> tuple[str, str]:
    """Make a rollout of this status with an attempt of that status, its latest or not; return their ids."""
    conditions: list[Any] = ["failed", "unresponsive", "timeout"] if retries else []
    config = RolloutConfig(max_attempts=9 if retries else 1, retry_condition=conditions)
    started = await store.start_rollout("x", config=config)
    rollout_id, attempt_id = started.rollout_id, started.attempt.attempt_id
    await store.update_attempt(rollout_id, attempt_id, status=attempt)
    if older:
        await store.start_attempt(rollout_id)
    stored_rollout = required(await store.get_rollout_by_id(rollout_id))
    if stored_rollout.status in TERMINAL and stored_rollout.status != rollout:
        await store.update_rollout(rollout_id, status="queuing")
    await store.update_rollout(rollout_id, status=rollout)
    return rollout_id, attempt_id


async def seen(store: LightningStore, rollout_id: str, attempt_id: str) -> tuple[Any, str]:
    """Return both statuses; check that both ends have their times and that the queue agrees."""
    rollout = required(await store.get_rollout_by_id(rollout_id))
    [attempt] = [a for a in await store.query_attempts(rollout_id) if a.attempt_id == attempt_id]
    assert (rollout.end_time is not None) == (rollout.status in TERMINAL)
    assert (attempt.end_time is not None) == (attempt.status not in ("preparing", "running"))
    claim = await store.dequeue_rollout()
    assert (claim and claim.rollout_id) == (rollout_id if rollout.status in ("queuing", "requeuing") else None)
    return rollout.status, attempt.status


def rule_of(before: str, after: str) -> str:
    return ATTEMPT_TABLE[before].split()[ATTEMPTS.index(after)]


def test_the_table_has_a_rule_for_every_pair() -> None:
    assert ATTEMPTS == ("preparing", "running", "failed", "succeeded", "unresponsive", "timeout")
    assert set(ATTEMPT_TABLE) == set(ATTEMPTS) == set(FOLLOWS)
    assert all(len(row.split()) == len(ATTEMPTS) for row in ATTEMPT_TABLE.values())


@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize("older", [False, True])
async def test_a_change_of_an_attempt_moves_its_rollout_as_the_tables_say(
    local: LightningStore, older: bool, retries: bool
) -> None:
    for rollout, before, after in itertools.product(ROLLOUTS, ATTEMPTS, ATTEMPTS):
        rollout_id, attempt_id = await given(local, rollout, before, older=older, retries=retries)
        change = local.update_attempt(rollout_id, attempt_id, status=after)
        expected = (rollout, after)
        if rule_of(before, after) == "x":
            expected = (rollout, before)
            with pytest.raises(ConflictError):
                await change
        else:
            await change
            if rule_of(before, after) == "." and not older and rollout not in TERMINAL:
                again = retries and FOLLOWS[after] == "failed"
                expected = ("requeuing" if again else FOLLOWS[after], after)
        assert await seen(local, rollout_id, attempt_id) == expected, (rollout, before, after)


@pytest.mark.parametrize("older", [False, True])
async def test_a_span_is_a_sign_of_life_as_the_table_says(local: LightningStore, older: bool) -> None:
    for rollout, before in itertools.product(ROLLOUTS, ATTEMPTS):
        rollout_id, attempt_id = await given(local, rollout, before, older=older, retries=False)
        stored = required(await local.add_span(span_of((rollout_id, attempt_id))))
        over = before in ("failed", "succeeded") or (before == "timeout" and rollout in TERMINAL)
        assert ("agentlightning.stale" in stored.attributes) == (older or over)
        revived = before in AFTER_SPAN and not (older and before == "unresponsive")
        moved = revived and not older and rollout not in TERMINAL
        expected = ("running" if moved else rollout, AFTER_SPAN[before] if revived else before)
        assert await seen(local, rollout_id, attempt_id) == expected, (rollout, before)


async def test_an_attempt_can_be_begun_whatever_the_status_and_leaves_the_older_one_as_it_is(
    local: LightningStore,
) -> None:
    for rollout, before in itertools.product(ROLLOUTS, ATTEMPTS):
        rollout_id, attempt_id = await given(local, rollout, before, older=False, retries=False)
        begun = await local.start_attempt(rollout_id)
        assert (begun.status, begun.attempt.status, begun.attempt.sequence_id) == ("preparing", "preparing", 2)
        assert await seen(local, rollout_id, attempt_id) == ("preparing", before), (rollout, before)


async def test_a_status_set_by_hand_follows_the_table_and_leaves_the_attempt_as_it_is(local: LightningStore) -> None:
    for before, after, attempt in itertools.product(ROLLOUTS, ROLLOUTS, ATTEMPTS):
        rollout_id, attempt_id = await given(local, before, attempt, older=False, retries=False)
        change = local.update_rollout(rollout_id, status=after)
        if before in TERMINAL and after != before and after not in ("queuing", "requeuing"):
            with pytest.raises(ConflictError):
                await change
            after = before
        else:
            await change
        assert await seen(local, rollout_id, attempt_id) == (after, attempt), (before, after, attempt)
