"""Rewards: what may be emitted, and how it is read back, whatever else a span carries."""

from __future__ import annotations

import sys
from typing import Any

import numpy
import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.emitter import (
    RewardTarget,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_target,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    operation,
    reward,
)
from agentlightning.errors import RewardError
from agentlightning.semconv import RewardPydanticModel
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Span
from agentlightning.utils.otel import make_link_attributes, make_tag_attributes


async def test_an_emitted_reward_is_a_span_of_the_trace(tracer: OtelTracer) -> None:
    emit_reward(0.5)
    (span,) = tracer.get_last_trace()
    assert span.name == "agentlightning.annotation"
    assert span.attributes == {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
    assert span.status.status_code == "OK"
    assert get_reward_value(span) == 0.5


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (True, 1.0), (numpy.float32(0.5), 0.5), (numpy.float64(0.5), 0.5), (numpy.array(2), 2.0)],
)
def test_every_kind_of_number_is_a_reward(value: Any, number: float) -> None:
    emitted = emit_reward(value, propagate=False).attributes["agentlightning.reward.0.value"]
    assert emitted == number
    assert type(emitted) is float


@pytest.mark.parametrize("value", [None, "1", [1.0], object(), numpy.array([1.0])])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="Reward must be a number, got: "):
        emit_reward(value, propagate=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": float("nan")}])
def test_a_reward_is_finite(value: Any) -> None:
    with pytest.raises(ValueError, match="Reward must be finite"):
        emit_reward(value, primary_key="a", propagate=False)


def test_several_dimensions_have_the_primary_one_first() -> None:
    span = emit_reward({"speed": 1, "quality": 0.5}, primary_key="quality", propagate=False)
    assert get_rewards_from_span(Span.from_core_fields(span)) == [
        RewardPydanticModel(name="quality", value=0.5),
        RewardPydanticModel(name="speed", value=1.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": {"a": 1.0}}, "primary_key must be provided"),
        ({"reward": {"a": 1.0}, "primary_key": "b"}, r"Primary key 'b' not found in reward dict keys: \['a'\]"),
        ({"reward": {"a": "x"}, "primary_key": "a"}, "Reward value must be a number, got: str for key a"),
        ({"reward": {"a": 1.0}, "primary_key": "a", "name": "n"}, "name= is for a scalar reward"),
        ({"reward": 1.0, "attributes": {"agentlightning.reward.1.name": "x"}}, "must not contain the reward key"),
        ({"reward": 1.0, "attributes": {"k": None}}, "Attribute value must be a string"),
        ({"reward": 1.0, "attributes": {5: "v"}}, "Only string keys can be flattened; got 5"),
        ({"reward": 1.0, "attributes": ["tag"]}, r"attributes must be a dict; got \['tag'\]"),
        ({"reward": 1.0, "name": 5}, "The name of a reward must be a string; got 5"),
        ({"reward": {5: 1.0}, "primary_key": 5}, "The name of a reward must be a string; got 5"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        emit_reward(**arguments, propagate=False)


def test_a_scalar_may_have_a_name_tags_and_links() -> None:
    attributes = {**make_tag_attributes(["fast"]), **make_link_attributes({"gen_ai.response.id": "c-7"})}
    span = emit_reward(1.0, name="judge", attributes=attributes, propagate=False)
    assert span.attributes["agentlightning.reward.0.name"] == "judge"
    assert span.attributes["agentlightning.tag.0"] == "fast"
    assert span.attributes["agentlightning.link.0.value_match"] == "c-7"


def test_outside_of_a_trace_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"No active tracer found\. Cannot emit annotation span") as caught:
        emit_reward(1.0)
    assert "trace_context" in str(caught.value)
    assert "propagate=False" in str(caught.value)


def test_a_bad_reward_is_refused_before_the_tracer_is_looked_up() -> None:
    with pytest.raises(TypeError, match="Reward must be a number"):
        emit_reward("x")  # type: ignore[arg-type] -- the mistake under test


@pytest.mark.parametrize(
    ("name", "attributes", "value"),
    [
        ("x", {}, None),
        ("any", {"agentlightning.reward.0.name": "p", "agentlightning.reward.0.value": 2}, 2.0),
        ("any", {"agentlightning.reward.0.name": "p", "agentlightning.reward.0.value": "0.5"}, 0.5),
        ("x", {"agentlightning.rewarder": "somebody else's"}, None),
        ("x", {"agentlightning.reward": 3.0}, None),
        ("x", {"agentlightning.reward.1.value": 3.0}, None),
        ("x", {"agentlightning.reward.0.value": 3.0}, None),
        ("x", {"agentops.task.output": '{"type": "reward", "value": 0.25}'}, 0.25),
        ("x", {"agentops.entity.output": '{"type": "reward", "value": null}'}, None),
        ("x", {"agentops.task.output": "[1, 2]"}, None),
        ("x", {"agentops.task.output": "not json"}, None),
        ("agentlightning.annotation", {"reward": 0.75}, 0.75),
        ("other", {"reward": 0.75}, None),
    ],
)
def test_readers_are_total(name: str, attributes: dict[str, Any], value: float | None) -> None:
    span = Span.from_attributes(attributes=attributes, name=name)
    assert get_reward_value(span) == value
    assert is_reward_span(span) is (value is not None)


def test_the_final_reward_is_the_last_one() -> None:
    spans = [
        Span.from_attributes(attributes={}),
        *(Span.from_core_fields(emit_reward(value, propagate=False)) for value in (0.1, 0.9)),
        Span.from_attributes(attributes={}),
    ]
    assert find_final_reward(spans) == 0.9
    assert find_reward_spans(spans) == spans[1:3]
    assert find_final_reward([]) is None


async def test_the_old_decorator_emits_what_is_returned(tracer: OtelTracer) -> None:
    with pytest.warns(DeprecationWarning, match="call emit_reward"):

        @reward
        async def score() -> float:
            return 0.5

    assert await score() == 0.5
    assert find_final_reward(tracer.get_last_trace()) == 0.5


def test_the_old_module_offers_the_same_names() -> None:
    import agentlightning.reward as module

    assert module.emit_reward is emit_reward
    assert module.reward is reward


def test_rewards_are_handed_on_as_a_list_of_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads: list[Any] = []
    module = sys.modules["agentlightning.emitter.reward"]  # the package has a function of that name
    monkeypatch.setattr(module, "emit_annotation", lambda payload, propagate: payloads.append((payload, propagate)))
    emit_reward(0.5, attributes={"k": 1}, propagate=False)
    assert payloads == [({"agentlightning.reward": [{"name": "primary", "value": 0.5}], "k": 1}, False)]


# --- targets -----------------------------------------------------------------------------------------------------


def test_a_reward_names_its_target_and_its_giver_beside_its_value() -> None:
    emitted = emit_reward(
        {"quality": 0.5, "speed": 1.0},
        primary_key="quality",
        target="agent",
        target_id="planner",
        source="judge",
        propagate=False,
    )
    span = Span.from_core_fields(emitted)
    assert get_reward_target(span) == RewardTarget("agent", "planner", "judge")
    assert get_reward_value(span) == 0.5
    assert [dimension.name for dimension in get_rewards_from_span(span)] == ["quality", "speed"]


def test_a_reward_that_names_nothing_says_so() -> None:
    span = Span.from_core_fields(emit_reward(0.5, propagate=False))
    assert get_reward_target(span) == RewardTarget(None, None, None)
    odd = {"agentlightning.reward.0.target": "universe", "agentlightning.reward.0.source": 3}
    assert get_reward_target(Span.from_attributes(attributes=odd)) == RewardTarget(None, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "universe"}, "target must be one of call, step, agent, rollout; got 'universe'"),
        ({"target": "call"}, r"target='call' needs target_id, the id of the model's reply"),
        ({"target": "agent"}, "target='agent' needs target_id, the name of the agent"),
        ({"target_id": "x"}, "target_id='x' requires target="),
        ({"target": "rollout", "target_id": "x"}, "requires target="),
        ({"target": "call", "target_id": 5}, "target_id must be a string; got 5"),
        ({"target": "agent", "target_id": 5}, "target_id must be a string; got 5"),
        ({"source": 5}, "source must be a string; got 5"),
    ],
)
def test_mistakes_in_the_target_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        emit_reward(1.0, propagate=False, **arguments)


