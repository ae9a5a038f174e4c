"""Changes: the transition tables, retries, leases, workers, resources, lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import pytest

from agentlightning.errors import BadRequestError, ConflictError, NotFoundError
from agentlightning.store.base import LightningStore, request_token
from agentlightning.types import (
    LLM,
    AttemptError,
    AttemptStatus,
    PromptTemplate,
    RolloutConfig,
    RolloutStatus,
    Span,
)

ATTEMPT_TABLE = {
    "preparing": "=.....",
    "running": ".=....",
    "unresponsive": "....=.",
    "timeout": "xx..x=",
    "failed": "xx=xxx",
    "succeeded": "xxx=xx",
}
ATTEMPT_COLUMNS = ("preparing", "running", "failed", "succeeded", "unresponsive", "timeout")


async def test_every_pair_of_attempt_statuses_follows_the_table(store: LightningStore) -> None:
    assert set(ATTEMPT_COLUMNS) == set(get_args(AttemptStatus))
    for before, row in ATTEMPT_TABLE.items():
        for after, rule in zip(ATTEMPT_COLUMNS, row, strict=True):
            rollout = await store.start_rollout("x")
            if before != "preparing":
                await store.update_attempt(rollout.rollout_id, "latest", status=before)  # type: ignore[arg-type]
            change = store.update_attempt(rollout.rollout_id, "latest", status=after)  # type: ignore[arg-type]
            if rule == "x":
                with pytest.raises(ConflictError):
                    await change
            else:
                assert (await change).status == after


async def test_every_pair_of_rollout_statuses_follows_the_table(store: LightningStore) -> None:
    terminal = {"failed", "succeeded", "cancelled"}
    for before in get_args(RolloutStatus):
        for after in get_args(RolloutStatus):
            rollout = await store.enqueue_rollout("x")
            await store.update_rollout(rollout.rollout_id, status=before)
            change = store.update_rollout(rollout.rollout_id, status=after)
            if before in terminal and after != before and after not in ("queuing", "requeuing"):
                with pytest.raises(ConflictError):
                    await change
            else:
                changed = await change
                assert changed.status == after
                assert (changed.end_time is not None) == (after in terminal)


async def test_an_attempts_end_is_stamped_once(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    first = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded", outcome="scored")
    again = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert first.end_time is not None
    assert again.end_time == first.end_time
    assert again.outcome == "scored"
    stored_rollout = await store.get_rollout_by_id(rollout.rollout_id)
    assert stored_rollout is not None
    assert stored_rollout.status == "succeeded"


async def test_outcome_reason_and_error_are_kept_on_the_attempt(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    error = AttemptError(type="builtins.KeyError", message="'x'", traceback="Traceback ...")
    await store.update_attempt(
        rollout.rollout_id,
        rollout.attempt.attempt_id,
        status="failed",
        outcome="infrastructure_fault",
        outcome_reason="exception",
        error=error,
    )
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert (attempt.outcome, attempt.outcome_reason, attempt.error) == ("infrastructure_fault", "exception", error)


@pytest.mark.parametrize("status", ["failed", "timeout", "unresponsive"])
async def test_a_failed_attempt_is_retried_up_to_the_limit(store: LightningStore, status: AttemptStatus) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=[status])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status=status)
    assert await _status(store, rollout.rollout_id) == "requeuing"
    retry = await store.dequeue_rollout(worker_id="w")
    assert retry is not None
    assert (retry.rollout_id, retry.attempt.sequence_id) == (rollout.rollout_id, 2)
    await store.update_attempt(rollout.rollout_id, "latest", status=status)
    assert await _status(store, rollout.rollout_id) == "failed"


async def test_a_late_success_ends_the_rollout_while_its_retry_is_unclaimed(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="unresponsive")
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    assert await _status(store, rollout.rollout_id) == "succeeded"
    assert await store.dequeue_rollout() is None


async def test_a_late_success_of_an_older_attempt_changes_nothing_else(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    rollout = await store.start_rollout("x", config=config)
    await store.update_attempt(rollout.rollout_id, "latest", status="timeout")
    await store.dequeue_rollout()
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    assert await _status(store, rollout.rollout_id) == "preparing"


async def test_an_attempt_never_moves_a_cancelled_rollout(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    await store.update_attempt(rollout.rollout_id, "latest", metadata={"k": 1})
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert await _status(store, rollout.rollout_id) == "cancelled"


async def test_only_given_fields_change_and_none_clears(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout({"a": 1}, mode="train", metadata={"m": 1})
    changed = await store.update_rollout(rollout.rollout_id, metadata=None, input={"b": 2})
    assert (changed.metadata, changed.input, changed.mode) == (None, {"b": 2}, "train")
    assert (await store.update_rollout(rollout.rollout_id, mode=None)).mode is None
    with pytest.raises(NotFoundError, match="does not exist"):
        await store.update_rollout("nope")
    with pytest.raises(ValueError, match="ttempt"):
        await store.update_attempt(rollout.rollout_id, "latest", status="failed")


async def test_a_wrong_status_is_refused_and_changes_nothing(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    wrong: Any = "finished"
    with pytest.raises(ValueError, match=r"finished|preparing"):
        await store.update_attempt(rollout.rollout_id, "latest", status=wrong)
    with pytest.raises(ValueError, match=r"finished|preparing"):
        await store.update_rollout(rollout.rollout_id, status=wrong)
    assert await _status(store, rollout.rollout_id) == "preparing"


async def test_requeueing_by_hand_queues_once(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("x")
    await store.update_rollout(rollout.rollout_id, status="requeuing")
    assert await store.dequeue_rollout() is not None
    assert await store.dequeue_rollout() is None


# --- time limits and leases ---------------------------------------------------------------------------------------


async def test_a_silent_attempt_is_noticed_by_a_timer_without_any_call(store: LightningStore) -> None:
    config = RolloutConfig(timeout_seconds=0.05)
    rollout = await store.start_rollout("x", config=config)
    [ended] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=20)
    assert ended.status == "failed"
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert (attempt.status, attempt.outcome) == ("timeout", "cancelled"), "as its runner would say"
    assert attempt.end_time is not None


async def test_a_worker_that_falls_silent_loses_its_claim_to_another(
    store: LightningStore, span: Callable[..., Span]
) -> None:
    await store.enqueue_rollout("x")
    await store.update_worker("dead", {"cpu": 1})
    lost = await store.dequeue_rollout(worker_id="dead")
    assert lost is not None
    retry = await store.dequeue_rollout(worker_id="alive", timeout=20)
    assert retry is not None
    assert retry.rollout_id == lost.rollout_id
    assert retry.attempt.sequence_id == 2
    attempts = await store.query_attempts(lost.rollout_id)
    assert (attempts[0].status, attempts[0].outcome_reason) == ("unresponsive", "lease_expired")
    late = await store.add_span(span(lost))
    assert late is not None
    assert late.attributes["agentlightning.stale"] is True
    await store.update_attempt(lost.rollout_id, retry.attempt.attempt_id, status="succeeded")
    assert await _status(store, lost.rollout_id) == "succeeded"


async def test_a_worker_that_never_sent_a_heartbeat_keeps_its_claim(store: LightningStore) -> None:
    rollout = await store.start_rollout("x", worker_id="quiet")
    await store.update_worker("somebody else")
    await asyncio.sleep(0.8)
    assert await _status(store, rollout.rollout_id) == "preparing"


# --- workers ------------------------------------------------------------------------------------------------------


async def test_a_workers_row_follows_its_attempts(store: LightningStore) -> None:
    a, b = await store.start_rollout("a", worker_id="w"), await store.start_rollout("b", worker_id="w")
    assert await _worker(store) == ("busy", b.rollout_id)
    await store.update_attempt(a.rollout_id, "latest", status="failed")
    assert await _worker(store) == ("busy", b.rollout_id)
    await store.dequeue_rollout(worker_id="w")
    assert await _worker(store) == ("busy", b.rollout_id)
    await store.update_attempt(b.rollout_id, "latest", status="succeeded")
    assert await _worker(store) == ("idle", None)
    assert [w.worker_id for w in await store.query_workers(status_in=["idle"], worker_id_contains="w")] == ["w"]
    assert await store.get_worker_by_id("unknown") is None


async def test_a_heartbeat_makes_a_worker_and_keeps_its_statistics(store: LightningStore) -> None:
    worker = await store.update_worker("w", {"cpu": 0.5})
    assert (worker.status, worker.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    assert (await store.update_worker("w")).heartbeat_stats == {"cpu": 0.5}
    none: Any = None
    with pytest.raises((TypeError, BadRequestError)):
        await store.update_worker("w", none)


async def _worker(store: LightningStore) -> tuple[str, str | None]:
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    return worker.status, worker.current_rollout_id


# --- resources ----------------------------------------------------------------------------------------------------


async def test_resources_have_versions_and_rollouts_pin_them(store: LightningStore) -> None:
    one = await store.add_resources({"p": PromptTemplate(template="one", engine="f-string")})
    assert (one.version, len(one.resources_id)) == (1, 15)
    rollout = await store.enqueue_rollout("x")
    assert (rollout.resources_id, rollout.resources_version) == (one.resources_id, 1)
    two = await store.update_resources(one.resources_id, {"p": PromptTemplate(template="two", engine="f-string")})
    assert (two.version, two.create_time) == (2, one.create_time)
    pinned = await store.get_resources_by_id(one.resources_id, rollout.resources_version)
    assert pinned is not None
    assert pinned.resources == one.resources
    assert await store.get_resources_by_id(one.resources_id) == two
    assert await store.get_latest_resources() == two
    assert (await store.update_resources("mine", {})).version == 1
    assert await store.get_resources_by_id("unknown") is None
    assert (await store.enqueue_rollout("y", resources_id="not there")).resources_id == "not there"


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


async def test_rollouts_are_filtered_sorted_and_paged(store: LightningStore) -> None:
    made = [await store.enqueue_rollout(i) for i in range(4)]
    ids = [r.rollout_id for r in made]
    await store.dequeue_rollout()
    assert [r.rollout_id for r in await store.query_rollouts(status_in=["queuing"])] == ids[1:]
    assert [r.rollout_id for r in await store.query_rollouts(rollout_id_in=[ids[2], ids[0]])] in (
        [ids[0], ids[2]],
        [ids[2], ids[0]],
    )
    either = await store.query_rollouts(status_in=["preparing"], rollout_id_in=[ids[3]], filter_logic="or")
    assert [r.rollout_id for r in either] == [ids[0], ids[3]]
    assert (await store.query_rollouts(status_in=[])).total == 0
    assert (await store.query_rollouts(rollout_id_contains=ids[1][3:9])).total == 1
    page = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=2, offset=1)
    assert [r.rollout_id for r in page] == [ids[2], ids[1]]
    assert (page.total, page.limit, page.offset) == (4, 2, 1)
    by_id = await store.list_rollouts(sort_by="rollout_id")
    assert [r.rollout_id for r in by_id] == sorted(ids)


async def test_a_wrong_sort_or_page_is_refused_by_name(store: LightningStore) -> None:
    with pytest.raises(ValueError, match="allowed fields are: rollout_id"):
        await store.query_rollouts(sort_by="colour")
    with pytest.raises(ValueError, match="cannot be ordered"):
        await store.query_rollouts(sort_by="config")
    with pytest.raises(ValueError, match="Limit must be greater than 0"):
        await store.query_rollouts(limit=-2)
    with pytest.raises(ValueError, match="Offset"):
        await store.query_attempts("x", offset=-1)


async def test_attempts_are_listed_in_order(store: LightningStore) -> None:
    rollout = await store.start_rollout("x")
    await store.start_attempt(rollout.rollout_id)
    assert [a.sequence_id for a in await store.query_attempts(rollout.rollout_id)] == [1, 2]
    assert [a.sequence_id for a in await store.query_attempts(rollout.rollout_id, sort_order="desc")] == [2, 1]
    assert (await store.query_attempts("unknown")).total == 0
    assert await store.get_latest_attempt("unknown") is None


async def test_short_forms_end_rollouts(store: LightningStore) -> None:
    a, b = await store.start_rollout("a"), await store.start_rollout("b")
    assert (await store.finish_rollout(a.rollout_id, response={"x": 1})).status == "succeeded"
    attempt = await store.get_latest_attempt(a.rollout_id)
    assert attempt is not None
    assert attempt.metadata == {"response": {"x": 1}}
    assert (await store.fail_rollout(b.rollout_id, reason="because")).status == "failed"


async def test_statistics_count_what_is_there(store: LightningStore, span: Callable[..., Span]) -> None:
    rollout = await store.start_rollout("x", worker_id="w")
    await store.enqueue_rollout("y")
    await store.add_span(span(rollout))
    await store.add_resources({})
    counts = await store.statistics()
    names = ("total_rollouts", "total_attempts", "total_spans", "total_resources", "total_workers")
    assert [counts.get(name) for name in names] == [2, 1, 1, 1, 1]


async def _status(store: LightningStore, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def test_an_update_that_comes_again_late_changes_nothing_more(store: LightningStore) -> None:
    made = await store.enqueue_rollout(input=1)
    first = await store.dequeue_rollout()
    assert first is not None
    token = request_token.set("a-repeated-update")
    try:
        await store.update_rollout(made.rollout_id, status="requeuing")
        request_token.set(None)
        claimed = await store.dequeue_rollout()
        assert claimed is not None
        await store.update_attempt(made.rollout_id, "latest", metadata={"newer": True})
        request_token.set("a-repeated-update")
        again = await store.update_rollout(made.rollout_id, status="requeuing")
    finally:
        request_token.reset(token)
    assert again.status == "preparing"
    assert await store.dequeue_rollout() is None
