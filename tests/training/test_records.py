"""A RunLog stores its records, whoever calls it and whether or not anybody waits, and lets no secret out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import BadRequestError
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.records import RunLog
from agentlightning.types.runs import RunRecord

SECRET = "correct-horse-battery"


@pytest.fixture
async def store() -> InMemoryLightningStore:
    store = InMemoryLightningStore()
    await store.start_run("r")
    return store


@pytest.fixture
async def log(store: InMemoryLightningStore) -> RunLog:
    return RunLog(store, "r")


async def test_each_kind_of_record_is_stored_under_its_step_and_name(log: RunLog) -> None:
    assert await log.step(1, {"mean_reward": 0.5}) == 1
    await log.evaluation(1, "held_out", {"rewards": [1.0]}, value=1.0)
    await log.alarm(1, "drift", "too many", count=3)
    await log.checkpoint(1, path="runs/1")
    await log.prompt(1, "system", {"text": "be kind"})
    await log.state(1, {"seen": [1, 2]})
    await log.ledger(1, [{"rollout_id": "ro-1", "calls": []}])
    keys = {(record.kind, record.step, record.name) for record in await log.records()}
    assert keys == {
        ("step", 1, ""), ("evaluation", 1, "held_out"), ("alarm", 1, "drift"), ("checkpoint", 1, ""),
        ("prompt", 1, "system"), ("state", 1, ""), ("ledger", 1, "ro-1"),
    }  # fmt: skip
    run = await log.run()
    assert run is not None
    assert run.best is not None
    assert (run.last_step, run.best.name, run.best.value) == (1, "held_out", 1.0)


async def test_a_record_that_is_there_stays_and_a_rewound_one_is_made_anew(log: RunLog) -> None:
    await log.step(1, {"loss": 1.0})
    assert await log.step(1, {"loss": 2.0}) == 0
    await log.state(2, {"at": 2})
    await log.state(3, {"at": 3})
    assert await log.rewind(2) == 1
    latest = await log.latest("state")
    assert latest is not None
    assert latest.data == {"at": 2}
    assert [record.data for record in await log.records("step")] == [{"loss": 1.0}]
    assert await log.latest("prompt") is None


@pytest.mark.parametrize("fails", [False, True])
async def test_records_that_nobody_waits_for_are_stored_in_their_order_however_the_run_ends(
    store: InMemoryLightningStore, log: RunLog, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    add = store.add_run_records

    async def add_later(*arguments: Any, **named: Any) -> int:
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        return await add(*arguments, **named)

    monkeypatch.setattr(store, "add_run_records", add_later)
    with contextlib.suppress(ZeroDivisionError):
        async with log.kept_alive():
            for name in "abc":
                log.alarm(1, name, "told")
            if fails:
                raise ZeroDivisionError
    assert [record.name for record in await log.records("alarm")] == ["a", "b", "c"]


async def test_a_record_that_cannot_be_stored_is_an_error_where_it_is_awaited_or_else_at_the_end() -> None:
    log = RunLog(InMemoryLightningStore(), "unknown")
    with pytest.raises(agl.NotFoundError):
        await log.step(1, {})
    await log.flush()  # that one was told
    log.step(2, {})
    with pytest.raises(agl.NotFoundError, match="unknown"):
        await log.flush()


def test_plain_threads_and_other_loops_write_through_the_loop_of_the_store() -> None:
    async def run() -> list[int]:
        store = InMemoryLightningStore()
        await store.start_run("r")
        log = RunLog(store, "r")

        def from_thread() -> None:
            log.step(1, {"loss": 1.0})

        async def from_other_loop() -> None:
            await log.step(2, {"loss": 2.0})
            assert await log.latest("step") is not None

        await asyncio.to_thread(from_thread)
        assert len(await log.records()) == 1  # it had returned only once the record was stored
        await asyncio.to_thread(lambda: asyncio.run(from_other_loop()))
        with pytest.raises(agl.NotFoundError):  # an error reaches the thread that wrote
            await asyncio.to_thread(lambda: RunLog(InMemoryLightningStore(), "unknown").step(1, {}))
        return [record.step for record in await log.records()]

    assert asyncio.run(run()) == [1, 2]


async def test_numbers_that_are_not_finite_are_null_and_values_of_numpy_are_numbers(log: RunLog) -> None:
    numpy = pytest.importorskip("numpy")
    await log.step(1, {"loss": math.nan, "norm": math.inf, "mean": numpy.float32(0.5), "all": numpy.arange(2)})
    [record] = await log.records()
    assert record.data == {"loss": None, "norm": None, "mean": 0.5, "all": [0, 1]}
    with pytest.raises(TypeError, match=r"data\.model is a object"):
        await log.step(2, {"model": object()})


async def test_no_secret_is_in_a_record(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", SECRET)
    await log.step(1, {"note": f"value {SECRET}", "headers": {"authorization": "Bearer other-secret-words"}})
    await log.alarm(1, "failed", f"login?token=other-secret-words failed with {SECRET}")
    rows = [{"row": 0, "tokens": {"dtype": "i32", "data": "/pass=="}}]  # which looks like a secret in a text
    await log.ledger(1, [{"rollout_id": "ro-1", "note": SECRET, "rows": rows}])
    records = await log.records()
    text = json.dumps([record.model_dump() for record in records])
    assert SECRET not in text
    assert "other-secret-words" not in text
    assert [record.data["rows"] for record in records if record.kind == "ledger"] == [rows], "to the letter"


async def test_large_records_go_in_several_calls(
    store: InMemoryLightningStore, log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    add = store.add_run_records

    async def counted(run_id: str, records: list[RunRecord]) -> int:
        calls.append(len(records))
        return await add(run_id, records)

    monkeypatch.setattr(store, "add_run_records", counted)
    entries: list[dict[str, Any]] = [{"rollout_id": f"ro-{i}", "rows": ["x" * 3_000_000]} for i in range(4)]
    assert await log.ledger(1, entries) == 4
    assert calls == [2, 2]


class NoRuns(agl.LightningStore):
    """A store of a user's own."""


async def test_a_store_without_runs_is_told_of_once_and_nothing_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = RunLog(NoRuns(), "r")
    assert await log.step(1, {"loss": 1.0}) == 0
    await log.best("loss", 1.0, 1)
    assert await log.latest("state") is None
    assert not log.keeps_records
    messages = [record.message for record in caplog.records]
    assert messages == ["NoRuns does not store runs; records of run r are discarded"]
    without = RunLog(None)
    await without.step(1, {})
    assert (await without.records(), await without.run()) == ([], None)


async def test_what_nobody_waits_for_is_bounded(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.training.records._MOST_PENDING", 3)
    for step in range(3):
        log.step(step, {})
    with pytest.raises(BadRequestError, match="Await each call"):
        log.step(3, {})
    await log.flush()
    assert len(await log.records()) == 3