async def test_a_reward_for_a_call_or_a_step_leads_adapters_to_it(tracer: OtelTracer) -> None:
    otel = tracer._tracer()

    def call(reply: str) -> None:
        tokens = {"prompt_token_ids": [1], "response_token_ids": [2], "gen_ai.response.id": reply}
        otel.start_span("openai.chat.completion", attributes=tokens).end()

    call("c-1")
    with operation(name="step"):
        call("c-2")
        emit_reward(0.25, target="step", source="checker")
    call("c-3")
    emit_reward(0.75, target="call", target_id="c-1")
    triplets = TracerTraceToTriplet().adapt(tracer.get_last_trace())
    assert {triplet.metadata["response_id"]: triplet.reward for triplet in triplets} == {
        "c-1": 0.75,
        "c-2": 0.25,
        "c-3": None,
    }
    step = next(span for span in tracer.get_last_trace() if span.name == "agentlightning.operation")
    targets = [get_reward_target(span) for span in find_reward_spans(tracer.get_last_trace())]
    assert targets == [RewardTarget("step", step.span_id, "checker"), RewardTarget("call", "c-1", None)]


def test_links_of_ones_own_go_before_that_of_the_target() -> None:
    attributes = make_link_attributes({"my.key": "mine"})
    span = emit_reward(1.0, target="call", target_id="c-1", attributes=attributes, propagate=False)
    assert span.attributes["agentlightning.link.0.key_match"] == "my.key"
    assert span.attributes["agentlightning.reward.0.target_id"] == "c-1"
