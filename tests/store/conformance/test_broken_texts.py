"""Half of a surrogate pair, which no file, database or wire can hold, is refused by name and changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.types import PromptTemplate
from tests.store.parts import span_of

BROKEN = "x\ud800y"

CALLS: dict[str, Callable[[LightningStore, str], Awaitable[Any]]] = {
    "enqueue_rollout(run_id)": lambda store, _: store.enqueue_rollout(1, run_id=BROKEN),
    "enqueue_rollout(resources_id)": lambda store, _: store.enqueue_rollout(1, resources_id=BROKEN),
    "start_rollout(worker_id)": lambda store, _: store.start_rollout(1, worker_id=BROKEN),
    "dequeue_rollout(worker_id)": lambda store, _: store.dequeue_rollout(worker_id=BROKEN),
    "dequeue_rollout(run_id)": lambda store, _: store.dequeue_rollout(run_id=BROKEN),
    "start_attempt(worker_id)": lambda store, rollout_id: store.start_attempt(rollout_id, worker_id=BROKEN),
    "get_rollout_by_id": lambda store, _: store.get_rollout_by_id(BROKEN),
    "get_worker_by_id": lambda store, _: store.get_worker_by_id(BROKEN),
    "get_resources_by_id": lambda store, _: store.get_resources_by_id(BROKEN),
    "query_rollouts(rollout_id_in)": lambda store, _: store.query_rollouts(rollout_id_in=[BROKEN]),
    "query_rollouts(rollout_id_contains)": lambda store, _: store.query_rollouts(rollout_id_contains=BROKEN),
    "query_spans": lambda store, _: store.query_spans(BROKEN),
    "wait_for_rollouts": lambda store, _: store.wait_for_rollouts(rollout_ids=[BROKEN], timeout=0),
    "delete_rollouts": lambda store, _: store.delete_rollouts(rollout_ids=[BROKEN]),
    "update_worker": lambda store, _: store.update_worker(BROKEN),
    "update_attempt(worker_id)": lambda store, rollout_id: store.update_attempt(rollout_id, "latest", worker_id=BROKEN),
    "update_attempt(outcome_reason)": lambda store, rollout_id: store.update_attempt(
        rollout_id, "latest", status="failed", outcome="infrastructure_fault", outcome_reason=BROKEN
    ),
    "update_resources(resources_id)": lambda store, _: store.update_resources(BROKEN, _prompt("x")),
    "add_resources(text)": lambda store, _: store.add_resources(_prompt(BROKEN)),
    "add_resources(name)": lambda store, _: store.add_resources({BROKEN: _prompt("x")["prompt"]}),
}


def _prompt(text: str) -> dict[str, Any]:
    return {"prompt": PromptTemplate(template=text, engine="f-string")}


@pytest.mark.parametrize("call", CALLS)
async def test_a_broken_text_is_refused_by_name(store: LightningStore, call: str) -> None:
    started = await store.start_rollout("task", worker_id="w")
    before = await store.get_rollout_by_id(started.rollout_id)
    with pytest.raises(ValueError, match=r"surrogate|not valid|can't encode") as refused:
        await CALLS[call](store, started.rollout_id)
    assert isinstance(refused.value, BadRequestError)
    assert await store.get_rollout_by_id(started.rollout_id) == before
    assert (await store.query_rollouts()).total == 1


@pytest.mark.parametrize("field", ["name", "attributes", "span_id"])
async def test_a_span_with_a_broken_text_leaves_its_neighbours_out_too(store: LightningStore, field: str) -> None:
    started = await store.start_rollout("task")
    broken = span_of(started).model_copy(update={field: {"key": BROKEN} if field == "attributes" else BROKEN})
    with pytest.raises(BadRequestError):
        await store.add_many_spans([span_of(started), broken])
    assert list(await store.query_spans(started.rollout_id)) == []
    assert len(await store.add_many_spans([span_of(started)])) == 1


async def test_a_broken_text_in_an_input_is_refused(store: LightningStore) -> None:
    for task in (BROKEN, {"deep": [BROKEN]}, {BROKEN: 1}):
        with pytest.raises((TypeError, ValueError)):
            await store.enqueue_rollout(task)
    assert (await store.query_rollouts()).total == 0
