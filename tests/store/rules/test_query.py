"""The rules of lists, the same for everything that is listed: order, pages, filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.errors import BadRequestError
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.http.client import CHUNK
from agentlightning.store.rules.query import sortable_fields
from agentlightning.types import (
    Attempt,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    Span,
    Worker,
)
from tests.store.conftest import Serve
from tests.store.parts import span_of


async def filled(store: LightningStore) -> dict[str, Any]:
    """Store a few of each kind, with empty fields; return how to list each kind."""
    await store.add_resources({})
    await store.update_resources("mine", {}, run_id="r")
    started = await store.start_rollout("a", mode="train", worker_id="")
    await store.start_attempt(started.rollout_id, "w")
    await store.start_attempt(started.rollout_id)
    await store.enqueue_rollout("b", not_before=1.0, priority=-1, run_id="r")
    await store.enqueue_rollout("c", mode="val", resources_id="odd")
    await store.update_worker("w2")
    spans = [span_of(started, name) for name in ("", "b", "a")]
    spans[0].kind, spans[1].flags, spans[2].parent_id, spans[1].start_time = "CLIENT", 1, "p", 5.0
    await store.add_many_spans(spans)
    return {
        "Rollout": store.query_rollouts,
        "Worker": store.query_workers,
        "ResourcesUpdate": store.query_resources,
        "Attempt": lambda **page: store.query_attempts(started.rollout_id, **page),
        "Span": lambda **page: store.query_spans(started.rollout_id, **page),
    }


MODELS: tuple[type[BaseModel], ...] = (Rollout, Attempt, Worker, ResourcesUpdate, Span)


async def test_every_field_that_has_an_order_can_be_sorted_by(store: LightningStore) -> None:
    lists = await filled(store)
    for model in MODELS:
        for name in sortable_fields(model):
            up = [getattr(item, name) for item in await lists[model.__name__](sort_by=name)]
            down = [getattr(item, name) for item in await lists[model.__name__](sort_by=name, sort_order="desc")]
            assert len(up) == len(down) > 1
            values = [value for value in up if value is not None]
            assert values == sorted(values), (model, name)
            assert [value for value in down if value is not None] == values[::-1]
            holes = [None] * (len(up) - len(values))
            null_is_last = name.endswith("_time")
            assert up == (values + holes if null_is_last else holes + values), (model, name)
            assert down == (holes + values[::-1] if null_is_last else values[::-1] + holes), (model, name)


async def test_a_list_cannot_be_sorted_by_anything_else(store: LightningStore) -> None:
    lists = await filled(store)
    for model in MODELS:
        for name in (set(model.model_fields) - set(sortable_fields(model))) | {"attempt", "colour", ""}:
            expected = rf"Failed to sort items by '{name}'.*allowed fields are: {', '.join(sortable_fields(model))}$"
            with pytest.raises(BadRequestError, match=expected):
                await lists[model.__name__](sort_by=name, limit=1)


async def test_pages_have_the_same_rules_in_every_list(store: LightningStore) -> None:
    for listed in (await filled(store)).values():
        everything = await listed()
        total = everything.total
        assert (len(everything), everything.limit, everything.offset) == (total, -1, 0)
        assert (len(await listed(limit=2, offset=1)), (await listed(limit=2)).total) == (min(2, total - 1), total)
        for page in (await listed(limit=0), await listed(offset=99, limit=5), await listed(offset=99)):
            assert (len(page), page.total) == (0, total)
        assert len(await listed(limit=10**9)) == total
        for wrong in ({"limit": -2}, {"offset": -1}, {"sort_order": "up"}, {"sort_by": "colour"}):
            with pytest.raises(ValueError, match=r"Limit|Offset|sort"):
                await listed(**wrong)


async def test_ties_keep_the_order_in_which_things_came(store: LightningStore) -> None:
    ids = [(await store.enqueue_rollout(i)).rollout_id for i in range(4)]
    for order in ("asc", "desc"):
        page = await store.query_rollouts(sort_by="status", sort_order=order)  # type: ignore[arg-type]
        assert [row.rollout_id for row in page] == ids
    started = await store.start_rollout("x")
    spans = [span_of(started, str(i), 7) for i in range(3)]
    await store.add_many_spans(spans)
    assert [span.name for span in await store.query_spans(started.rollout_id)] == ["0", "1", "2"]


FILTERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "exact": ({"name": "b"}, ["b"]),
    "part": ({"name_contains": "lph"}, ["alpha", "alphabet"]),
    "part, other case": ({"name_contains": "LPH"}, []),
    "part of nothing": ({"parent_id_contains": "p"}, ["b"]),
    "both": ({"name_contains": "alpha", "trace_id": "1" * 32}, ["alpha"]),
    "either": ({"name": "b", "trace_id": "1" * 32, "filter_logic": "or"}, ["alpha", "b"]),
    "either of none": ({"filter_logic": "or"}, ["alpha", "alphabet", "b"]),
    "span": ({"span_id": "2" * 16}, ["alphabet"]),
    "part of a span id": ({"span_id_contains": "22"}, ["alphabet"]),
    "part of a trace id": ({"trace_id_contains": "33"}, ["b"]),
    "percent is no wildcard": ({"name_contains": "%"}, []),
    "dot is no wildcard": ({"name_contains": "al.ha"}, []),
    "empty part": ({"name_contains": ""}, ["alpha", "alphabet", "b"]),
}


@pytest.mark.parametrize("case", FILTERS)
async def test_spans_are_filtered_by_the_same_rules_everywhere(store: LightningStore, case: str) -> None:
    started = await store.start_rollout("x")
    for number, name in enumerate(("alpha", "alphabet", "b"), start=1):
        ids = {"trace_id": str(number) * 32, "span_id": str(number) * 16}
        await store.add_span(span_of(started, name, parent_id="p" * 16 if name == "b" else None, **ids))
    arguments, names = FILTERS[case]
    assert [span.name for span in await store.query_spans(started.rollout_id, **arguments)] == names


async def test_the_attempts_scope_holds_whatever_the_filters_say(store: LightningStore) -> None:
    first = await store.start_rollout("x")
    await store.add_span(span_of(first, "old"))
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(span_of(second, "new"))
    either = {"name": "old", "name_contains": "e", "filter_logic": "or"}
    assert [s.name for s in await store.query_spans(first.rollout_id, "latest", **either)] == ["new"]  # type: ignore[arg-type]
    assert (await store.query_spans(first.rollout_id)).total == 2


WRONG_FILTERS: dict[str, Callable[[LightningStore], Any]] = {
    "rollout status": lambda store: store.query_rollouts(status_in=["done"]),  # type: ignore[list-item]
    "one word": lambda store: store.query_rollouts(status_in="failed"),  # type: ignore[arg-type]
    "one id": lambda store: store.query_rollouts(rollout_id_in="ro-1"),
    "worker status": lambda store: store.query_workers(status_in=["gone"]),  # type: ignore[list-item]
    "rollouts' logic": lambda store: store.query_rollouts(filter_logic="xor"),  # type: ignore[arg-type]
    "workers' logic": lambda store: store.query_workers(filter_logic="xor"),  # type: ignore[arg-type]
    "spans' logic": lambda store: store.query_spans("ro-1", filter_logic="xor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG_FILTERS)
async def test_a_wrong_filter_is_refused_and_not_taken_for_no_match(store: LightningStore, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Input should be|must be a list"):
        await WRONG_FILTERS[wrong](store)


async def test_an_empty_list_of_choices_matches_nothing(store: LightningStore) -> None:
    await store.enqueue_rollout("x")
    await store.update_worker("w")
    assert (await store.query_rollouts(status_in=[])).total == 0
    assert (await store.query_rollouts(rollout_id_in=[])).total == 0
    assert (await store.query_workers(status_in=[])).total == 0


async def test_the_old_names_of_filters_work_and_warn(store: LightningStore) -> None:
    made = [await store.enqueue_rollout(i) for i in range(2)]
    await store.update_rollout(made[0].rollout_id, status="cancelled")
    with pytest.warns(DeprecationWarning, match="status is deprecated; use status_in instead"):
        assert (await store.query_rollouts(status=["cancelled"])).total == 1
    with pytest.warns(DeprecationWarning, match="rollout_ids is deprecated; use rollout_id_in instead"):
        assert (await store.query_rollouts(rollout_ids=[made[1].rollout_id])).total == 1
    with pytest.warns(DeprecationWarning, match="status is deprecated"):
        assert (await store.query_rollouts(status=["cancelled"], status_in=["queuing"]))[0].input == 1


async def test_resources_are_filtered_by_both_texts(store: LightningStore) -> None:
    for name in ("one", "one more", "two"):
        await store.update_resources(name, {})
    assert [u.resources_id for u in await store.query_resources(resources_id_contains="one")] == ["one", "one more"]
    assert [u.resources_id for u in await store.query_resources(resources_id="one")] == ["one"]
    assert (await store.query_resources(resources_id="one", resources_id_contains="two")).total == 0
    await store.update_resources("one", {})
    assert [u.version for u in await store.query_resources()] == [2, 1, 1]


async def test_a_list_without_a_limit_comes_whole_however_long(serve: Serve) -> None:
    server, client = await serve()
    count = 2 * CHUNK + 1
    await server.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(count)])
    page = await client.query_rollouts()
    assert [row.input for row in page] == list(range(count))
    assert (page.total, page.limit, page.offset) == (count, -1, 0)
    tail = await client.query_rollouts(offset=CHUNK + 1, sort_by="start_time", sort_order="desc")
    assert (len(tail), tail.offset) == (CHUNK, CHUNK + 1)


async def test_a_status_of_other_words_is_refused_with_the_right_one() -> None:
    store: Any = InMemoryLightningStore()
    with pytest.raises(BadRequestError, match=r"'done'; expected any of queuing, .*; use 'succeeded'$"):
        await store.query_rollouts(status_in=["done"])
