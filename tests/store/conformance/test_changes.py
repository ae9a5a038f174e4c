"""Changes: the transition tables, retries, leases, workers, resources, lists."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    LLM,
    AttemptError,
    AttemptStatus,
    PromptTemplate,
    Rollout,
    RolloutConfig,
)
from tests.store.parts import required, span_of
from tests.store.rules.test_lifecycle import ATTEMPTS, ROLLOUTS, TERMINAL, rule_of


async def test_every_pair_of_attempt_statuses_follows_the_table(store: LightningStore) -> None:
    for before, after in itertools.product(ATTEMPTS, ATTEMPTS):
        rollout = await store.start_rollout("x")
        await store.update_attempt(rollout.rollout_id, "latest", status=before)
        change = store.update_attempt(rollout.rollout_id, "latest", status=after)
        if rule_of(before, after) == "x":
            with pytest.raises(ConflictError):
                await change
        else:
            assert (await change).status == after


async def test_every_pair_of_rollout_statuses_follows_the_table(store: LightningStore) -> None:
    for before, after in itertools.product(ROLLOUTS, ROLLOUTS):
        rollout = await store.enqueue_rollout("x")
        await store.update_rollout(rollout.rollout_id, status=before)
        change = store.update_rollout(rollout.rollout_id, status=after)
        if before in TERMINAL and after != before and after not in ("queuing", "requeuing"):
            with pytest.raises(ConflictError):
                await change
        else:
            changed = await change
            assert (changed.status, changed.end_time is not None) == (after, after in TERMINAL)


async def test_an_attempts_end_is_stamped_once(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    first = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded", outcome="scored")
    again = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert first.end_time is not None
    assert again.end_time == first.end_time
    assert again.outcome == "scored"
    assert required(await store.get_rollout_by_id(rollout.rollout_id)).status == "succeeded"


@pytest.mark.parametrize("status", ["failed", "timeout", "unresponsive"])
async def test_a_failed_attempt_is_retried_up_to_the_limit(store: LightningStore, status: AttemptStatus) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=[status])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status=status)
    assert await _status(store, rollout.rollout_id) == "requeuing"
    retry = required(await store.dequeue_rollout(worker_id="w"))
    assert (retry.rollout_id, retry.attempt.sequence_id) == (rollout.rollout_id, 2)
    await store.update_attempt(rollout.rollout_id, "latest", status=status)
    assert await _status(store, rollout.rollout_id) == "failed"


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_late_success_ends_the_rollout_while_its_retry_is_unclaimed(
    store: LightningStore, claimed: bool
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="unresponsive")
    if claimed:
        required(await store.dequeue_rollout())
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    assert await _status(store, rollout.rollout_id) == ("preparing" if claimed else "succeeded")
    assert await store.dequeue_rollout() is None


async def test_only_given_fields_change_and_none_clears(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout({"a": 1}, mode="train", metadata={"m": 1})
    changed = await store.update_rollout(rollout.rollout_id, metadata=None, input={"b": 2})
    assert (changed.metadata, changed.input, changed.mode) == (None, {"b": 2}, "train")
    assert (await store.update_rollout(rollout.rollout_id, mode=None)).mode is None
    started = await store.start_rollout("x")
    changed = await store.update_rollout(started.rollout_id)
    as_it_was = {name: value for name, value in dict(started).items() if name != "attempt"}
    assert (type(changed), dict(changed)) == (Rollout, as_it_was)
    assert await store.update_attempt(started.rollout_id, "latest") == started.attempt
    await store.update_attempt(started.rollout_id, "latest", metadata={"k": 1}, worker_id="w")
    await store.add_span(span_of(started))
    attempt = required(await store.get_latest_attempt(started.rollout_id))
    assert (attempt.metadata, attempt.worker_id, attempt.status) == ({"k": 1}, "w", "running")
    assert attempt.last_heartbeat_time is not None


async def test_the_outcome_of_an_attempt_is_kept_and_its_error_may_be_given_as_fields(store: LightningStore) -> None:
    error: Any = {"type": "builtins.KeyError", "message": "'x'", "traceback": "Traceback ..."}
    for given in (AttemptError(**error), error):
        rollout = await store.start_rollout("x")
        end: Any = {"outcome": "infrastructure_fault", "outcome_reason": "exception", "error": given}
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed", **end)
        attempt = required(await store.get_latest_attempt(rollout.rollout_id))
        assert (attempt.outcome, attempt.outcome_reason) == ("infrastructure_fault", "exception")
        assert attempt.error == AttemptError(**error)


WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("update_rollout", wrong) for wrong in (
        {"mode": "training"}, {"metadata": [1]}, {"resources_id": 5}, {"status": None}, {"status": "finished"},
        {"config": None}, {"config": {"max_attempts": 0}},
    )),
    *(("update_attempt", {"attempt_id": "latest", **wrong}) for wrong in (
        {"worker_id": 5}, {"outcome": "bad"}, {"outcome_reason": 3}, {"error": "boom"}, {"last_heartbeat_time": "noon"},
        {"last_heartbeat_time": None}, {"status": None}, {"status": "finished"}, {"metadata": [2]},
    )),
    ("update_worker", {"heartbeat_stats": [1]}), ("update_worker", {"heartbeat_stats": None}),
]  # fmt: skip


async def test_a_value_of_the_wrong_type_is_refused_and_changes_nothing(store: LightningStore) -> None:
    started = await store.start_rollout({"q": 1}, mode="train", metadata={"k": 1}, worker_id="w")
    for operation, wrong in WRONG:
        subject = {"worker_id": "v"} if operation == "update_worker" else {"rollout_id": started.rollout_id}
        with pytest.raises((TypeError, ValueError), match=r"input|status|cannot be a null|Input"):
            await getattr(store, operation)(**subject, **wrong)
        assert await store.get_rollout_by_id(started.rollout_id) == started, wrong
    assert (await store.query_workers()).total == 1


# --- time limits and leases ---------------------------------------------------------------------------------------


async def test_a_silent_attempt_is_noticed_by_a_timer_without_any_call(store: LightningStore) -> None:
    config = RolloutConfig(timeout_seconds=0.05)
    rollout = await store.start_rollout("x", config=config)
    [ended] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=20)
    assert ended.status == "failed"
    attempt = required(await store.get_latest_attempt(rollout.rollout_id))
    assert (attempt.status, attempt.outcome) == ("timeout", "cancelled"), "as its runner would say"
    assert attempt.end_time is not None


async def test_a_worker_that_falls_silent_loses_its_claim_to_another(store: LightningStore) -> None:
    await store.enqueue_rollout("x")
    await store.update_worker("dead", {"cpu": 1})
    lost = required(await store.dequeue_rollout(worker_id="dead"))
    retry = required(await store.dequeue_rollout(worker_id="alive", timeout=20))
    assert retry.rollout_id == lost.rollout_id
    assert retry.attempt.sequence_id == 2
    attempts = await store.query_attempts(lost.rollout_id)
    assert (attempts[0].status, attempts[0].outcome_reason) == ("unresponsive", "lease_expired")
    assert required(await store.add_span(span_of(lost))).attributes["agentlightning.stale"] is True
    await store.update_attempt(lost.rollout_id, retry.attempt.attempt_id, status="succeeded")
    assert await _status(store, lost.rollout_id) == "succeeded"


async def test_a_worker_that_never_sent_a_heartbeat_keeps_its_claim(store: LightningStore) -> None:
    rollout = await store.start_rollout("x", worker_id="quiet")
    await store.update_worker("somebody else")
    await asyncio.sleep(0.8)
    assert await _status(store, rollout.rollout_id) == "preparing"


# --- workers ------------------------------------------------------------------------------------------------------


async def test_a_workers_row_follows_its_attempts(store: LightningStore) -> None:
    async def row() -> tuple[str, str | None, str | None]:
        worker = required(await store.get_worker_by_id("w"))
        return worker.status, worker.current_rollout_id, worker.current_attempt_id

    beaten = await store.update_worker("w", {"gpu": 0.5})
    assert (beaten.status, beaten.heartbeat_stats) == ("unknown", {"gpu": 0.5})
    a, b = await store.start_rollout("a", worker_id="w"), await store.start_rollout("b", worker_id="w")
    busy = ("busy", b.rollout_id, b.attempt.attempt_id)
    assert await row() == busy
    await store.update_attempt(a.rollout_id, "latest", status="failed")
    assert await row() == busy
    await store.dequeue_rollout(worker_id="w")
    assert await row() == busy
    await store.update_attempt(b.rollout_id, "latest", status="succeeded")
    assert await row() == ("idle", None, None)
    idle = required(await store.get_worker_by_id("w"))
    assert (idle.heartbeat_stats, idle.last_heartbeat_time) == ({"gpu": 0.5}, beaten.last_heartbeat_time)
    assert idle.last_idle_time is not None
    assert (await store.update_worker("w")).heartbeat_stats == {"gpu": 0.5}
    for status in ("timeout", "unresponsive"):
        lost = await store.start_rollout("c", worker_id="w")
        await store.update_attempt(lost.rollout_id, "latest", status=status)  # type: ignore[arg-type]
        assert await row() == ("unknown", None, None)
    assert [w.worker_id for w in await store.query_workers(status_in=["unknown"], worker_id_contains="w")] == ["w"]


async def test_an_empty_claim_makes_its_worker_idle_and_an_empty_name_is_no_worker(store: LightningStore) -> None:
    assert await store.dequeue_rollout("w") is None
    worker = required(await store.get_worker_by_id("w"))
    assert (worker.status, worker.last_heartbeat_time) == ("idle", None)
    assert worker.last_dequeue_time == worker.last_idle_time is not None
    started = await store.start_rollout("x", worker_id="")
    assert started.attempt.worker_id == ""
    assert (await store.query_workers()).total == 1
    assert (await store.update_attempt(started.rollout_id, "latest", worker_id=None)).worker_id is None


# --- resources ----------------------------------------------------------------------------------------------------


async def test_resources_have_versions_and_rollouts_pin_them(store: LightningStore) -> None:
    one = await store.add_resources({"p": PromptTemplate(template="one", engine="f-string")})
    assert (one.version, len(one.resources_id)) == (1, 15)
    rollout = await store.enqueue_rollout("x")
    assert (rollout.resources_id, rollout.resources_version) == (one.resources_id, 1)
    two = await store.update_resources(one.resources_id, {"p": PromptTemplate(template="two", engine="f-string")})
    assert (two.version, two.create_time) == (2, one.create_time)
    pinned = required(await store.get_resources_by_id(one.resources_id, rollout.resources_version))
    assert pinned.resources == one.resources
    assert await store.get_resources_by_id(one.resources_id) == two
    assert await store.get_latest_resources() == two
    assert (await store.update_resources("mine", {})).version == 1
    assert await store.get_resources_by_id("unknown") is None
    assert (await store.enqueue_rollout("y", resources_id="not there")).resources_id == "not there"
    for named, version in ((one.resources_id, 2), ("not there", None), ("mine", 1)):
        moved = await store.update_rollout(rollout.rollout_id, resources_id=named)
        assert (moved.resources_id, moved.resources_version) == (named, version)


async def test_the_latest_resources_are_those_of_the_run(store: LightningStore) -> None:
    assert await store.get_latest_resources() is None
    common = await store.add_resources({})
    assert await store.get_latest_resources(run_id="a") == common
    mine = await store.add_resources({}, run_id="a")
    assert await store.get_latest_resources(run_id="a") == mine
    assert await store.get_latest_resources() == common
    assert (await store.enqueue_rollout("x", run_id="a")).resources_id == mine.resources_id


async def test_lists_of_resources_show_no_api_key(store: LightningStore) -> None:
    llm = LLM(endpoint="http://x/v1", model="m", api_key="secret")
    made = await store.add_resources({"llm": llm})
    assert made.resources["llm"] == llm
    [listed] = await store.query_resources(resources_id=made.resources_id)
    shown = listed.resources["llm"]
    assert isinstance(shown, LLM)
    assert shown.api_key is None


# --- lists --------------------------------------------------------------------------------------------------------


async def test_statistics_count_what_is_there(store: LightningStore) -> None:
    rollout = await store.start_rollout("x", worker_id="w")
    await store.enqueue_rollout("y")
    await store.add_span(span_of(rollout))
    await store.add_resources({})
    counts = await store.statistics()
    names = ("total_rollouts", "total_attempts", "total_spans", "total_resources", "total_workers")
    assert [counts.get(name) for name in names] == [2, 1, 1, 1, 1]


async def _status(store: LightningStore, rollout_id: str) -> str:
    return required(await store.get_rollout_by_id(rollout_id)).status
