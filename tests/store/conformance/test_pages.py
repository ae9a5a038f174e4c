"""Pages of rollouts and records by cursor, on every store: each item once, in order, whatever is written meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.http import client
from agentlightning.types import EnqueueRolloutRequest, Rollout, RunRecord
from tests.store.parts import required

SORTED_BY = (None, "start_time", "end_time", "status", "mode", "rollout_id", "priority", "run_id", "not_before")


async def _fill(store: LightningStore) -> list[str]:
    """Add rollouts that are equal in much of what they may be sorted by; some of them have ended."""
    requests = [
        EnqueueRolloutRequest(
            input=number, mode=(None, "train", "val")[number % 3], priority=number % 2, run_id=("a", None)[number % 2],
            not_before=None if number % 4 else 1e9 + number,
        )
        for number in range(23)
    ]  # fmt: skip
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    for number, rollout_id in enumerate(ids):
        if number % 3:
            await store.update_rollout(rollout_id, status="cancelled" if number % 2 else "failed")
    return ids


def _ids(page: Sequence[Rollout]) -> list[str]:
    return [rollout.rollout_id for rollout in page]


@pytest.mark.parametrize("filters", [
    {}, {"status_in": ["failed", "queuing"]}, {"run_id": "a"}, {"rollout_id_contains": "a"},
    {"status_in": ["failed"], "rollout_id_contains": "1", "filter_logic": "or"},
], ids=str)  # fmt: skip
async def test_pages_by_cursor_are_the_whole_list_in_its_order(store: LightningStore, filters: dict[str, Any]) -> None:
    await _fill(store)
    for sort_by, order in itertools.product(SORTED_BY, ("asc", "desc")):
        query: dict[str, Any] = {**filters, "sort_by": sort_by, "sort_order": order}
        whole = await store.query_rollouts(**query)
        assert whole.cursor is None
        pages = [page async for page in pages_of(store.query_rollouts, **query, limit=4)]
        assert [rollout_id for page in pages for rollout_id in _ids(page)] == _ids(whole), query
        assert {page.total for page in pages} == {len(whole)}
        assert [page.cursor is None for page in pages] == [False] * (len(pages) - 1) + [True]
        if pages[0].cursor is not None:
            rest = await store.query_rollouts(**query, cursor=pages[0].cursor)
            assert _ids(rest) == _ids(whole)[4:], "without a limit it is all that is behind the cursor"


async def test_pages_of_chosen_ids_go_on_by_cursor(store: LightningStore) -> None:
    ids = (await _fill(store))[::-2]
    for sort_by in (None, "start_time", "status"):
        pages = [page async for page in pages_of(store.query_rollouts, rollout_id_in=ids, sort_by=sort_by, limit=5)]
        assert sorted(rollout_id for page in pages for rollout_id in _ids(page)) == sorted(ids)


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort_by", [None, "start_time", "rollout_id"])
async def test_nothing_is_lost_or_doubled_while_others_add_and_delete(
    store: LightningStore, sort_by: str | None, order: str
) -> None:
    ids = await _fill(store)
    deleted, read = {rollout_id for number, rollout_id in enumerate(ids) if number % 3}, list[str]()
    query: dict[str, Any] = {"sort_by": sort_by, "sort_order": order}
    async for page in pages_of(store.query_rollouts, **query, limit=4):
        read += _ids(page)
        await store.enqueue_rollout("meanwhile")
        await store.delete_rollouts(rollout_ids=[rollout_id for rollout_id in _ids(page) if rollout_id in deleted])
        if len(read) > 3 * len(ids):
            break  # what is added is read, too, in this order
    assert len(read) == len(set(read))
    assert set(ids) <= set(read)


async def test_a_whole_list_has_each_rollout_once_while_they_change(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list sorted by a field that changes: a rollout that ends moves to a page read before or read again."""
    monkeypatch.setattr(client, "CHUNK", 3)
    ids = await _fill(store)
    done = asyncio.Event()

    async def change() -> None:
        while not done.is_set():
            for rollout_id in ids[::3]:
                await store.update_rollout(rollout_id, status="failed")
                await store.update_rollout(rollout_id, status="queuing")

    changing = asyncio.create_task(change())
    try:
        for sort_by, order in (("end_time", "asc"), ("end_time", "desc"), ("status", "desc")):
            query: dict[str, Any] = {"sort_by": sort_by, "sort_order": order}
            rollouts = await store.query_rollouts(**query)
            assert sorted(_ids(rollouts)) == sorted(ids)
    finally:
        done.set()
        await changing


