"""The wall clock is set back or ahead by hours: work is claimed in its order, the dead are noticed and nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from tests.store.conftest import Given
from tests.store.parts import required, until

HOURS = 5 * 3600.0
Jump = Callable[[float], None]


@pytest.fixture
def jump(given: Given) -> Jump:
    """Sets the clock of the store, as a machine's would be set."""
    engine: Any = given.engine
    timeline = engine._runtime._timeline
    true_clock: Callable[[], float] = timeline._wall_clock
    shift = [0.0]
    timeline._wall_clock = lambda: true_clock() + shift[0]

    def set_by(seconds: float) -> None:
        shift[0] += seconds

    return set_by


async def test_what_was_queued_before_the_clock_was_set_back_is_claimed_in_its_order(
    store: LightningStore, jump: Jump
) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, run_id="r") for n in range(3)])
    jump(-HOURS)
    await store.enqueue_rollout(3, run_id="r")
    later = await store.enqueue_rollout("later", run_id="r", not_before=time.time() - HOURS + 3600)
    claims = [await store.dequeue_rollout(worker_id="w", run_id="r") for _ in range(5)]
    assert [claim and claim.input for claim in claims] == [0, 1, 2, 3, None]
    waiting = required(await store.get_rollout_by_id(later.rollout_id))
    assert waiting.status == "queuing", "not_before is a promise by the wall clock"


async def test_a_worker_that_waits_is_woken_for_work_of_before_the_jump(store: LightningStore, jump: Jump) -> None:
    await store.enqueue_rollout("x", run_id="r")
    jump(-HOURS)
    required(await asyncio.wait_for(store.dequeue_rollout(worker_id="w", run_id="r", timeout=20), 15))


@pytest.mark.parametrize("seconds", [HOURS, -HOURS], ids=["ahead", "back"])
async def test_a_dead_worker_is_noticed_whatever_the_clock_does(
    store: LightningStore, jump: Jump, seconds: float
) -> None:
    await store.update_worker("w")
    started = await store.start_rollout("x", worker_id="w")
    jump(seconds)

    async def lost() -> bool:
        return (await _status(store, started))[1] == "unresponsive"

    await until(lost)


@pytest.mark.parametrize("limit", ["unresponsive_seconds", "timeout_seconds"])
@pytest.mark.parametrize("seconds", [HOURS, -HOURS], ids=["ahead", "back"])
async def test_a_limit_counts_seconds_that_have_passed(
    store: LightningStore, jump: Jump, seconds: float, limit: str
) -> None:
    short = await store.start_rollout("short", config=RolloutConfig.model_validate({limit: 0.3}))
    long = await store.start_rollout("long", config=RolloutConfig.model_validate({limit: 3600.0}))
    jump(seconds)

    async def lapsed() -> bool:
        return (await _status(store, short))[1] in ("unresponsive", "timeout")

    await until(lapsed)
    assert await _status(store, long) == ("preparing", "preparing")


async def test_a_worker_that_lives_keeps_its_claim_over_jumps(store: LightningStore, jump: Jump) -> None:
    await store.update_worker("w")
    started = await store.start_rollout("x", worker_id="w")
    for seconds in (HOURS, -2 * HOURS, HOURS):
        jump(seconds)
        await store.update_worker("w")
        await store.query_workers()
        assert await _status(store, started) == ("preparing", "preparing")


async def test_a_jump_is_logged_with_its_way_and_size(
    store: LightningStore, jump: Jump, caplog: pytest.LogCaptureFixture
) -> None:
    jump(-HOURS)
    await store.query_workers()
    jump(HOURS)
    await store.query_workers()
    messages = [record.getMessage() for record in caplog.records if "jumped" in record.getMessage()]
    assert [("back" in text, "ahead" in text) for text in messages] == [(True, False), (False, True)]


async def test_a_clock_set_back_while_no_server_ran_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = RolloutConfig(unresponsive_seconds=0.3)
    before = SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL")
    await before.enqueue_rollout("queued")
    started = await before.start_rollout("started", config=limited)
    await before.close()
    true_clock = time.time
    monkeypatch.setattr(time, "time", lambda: true_clock() - HOURS)
    after = SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL", scan_debounce_seconds=0.0)
    assert required(await after.dequeue_rollout(worker_id="w")).input == "queued"

    async def lapsed() -> bool:
        return (await _status(after, started))[1] == "unresponsive"

    await until(lapsed)
    await after.close()


async def _status(store: LightningStore, started: AttemptedRollout) -> tuple[str, str]:
    rollout = required(await store.get_rollout_by_id(started.rollout_id))
    attempt = next(a for a in await store.query_attempts(started.rollout_id) if a.sequence_id == 1)
    return rollout.status, attempt.status
