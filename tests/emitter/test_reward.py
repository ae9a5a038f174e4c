"""Rewards: what may be emitted, and how it is read back, whatever else a span carries."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from agentlightning.emitter import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)
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
        ({"reward": {"a": 1.0}, "primary_key": "a", "name": "n"}, "name= labels a scalar reward"),
        ({"reward": 1.0, "attributes": {"agentlightning.reward.1.name": "x"}}, "must not hold the reward key"),
        ({"reward": 1.0, "attributes": {"k": None}}, "Attribute value must be a string"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
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