async def test_a_cursor_that_is_none_or_of_another_order_is_refused(store: LightningStore) -> None:
    await _fill(store)
    page = await store.query_rollouts(sort_by="start_time", limit=2)
    assert page.cursor is not None
    for wrong in ("", "x", "é", "WzEsMl0", page.cursor[:-3], "9" * 400):
        with pytest.raises(BadRequestError, match="is not a cursor of this store; use the cursor of an earlier page"):
            await store.query_rollouts(sort_by="start_time", limit=2, cursor=wrong)
    with pytest.raises(
        BadRequestError, match=r"sorted by 'start_time' 'asc', but this list is sorted by 'end_time' 'desc'"
    ):
        await store.query_rollouts(sort_by="end_time", sort_order="desc", limit=2, cursor=page.cursor)
    with pytest.raises(BadRequestError, match=r"Pass a cursor or an offset, not both; got offset=3"):
        await store.query_rollouts(sort_by="start_time", limit=2, offset=3, cursor=page.cursor)
    by_status = await store.query_rollouts(sort_by="status", limit=2)
    with pytest.raises(BadRequestError, match="Start again without a cursor"):
        await store.query_rollouts(limit=2, cursor=by_status.cursor)


# --- records of runs -------------------------------------------------------------------------------------------------


def _record(step: int, number: int) -> RunRecord:
    kind = ("step", "ledger", "alarm")[number]
    return RunRecord(kind=kind, step=step, name="" if number == 0 else f"name {number}", data={"of": step})


async def _add_records(store: LightningStore) -> None:
    await store.start_run("run")
    for step in (3, 1, 2, 5, 4):
        await store.add_run_records("run", [_record(step, number) for number in range(3)])


def _places(page: Sequence[RunRecord]) -> list[tuple[int, str]]:
    return [(record.step, record.name) for record in page]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("filters", [
    {}, {"kind_in": ["ledger"]}, {"kind_in": ["step", "alarm"]}, {"step_from": 2, "step_to": 4}, {"name": "name 2"},
    {"kind_in": ["ledger"], "step_from": 2, "name": "name 1"}, {"step_from": 9},
], ids=str)  # fmt: skip
async def test_pages_of_records_are_the_whole_list(store: LightningStore, filters: dict[str, Any], order: str) -> None:
    await _add_records(store)
    query: dict[str, Any] = {**filters, "sort_order": order}
    whole = await store.query_run_records("run", **query)
    assert whole.cursor is None
    for limit in (1, 2, 4, len(whole) or 1):
        pages = [page async for page in pages_of(store.query_run_records, run_id="run", **query, limit=limit)]
        assert [place for page in pages for place in _places(page)] == _places(whole)
        assert {page.total for page in pages} == {len(whole)}
        assert len(pages) == max(1, -(-len(whole) // limit)), "the last page says that it is the last"
    first = await store.query_run_records("run", **query, limit=2)
    if first.cursor is not None:
        assert _places(await store.query_run_records("run", **query, cursor=first.cursor)) == _places(whole)[2:]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_no_record_is_lost_or_doubled_while_a_run_goes_on_or_back(store: LightningStore, order: str) -> None:
    await _add_records(store)
    read, later = list[tuple[int, str]](), itertools.count(6)
    async for page in pages_of(store.query_run_records, run_id="run", sort_order=order, limit=2):
        read += _places(page)
        if len(read) == 2:
            await store.add_run_records("run", [_record(next(later), 0), _record(0, 0)])
        if len(read) == 6:
            await store.rewind_run("run", 4)
    assert len(read) == len(set(read))
    assert {(step, name) for step, name in read if 1 <= step <= 4} == {
        (step, record.name) for step in range(1, 5) for record in (_record(step, number) for number in range(3))
    }


async def test_a_wrong_cursor_of_records_is_refused(store: LightningStore) -> None:
    await _add_records(store)
    cursor = required((await store.query_run_records("run", limit=2)).cursor)
    with pytest.raises(BadRequestError, match=r"sorted by 'step' 'asc', but this list is sorted by 'step' 'desc'"):
        await store.query_run_records("run", limit=2, cursor=cursor, sort_order="desc")
    with pytest.raises(BadRequestError, match=r"Pass a cursor or an offset, not both; got offset=3"):
        await store.query_run_records("run", limit=2, offset=3, cursor=cursor)
    with pytest.raises(BadRequestError, match="is not a cursor of this store"):
        await store.query_run_records("run", limit=2, cursor="x")
