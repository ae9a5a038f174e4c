"""The records of runs in memory stay within their bound, and name the fields that were evicted."""

from __future__ import annotations

import pytest

from agentlightning.errors import BadRequestError, BusyError
from agentlightning.store import InMemoryLightningStore, store_from_spec
from agentlightning.types import RunRecord

ROWS = [{"row": 0, "tokens": {"dtype": "i32", "data": "x" * 20_000}}]


def ledger(step: int, **data: object) -> RunRecord:
    return RunRecord(kind="ledger", step=step, name=f"ro-{step}", data={"reward": 1.0, **data})


async def test_the_oldest_ledger_records_give_up_their_tokens_first_and_say_so() -> None:
    store = InMemoryLightningStore(max_record_bytes=200_000)
    await store.start_run("r")
    for step in range(1, 41):
        await store.add_run_records(
            "r", [RunRecord(kind="step", step=step, data={"reward": 0.5}), ledger(step, rows=ROWS)]
        )
    entries = await store.query_run_records("r", kind_in=["ledger"])
    evicted = [record.step for record in entries if "evicted" in record.data]
    assert evicted == list(range(1, len(evicted) + 1))
    assert 30 < len(evicted) < 40
    assert all(record.data == {"reward": 1.0, "evicted": True} for record in entries[: len(evicted)])
    assert all(record.data == {"reward": 1.0, "rows": ROWS} for record in entries[len(evicted) :])
    assert (await store.query_run_records("r", kind_in=["step"])).total == 40
    assert await store.add_run_records("r", [ledger(1, rows=ROWS)]) == 0  # it is known still


async def test_then_ledger_records_give_up_the_rest_and_other_records_never_do() -> None:
    store = InMemoryLightningStore(max_record_bytes=50_000)
    await store.start_run("r")
    for step in range(60):
        await store.add_run_records("r", [ledger(step, calls=["c" * 3000])])
    records = await store.query_run_records("r")
    assert (records.total, records[0].data, records[-1].data["reward"]) == (60, {"evicted": True}, 1.0)
    state = {"s": "s" * 3000}
    for step in range(10):
        await store.add_run_records("r", [RunRecord(kind="state", step=step, data=state)])
    with pytest.raises(BusyError, match=r"50000.*max_record_bytes"):
        await store.add_run_records("r", [RunRecord(kind="state", step=step, data=state) for step in range(10, 20)])
    assert [record.data for record in await store.query_run_records("r", kind_in=["state"])] == [state] * 10
    assert (await store.query_run_records("r", kind_in=["ledger"])).total == 60
    assert await store.delete_runs(["r"], force=True) == 1
    await store.start_run("s")
    await store.add_run_records("s", [RunRecord(kind="state", step=1, data={"s": "s" * 45_000})])
    with pytest.raises(BusyError):
        await store.add_run_records("s", [RunRecord(kind="state", step=n, data={"s": "s" * 45_000}) for n in (2, 3)])
    assert (await store.query_run_records("s")).total == 1


async def test_a_wrong_bound_is_refused_and_a_spec_may_say_it() -> None:
    with pytest.raises(BadRequestError, match="max_record_bytes must be at least 1; got 0"):
        InMemoryLightningStore(max_record_bytes=0)
    store = store_from_spec("memory?max_record_bytes=1000")
    await store.start_run("r")
    with pytest.raises(BusyError, match="1000"):
        await store.add_run_records("r", [RunRecord(kind="step", step=1, data={"x": "x" * 2000})])
