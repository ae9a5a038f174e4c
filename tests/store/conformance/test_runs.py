"""Runs and their records, on every store: begun, ended, begun again, recorded once, paged, gone back, deleted."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from agentlightning.errors import BadRequestError, BusyError, ConflictError, NotFoundError, TooLargeError
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptError, BestFigure, RunRecord
from tests.store.conftest import Given
from tests.store.parts import required

ODD = ["", "a/b?c#d&e", "é 😀", "100%", "%2D", "search", "delete", "..", " ", "x\ny", "records", "A" * 512]
"""Ids that a path or a query language might trip over."""


def step(number: int, name: str = "", **data: Any) -> RunRecord:
    return RunRecord(kind="step", step=number, name=name, data=data)


def ledger(number: int, name: str, **data: Any) -> RunRecord:
    return RunRecord(kind="ledger", step=number, name=name, data=data)


def places(records: Any) -> list[tuple[int, str, str]]:
    return [(record.step, record.kind, record.name) for record in records]


async def test_a_run_begins_ends_and_begins_again(store: LightningStore) -> None:
    made = await store.start_run("r", algorithm="GRPO", config={"lr": 1e-4}, versions={"python": "3.12"})
    assert (made.run_id, made.state, made.starts, made.algorithm) == ("r", "running", 1, "GRPO")
    assert made.end_time is None
    assert made.last_heartbeat_time is not None
    error = AttemptError(type="ValueError", message="é", traceback="...")
    await store.update_run("r", best=BestFigure(name="reward", value=0.5, step=3), stop_reason="enough")
    ended = await store.update_run("r", state="failed", error=error, metadata={"k": [1]})
    assert ended.end_time is not None
    assert (ended.error, ended.stop_reason, ended.metadata) == (error, "enough", {"k": [1]})
    again = await store.start_run("r", config={"lr": 1e-5})
    assert (again.state, again.starts, again.end_time, again.error) == ("running", 2, None, None)
    assert (again.stop_reason, again.stop_time) == (None, None)
    assert (again.algorithm, again.config, again.start_time) == ("GRPO", {"lr": 1e-5}, made.start_time)
    assert again.best == BestFigure(name="reward", value=0.5, step=3)
    assert await store.get_run_by_id("r") == again
    assert await store.get_run_by_id("other") is None


async def test_the_best_figure_only_gets_better(store: LightningStore) -> None:
    await store.start_run("r")
    for value, best in ((0.5, 0.5), (0.4, 0.5), (0.6, 0.6)):
        run = await store.update_run("r", best=BestFigure(name="reward", value=value, step=1))
        assert run.best is not None
        assert run.best.value == best
    run = await store.update_run("r", best=BestFigure(name="held_out", value=0.1, step=2))
    assert run.best == BestFigure(name="held_out", value=0.1, step=2)
    assert (await store.update_run("r", best=None)).best is None


async def test_a_stop_note_may_come_before_the_run_and_each_has_its_own_stamp(store: LightningStore) -> None:
    with pytest.raises(NotFoundError, match="start_run"):
        await store.update_run("r", heartbeat=True)
    stamps: list[float] = []
    for _ in range(5):
        noted = await store.update_run("r", stop_reason="the same words")
        assert (noted.algorithm, noted.starts) == (None, 0)
        assert noted.stop_time is not None
        stamps.append(noted.stop_time)
    assert sorted(set(stamps)) == stamps
    assert (await store.update_run("r", stop_reason=None)).stop_time is None


async def test_a_heartbeat_is_the_sign_of_life_and_a_stop_note_is_none(store: LightningStore) -> None:
    begun = await store.start_run("r")
    noted = await store.update_run("r", stop_reason="x")
    assert noted.last_heartbeat_time == begun.last_heartbeat_time
    await asyncio.sleep(0.01)
    alive = await store.update_run("r", heartbeat=True)
    assert alive.last_heartbeat_time > begun.last_heartbeat_time  # type: ignore[operator]
    await asyncio.sleep(0.01)
    await store.add_run_records("r", [step(1)])
    run = required(await store.get_run_by_id("r"))
    assert run.last_heartbeat_time > alive.last_heartbeat_time  # type: ignore[operator]


async def test_runs_are_listed_filtered_and_sorted(store: LightningStore) -> None:
    for name in ("one", "two", "three"):
        await store.start_run(name, algorithm="APO" if name == "two" else "GRPO")
    await store.update_run("one", state="succeeded")
    assert [run.run_id for run in await store.query_runs()] == ["one", "two", "three"]
    assert [run.run_id for run in await store.query_runs(state_in=["succeeded", "failed"])] == ["one"]
    assert [run.run_id for run in await store.query_runs(algorithm="GRPO", run_id_contains="e")] == ["one", "three"]
    page = await store.query_runs(sort_order="desc", limit=1, offset=1)
    assert ([run.run_id for run in page], page.total) == (["two"], 3)
    with pytest.raises(BadRequestError, match="sort_by"):
        await store.query_runs(sort_by="config")


async def test_a_record_comes_once_however_often_it_is_sent(store: LightningStore) -> None:
    await store.start_run("r")
    first = [step(1, reward=0.5), ledger(1, "ro-1", calls=[1]), ledger(1, "ro-2")]
    assert await store.add_run_records("r", first) == 3
    changed = [step(1, reward=9.0), ledger(1, "ro-1"), ledger(2, "ro-1"), ledger(2, "ro-1", again=True)]
    assert await store.add_run_records("r", changed) == 1
    records = await store.query_run_records("r")
    assert places(records) == [(1, "step", ""), (1, "ledger", "ro-1"), (1, "ledger", "ro-2"), (2, "ledger", "ro-1")]
    assert [record.data for record in records] == [{"reward": 0.5}, {"calls": [1]}, {}, {}]
    assert all(record.time is not None for record in records)
    assert required(await store.get_run_by_id("r")).last_step == 1
    with pytest.raises(NotFoundError, match="'nobody'"):
        await store.add_run_records("nobody", first)
    assert (await store.query_run_records("nobody")).total == 0


async def test_a_record_that_many_send_at_once_is_stored_once(given: Given) -> None:
    stores = [given.store, given.engine]
    await given.store.start_run("r")
    batches = [[step(n), *(ledger(n, f"ro-{k}", who=who) for k in range(4))] for n in range(6) for who in range(4)]
    added = await asyncio.gather(
        *(stores[number % 2].add_run_records("r", batch) for number, batch in enumerate(batches))
    )
    assert sum(added) == 6 * 5
    records = await given.store.query_run_records("r")
    assert len(set(places(records))) == len(records) == 30
    page = await given.store.query_events(after="0")
    assert [(event.run_id, event.records) for event in page.runs] == [("r", {"step": 6, "ledger": 24})]


async def test_pages_are_cut_by_kind_step_and_name_from_either_end(store: LightningStore) -> None:
    await store.start_run("r")
    for number in (3, 1, 2):  # they need not come in order
        await store.add_run_records("r", [step(number), ledger(number, "b"), ledger(number, "a")])
    whole = places(await store.query_run_records("r"))
    in_step = [(1, "step", ""), (1, "ledger", "b"), (1, "ledger", "a")]
    assert whole == [(number, kind, name) for number in (1, 2, 3) for _, kind, name in in_step]
    for offset in range(11):
        for limit in (0, 1, 4, 20, -1):
            end = None if limit == -1 else offset + limit
            page = await store.query_run_records("r", limit=limit, offset=offset)
            assert (places(page), page.total) == (whole[offset:end], 9)
            page = await store.query_run_records("r", limit=limit, offset=offset, sort_order="desc")
            assert (places(page), page.total) == (whole[::-1][offset:end], 9)
    for filters, expected in (
        ({"kind_in": ["step"]}, [p for p in whole if p[1] == "step"]),
        ({"kind_in": ["step", "ledger", "step"], "step_from": 2}, whole[3:]),
        ({"kind_in": []}, []),
        ({"step_from": 2, "step_to": 2}, whole[3:6]),
        ({"step_from": 3, "step_to": 2}, []),
        ({"name": "a"}, [p for p in whole if p[2] == "a"]),
        ({"name": "a", "kind_in": ["step", "alarm"]}, []),
        ({"name": "a", "kind_in": ["ledger"], "step_to": 1}, [(1, "ledger", "a")]),
    ):
        assert places(await store.query_run_records("r", **filters)) == expected, filters
    with pytest.raises(BadRequestError, match="evaluation"):
        await store.query_run_records("r", kind_in=["loss"])  # type: ignore[list-item]


async def test_what_no_json_has_becomes_null_and_what_is_no_record_is_refused(store: LightningStore) -> None:
    await store.start_run("r")
    odd = {"nan": math.nan, "inf": [math.inf, {"x": -math.inf}], "null \0 in": "a\0b 😀", "none": None}
    await store.add_run_records("r", [step(1, **odd)])
    assert (await store.query_run_records("r"))[0].data == {
        **odd, "nan": None, "inf": [None, {"x": None}]
    }  # fmt: skip
    for wrong in ({"kind": "loss", "step": 1}, {"kind": "step", "step": -1}, {"kind": "step", "step": 1, "x": 1}):
        with pytest.raises(BadRequestError):
            await store.add_run_records("r", [step(2), wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="value is a object"):
        await store.add_run_records("r", [step(2, value=object())])
    for name in ("a\0b", "n" * 513):
        with pytest.raises(BadRequestError, match="name has at most 512"):
            await store.add_run_records("r", [step(2), ledger(2, name)])
    assert (await store.query_run_records("r")).total == 1  # all or none


@pytest.mark.heavy
async def test_a_large_record_is_stored_whole_and_a_larger_one_refused(store: LightningStore) -> None:
    await store.start_run("r")
    large = "x" * int(7.9 * 2**20)
    await store.add_run_records("r", [ledger(1, "large", text=large), step(1)])
    await store.add_run_records("r", [ledger(2, "large", text=large)])
    with pytest.raises(BadRequestError, match=r"takes \d+ bytes of JSON; at most 8388608 \(8 MiB\)"):
        await store.add_run_records("r", [ledger(3, "too large", text=large + large[: 2**18])])
    page = await store.query_run_records("r", kind_in=["ledger"], limit=10)
    assert (len(page), page.total) == (2, 2)
    assert page[0].data == {"text": large}
    await store.add_run_records("r", [ledger(3, "large", text=large)])
    page = await store.query_run_records("r", kind_in=["ledger"], limit=10)
    assert (len(page), page.total) == (2, 3)  # it ends early
    assert len(await store.query_run_records("r", kind_in=["ledger"])) == 3


async def test_a_rewound_run_has_no_records_after_the_step(store: LightningStore) -> None:
    await store.start_run("r")
    await store.start_run("other")
    for run_id in ("r", "other"):
        await store.add_run_records(run_id, [r for n in range(1, 6) for r in (step(n), ledger(n, "x", n=n))])
    assert await store.rewind_run("r", 3) == 4
    assert await store.rewind_run("r", 3) == 0
    assert places(await store.query_run_records("r")) == [
        (n, k, m) for n in (1, 2, 3) for k, m in (("step", ""), ("ledger", "x"))
    ]
    run = required(await store.get_run_by_id("r"))
    assert run.last_step == 3
    assert await store.add_run_records("r", [step(4), ledger(4, "x", n="again")]) == 2
    assert (await store.query_run_records("r"))[-1].data == {"n": "again"}
    assert (await store.query_run_records("other")).total == 10
    assert await store.rewind_run("r", 0) == 8
    run = required(await store.get_run_by_id("r"))
    assert run.last_step is None
    with pytest.raises(NotFoundError):
        await store.rewind_run("nobody", 1)
    with pytest.raises(BadRequestError, match="step must be 0 or more"):
        await store.rewind_run("r", -1)


@pytest.mark.heavy
async def test_pages_stay_right_while_a_run_is_rewound_and_written(store: LightningStore) -> None:
    await store.start_run("r")
    await store.add_run_records("r", [step(n) for n in range(1, 41)])

    async def write() -> None:
        for _ in range(5):
            await store.rewind_run("r", 20)
            await store.add_run_records("r", [step(n) for n in range(21, 41)])

    async def look() -> None:
        for offset in (0, 10, 30):
            for _ in range(4):
                page = await store.query_run_records("r", limit=10, offset=offset)
                assert 20 <= page.total <= 40
                steps = [record.step for record in page]
                assert steps == list(range(offset + 1, offset + 1 + len(steps)))

    await asyncio.gather(write(), look(), look())
    assert (await store.query_run_records("r")).total == 40


async def test_a_run_goes_with_its_records_and_without_its_rollouts(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("x", run_id="r")
    for run_id in ("r", "s", "t"):
        await store.start_run(run_id)
        await store.add_run_records(run_id, [step(1)])
    await store.update_run("r", state="stopped")
    with pytest.raises(ConflictError, match="'s' is running"):
        await store.delete_runs(["r", "s"])
    assert (await store.query_runs()).total == 3
    assert await store.delete_runs(["r", "unknown"]) == 1
    assert await store.delete_runs(["s"], force=True) == 1
    assert [run.run_id for run in await store.query_runs()] == ["t"]
    assert (await store.query_run_records("r")).total == 0
    assert (await store.query_run_records("t")).total == 1
    assert await store.get_rollout_by_id(rollout.rollout_id) is not None
    assert (await store.start_run("r")).starts == 1
    assert (await store.query_run_records("r")).total == 0


async def test_a_run_that_is_deleted_while_it_is_written_leaves_nothing(store: LightningStore) -> None:
    await store.start_run("r")

    async def write(first: int) -> None:
        for number in range(first, first + 8):
            try:
                await store.add_run_records("r", [step(number), ledger(number, "x")])
            except (NotFoundError, BusyError):
                return

    async def delete() -> None:
        await asyncio.sleep(0.01)
        assert await store.delete_runs(["r"], force=True) == 1

    await asyncio.gather(write(0), write(100), write(200), delete())
    assert (await store.query_run_records("r")).total == 0
    await store.start_run("r")
    assert (await store.query_run_records("r")).total == 0


async def test_runs_may_have_odd_names_and_are_kept_apart(store: LightningStore) -> None:
    for run_id in ODD:
        assert (await store.start_run(run_id)).run_id == run_id
        await store.update_run(run_id, metadata={"name": run_id})
        assert await store.add_run_records(run_id, [ledger(1, run_id)]) == 1
    for run_id in ODD:
        assert places(await store.query_run_records(run_id, name=run_id)) == [(1, "ledger", run_id)]
        assert await store.rewind_run(run_id, 0) == 1
        stored_run = required(await store.get_run_by_id(run_id))
        assert (stored_run.run_id, stored_run.metadata) == (run_id, {"name": run_id})
    assert [run.run_id for run in await store.query_runs(sort_by=None)] == ODD
    assert await store.delete_runs(ODD, force=True) == len(ODD)


async def test_names_that_cannot_be_used_are_refused_with_the_reason(store: LightningStore) -> None:
    for run_id in ("-", cast(str, None), f"{CONTROL_PREFIX}run:x", "a\0b", "A" * 513, "A" * 65536):
        with pytest.raises((BadRequestError, TooLargeError), match=r"512|URL"):
            await store.start_run(run_id)
    assert (await store.query_runs()).total == 0


async def test_a_vocabulary_is_stored_once(store: LightningStore) -> None:
    assert await store.get_vocabulary("v") is None
    tokens = ["<pad>", "Ġthe", "\\x00", "é", "😀", '"', ""]
    assert await store.add_vocabulary("v", tokens) is True
    assert await store.add_vocabulary("v", ["other"]) is False
    assert await store.get_vocabulary("v") == tokens
    with pytest.raises(BadRequestError, match="8 MiB"):
        await store.add_vocabulary("large", ["x" * 2**20] * 9)
    with pytest.raises(BadRequestError, match="list"):
        await store.add_vocabulary("text", "abc")


async def test_changes_of_runs_are_told_in_the_feed_and_waited_for(store: LightningStore) -> None:
    begin = (await store.query_events()).cursor
    await store.start_run("r")
    await store.add_run_records("r", [step(1), ledger(1, "a")])
    rollout = await store.enqueue_rollout("x", run_id="r")
    await store.start_run("s")
    page = await store.query_events(after=begin, limit=10)
    assert [event.rollout_id for event in page.events] == [rollout.rollout_id]
    assert [(run.run_id, run.state, run.last_step, run.records) for run in page.runs] == [
        ("r", "running", 1, {"step": 1, "ledger": 1}),
        ("s", "running", None, {}),
    ]
    ids: list[str] = []
    cursor = begin
    while True:  # one at a time, none is lost
        small = await store.query_events(after=cursor, limit=1)
        ids += [event.rollout_id for event in small.events] + [run.run_id for run in small.runs]
        if small.cursor == cursor:
            break
        cursor = small.cursor
    assert sorted(ids) == sorted(["r", "s", rollout.rollout_id])
    assert (await store.query_events(after=begin, run_id="s")).runs[0].run_id == "s"
    assert (await store.query_events(after=page.cursor)).runs == []
    waiting = asyncio.create_task(store.query_events(after=page.cursor, timeout=5.0))
    await asyncio.sleep(0.05)
    await store.update_run("s", stop_reason="enough")
    woken = await asyncio.wait_for(waiting, 5.0)
    assert [(run.run_id, run.stop_reason) for run in woken.runs] == [("s", "enough")]
