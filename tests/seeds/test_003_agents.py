"""The manual's tutorial "Writing agents": its programs word for word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import emitter
from agentlightning.utils.otel import extract_links_from_attributes
from tests.seeds.parts import claimed, traced
from tests.seeds.shown import Shown

NAMES: dict[str, Any] = {
    name: getattr(agl, name) for name in ("OtelTracer", "LightningStoreClient", "OtelResource", "operation")
}


@pytest.mark.snippet("003/tracer-settings")
def test_a_tracer_for_one_attempt(shown: Shown) -> None:
    tracer = shown.run().tracer
    assert (tracer.rollout_id, tracer.attempt_id) == ("ro-001", "at-001")
    with pytest.raises(ValueError, match="accepts only rollout_id='ro-001'; got 'ro-002'"):
        tracer.open_rollout("ro-002")


@pytest.mark.snippet("003/trace-by-hand")
def test_rollouts_opened_and_closed_by_hand(shown: Shown) -> None:
    tracer = shown.run(after=["003/tracer-settings"]).tracer
    with tracer.lifespan():
        [span] = tracer.get_last_trace()
    assert (span.rollout_id, span.attempt_id, span.name) == ("ro-001", "at-001", "tool_execution")
    expected = {"user_id": "user-123", "attempt.sequence_id": 1, "tool": "web_search", "query": "onboarding summary"}
    assert span.attributes == expected


async def test_the_same_with_a_store() -> None:
    store = agl.InMemoryLightningStore()
    tracer = agl.OtelTracer(rollout_id=(await claimed(store))["rollout_id"], store_client=store)
    tracer.open_rollout(user_id="user-123")
    tracer.open_attempt(sequence_id=1)
    tracer.emit_span("tool_execution")
    tracer.close_attempt()
    tracer.close_rollout()
    assert [span.name for span in await store.traces.get_all()] == ["tool_execution"]


@pytest.mark.snippet("003/tool-span")
async def test_a_span_made_by_hand(shown: Shown) -> None:
    span = (await shown.start(**NAMES)).span
    assert isinstance(span.start_time, float)
    store = agl.InMemoryLightningStore()
    own = await claimed(store)
    await store.add_span(span.model_copy(update=own))
    [only_span] = await store.query_spans(own["rollout_id"])
    assert (only_span.sequence_id, only_span.attributes["tool"]) == (3, "web_search")


@pytest.mark.snippet("003/operation-module")
def test_a_module_called_as_the_decorator(shown: Shown) -> None:
    assert shown.run().operation is agl.operation is emitter.operation


@pytest.mark.snippet("003/classify-ticket")
async def test_an_operation_with_links_tags_and_a_reward(shown: Shown) -> None:
    llm = SimpleNamespace(classify=str.upper)
    function = (await shown.start(**NAMES, llm=llm, emit_reward=agl.emit_reward)).classify_ticket
    replies: list[str] = []
    reward, operation = await traced(lambda: replies.append(function("a ticket")))
    assert replies == ["A TICKET"]
    assert agl.find_final_reward([reward]) == 0.95
    assert reward.attributes["agentlightning.reward.0.name"] == "classification_accuracy"
    assert operation.attributes["agentlightning.operation.name"] == "classify_ticket"
    links = [(link.key_match, link.value_match) for link in extract_links_from_attributes(operation.attributes)]
    assert links == [("agentlightning.rollout_id", "ro-001"), ("agentlightning.attempt_id", "at-001")]


@pytest.mark.snippet("003/remote-store")
def test_a_store_elsewhere(shown: Shown) -> None:
    assert shown.run(**NAMES).store.server_address_root == "http://localhost:45993"


@pytest.mark.snippet("003/task-reward")
async def test_a_reward_with_its_name_and_attributes(shown: Shown) -> None:
    with pytest.raises(RuntimeError, match="Emit inside a rollout"):
        await shown.start()
    [span] = await traced(shown.start)
    assert agl.get_reward_value(span) == 0.85
    assert span.attributes["agentlightning.reward.0.name"] == "task_success"
    assert (span.attributes["task_id"], span.attributes["latency_ms"]) == ("classification", 150)
