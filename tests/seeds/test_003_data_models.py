"""The manual's chapter on data models: its programs word for word."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.semconv import LightningResourceAttributes
from agentlightning.types import core
from tests.seeds.parts import traced
from tests.seeds.shown import Shown

CORE: dict[str, Any] = {"BaseModel": BaseModel, "List": list, "Dict": dict, "Any": Any, "Optional": Optional}


@pytest.mark.snippet(
    "003/attempted-rollout",
    differs="the program defines the class: `agl.AttemptedRollout` has one attempt, `query_attempts` returns all",
)
async def test_a_rollout_with_all_its_attempts(shown: Shown) -> None:
    made = shown_class(shown, Rollout=agl.Rollout, Attempt=agl.Attempt).AttemptedRollout
    store = agl.InMemoryLightningStore()
    started = await store.start_rollout("x")
    await store.start_attempt(started.rollout_id)
    rollout = await store.get_rollout_by_id(started.rollout_id)
    attempts = await store.query_attempts(started.rollout_id)
    both = made(rollout=rollout, attempts=list(attempts))
    assert [attempt.sequence_id for attempt in both.attempts] == [1, 2]


def shown_class(shown: Shown, **names: Any) -> Any:
    return shown.run(**CORE, **names)


@pytest.mark.snippet("003/otel-resource")
def test_the_resource_of_a_span(shown: Shown) -> None:
    check_fields(shown_class(shown, Attributes=agl.Attributes).OtelResource, agl.OtelResource)


@pytest.mark.snippet("003/span-core-fields")
def test_the_core_fields_of_a_span(shown: Shown) -> None:
    listed = shown_class(shown, Attributes=agl.Attributes, TraceStatus=agl.TraceStatus).SpanCoreFields
    check_fields(listed, agl.SpanCoreFields)


@pytest.mark.snippet("003/resources-update")
def test_an_update_of_resources(shown: Shown) -> None:
    listed = shown_class(shown).ResourcesUpdate
    assert set(listed.model_fields) == set(agl.ResourcesUpdate.model_fields) - {"run_id"}


def check_fields(listed: type[BaseModel], ours: type[BaseModel]) -> None:
    assert set(listed.model_fields) == set(ours.model_fields)


@pytest.mark.snippet("003/weave-resource")
def test_the_resource_of_a_span_of_weave(shown: Shown) -> None:
    ids: dict[str, Any] = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 3}
    made = shown.run(OtelResource=agl.OtelResource, LightningResourceAttributes=LightningResourceAttributes, **ids)
    assert list(made.resource.attributes.values()) == ["ro-1", "at-1", 3, "weave"]


@pytest.mark.snippet("003/operation-decorator")
async def test_a_function_as_an_operation(shown: Shown) -> None:
    function = (await shown.start(operation=agl.operation)).my_function
    assert await function() is None, "a plain call where nothing is traced"
    [span] = await traced(function)
    assert span.attributes["agentlightning.operation.name"] == "my_operation"


@pytest.mark.snippet("003/core-exports")
def test_the_types_that_core_exports(shown: Shown) -> None:
    names = shown.run().__all__
    assert set(names) <= set(core.__all__)
    everything: dict[str, object] = {}
    exec("from agentlightning.types.core import *", everything)
    for name in names:
        assert everything[name] is getattr(core, name) is getattr(agl, name), name


@pytest.mark.snippet("003/rollout-request")
async def test_a_request_by_the_name_of_its_task(shown: Shown) -> None:
    names = {name: getattr(agl, name) for name in ("EnqueueRolloutRequest", "RolloutConfig", "RolloutMode")}
    request = (await shown.start(**names)).request
    store = agl.InMemoryLightningStore()
    before = await store.enqueue_rollout("earlier", "val")
    [queued] = await store.enqueue_many_rollouts([request])
    assert (queued.input, queued.mode, queued.metadata) == ("task-001", "train", {"task_id": "task-001"})
    claims = [await store.dequeue_rollout(), await store.dequeue_rollout()]
    assert [claim and claim.rollout_id for claim in claims] == [queued.rollout_id, before.rollout_id]


@pytest.mark.snippet("003/filters")
async def test_filters_for_a_query(shown: Shown) -> None:
    names = {name: getattr(agl, name) for name in ("FilterOptions", "FilterField", "SortOptions")}
    filters = (await shown.start(**names)).filters
    store = agl.InMemoryLightningStore()
    for number in range(3):
        done = await store.start_rollout(number)
        await store.finish_rollout(done.rollout_id)
    await store.enqueue_rollout("y")
    for page in (await store.query_rollouts(**filters), await store.list_rollouts(filters)):
        assert [rollout.input for rollout in page] == [2, 1, 0]
        assert (page.offset, page.limit, page.total) == (0, 50, 3)
