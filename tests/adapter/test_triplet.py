"""Triplets beyond the worked examples: two recordings of one call, links, scopes, and excluded calls with reasons."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.adapter import (
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToTripletBase,
    TraceTree,
)
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.recording.spans import spans_of
from agentlightning.types import Span, Triplet
from tests.adapter.span_maker import chat, gateway_call, reward, span, with_attributes

SESSION = span("S", "run.session", None, 0, 20)


def rewards(triplets: list[Triplet]) -> dict[str, float | None]:
    return {triplet.metadata["response_id"]: triplet.reward for triplet in triplets}


def kinds(reading: Any) -> list[tuple[str, str]]:
    return [(problem.kind, problem.span_id) for problem in reading.problems]


# --- the gateway's record ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_what_the_gateway_writes_is_read_back_exactly(adapter: TraceToTripletBase) -> None:
    call = GatewayCall("ro", "at", 4, request={"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    message = {"role": "assistant", "content": "don't"}
    choices = [{"index": 0, "message": message, "finish_reason": "length", "token_ids": [7, 8]}]
    call.answered(
        {"id": "chatcmpl-1", "model": "m", "prompt_token_ids": [1, 2], "choices": choices},
        CallTokens([1, 2], [7, 8], [-0.25, -1.0]),
    )
    call.weight_version = 3
    reading = adapter.read(spans_of(call))
    (triplet,) = reading.triplets
    assert triplet.prompt["token_ids"] == [1, 2]
    assert triplet.response["token_ids"] == [7, 8]
    assert triplet.response["token_logprobs"] == [-0.25, -1.0]
    values = {key: triplet.metadata[key] for key in ("call_id", "response_id", "finish_reason", "weight_version")}
    assert values == {
        "call_id": call.call_id,
        "response_id": "chatcmpl-1",
        "finish_reason": "length",
        "weight_version": 3,
    }
    assert reading.problems == []


def test_the_default_adapter_also_tells_what_was_said() -> None:
    (triplet,) = TracerTraceToTriplet()(gateway_call("call-1", 1, [1], [2]))
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "hi"}]


def test_a_span_of_another_instrumentation_still_tells_whose_call_the_gateway_saw() -> None:
    planner = with_attributes(span("P", "p", None, 0, 9), {"agent.name": "planner"})
    vendor = with_attributes(span("v", "anthropic.chat", "P", 1, 2), {"gen_ai.response.id": "msg-1"})
    record = gateway_call("call-1", 1, [1], [2], response_id="msg-1", start=11)
    assert [t.metadata["agent_name"] for t in TracerTraceToTriplet(agent_match="plan")([planner, vendor, *record])] == [
        "planner"
    ]


def test_a_record_stored_twice_is_one_call_and_two_calls_with_one_response_id_are_two() -> None:
    once = gateway_call("call-1", 1, [1], [2], response_id="same")
    again = [made.model_copy(update={"span_id": f"again-{made.span_id}"}) for made in once]
    other = gateway_call("call-2", 2, [1], [3], response_id="same")
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [t.metadata["call_id"] for t in adapter([*once, *again, *other])] == ["call-1", "call-2"]


def test_calls_of_the_gateway_come_in_the_order_of_arrival_whatever_the_clock_says() -> None:
    spans = [*gateway_call("b", 2, [1], [2], start=5.0), *gateway_call("a", 1, [1], [2], start=6.0)]
    assert [t.metadata["call_id"] for t in TracerTraceToTriplet()(spans)] == ["a", "b"]


@pytest.mark.parametrize("state", ["upstream_error", "refused", "client_left"])
def test_a_call_without_an_answer_makes_no_triplet_and_earns_no_reward(state: str) -> None:
    spans = [
        *gateway_call("good", 1, [1], [2]),
        *gateway_call("bad", 2, [1], [2] if state == "client_left" else [], state=state),
        reward("r", None, 9, 1.0, sequence_id=3),
    ]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [(t.metadata["call_id"], t.reward) for t in adapter(spans)] == [("good", 1.0)]


def test_an_answered_call_without_tokens_keeps_its_words_and_its_state() -> None:
    spans = gateway_call("c", 1, [], [], state="no_tokens")
    (triplet,) = TracerTraceToTriplet()(spans)
    assert triplet.metadata["state"] == "no_tokens"
    assert triplet.response["token_ids"] == []
    reading = TracerTraceToTriplet(_skip_empty_token_spans=True).read(spans)
    assert (reading.triplets, [kind for kind, _ in kinds(reading)]) == ([], ["empty_call"])


def test_late_calls_and_late_rewards_do_not_count() -> None:
    late = {"agentlightning.stale": True}
    spans = [
        *gateway_call("good", 1, [1], [2]),
        *gateway_call("late", 2, [1], [2], **late),
        with_attributes(reward("r", None, 9, 1.0, sequence_id=3), late),
    ]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [(t.metadata["call_id"], t.reward) for t in adapter(spans)] == [("good", None)]


def test_a_reward_of_a_slow_clock_still_finds_the_gateways_call_by_its_number() -> None:
    spans = [*gateway_call("c", 1, [1], [2], start=100.0), reward("r", None, 50.0, 1.0, sequence_id=2)]
    assert rewards(TracerTraceToTriplet()(spans)) == {"c": 1.0}


# --- which call earned a reward ------------------------------------------------------------------------------------


def test_a_link_to_an_operation_names_the_newest_call_in_it() -> None:
    spans = [SESSION, span("A", "a", "S", 0, 5), chat("c1", "A", 1, 2), chat("c2", "A", 3, 4), chat("c3", "S", 6, 7)]
    linked = reward("r", "S", 9, 1.0, links={"span_id": "A"})
    assert rewards(TracerTraceToTriplet()([*spans, linked])) == {"c1": None, "c2": 1.0, "c3": None}


def test_all_links_must_hold_and_a_link_that_meets_nothing_gives_the_reward_to_nobody() -> None:
    spans = [SESSION, chat("c1", "S", 1, 2)]
    linked = reward("r", "S", 9, 1.0, links={"gen_ai.response.id": "c1", "span_id": "elsewhere"})
    reading = TracerTraceToTriplet().read([*spans, linked])
    assert rewards(reading.triplets) == {"c1": None}
    assert kinds(reading) == [("lost_reward", "r")]


def test_a_link_may_name_what_only_the_gateway_recorded() -> None:
    client_calls = [chat(f"c{n}", None, n, n + 0.5, response_id=f"chatcmpl-{n}") for n in (1, 2)]
    records = [made for n in (1, 2) for made in gateway_call(f"call-{n}", n, [1], [2], response_id=f"chatcmpl-{n}")]
    linked = reward("r", None, 9, 1.0, links={"agentlightning.call.id": "call-1"})
    assert rewards(TracerTraceToTriplet()([*client_calls, *records, linked])) == {"chatcmpl-1": 1.0, "chatcmpl-2": None}


def two_agents() -> list[Span]:
    return [
        SESSION,
        span("A", "a", "S", 0, 10),
        span("B", "b", "S", 0, 10),
        chat("a1", "A", 1, 2),
        chat("b1", "B", 3, 4),
        chat("a2", "A", 5, 6),
    ]


def test_a_reward_given_inside_an_agent_stays_with_its_calls() -> None:
    assert rewards(TracerTraceToTriplet()([*two_agents(), reward("r", "B", 8, 1.0)])) == {
        "a1": None,
        "b1": 1.0,
        "a2": None,
    }


def test_a_reward_that_finds_none_in_its_own_agent_goes_to_the_newest_call_around_it() -> None:
    first, second = reward("r1", "B", 8, 1.0), reward("r2", "B", 9, 2.0)
    assert rewards(TracerTraceToTriplet()([*two_agents(), first, second])) == {"a1": None, "b1": 1.0, "a2": 2.0}


def test_a_reward_moved_by_repair_keeps_the_scope_that_its_span_states() -> None:
    spans = [
        SESSION,
        span("A", "a", "S", 0, 19),
        span("B", "b", "S", 0, 19),
        chat("a1", "A", 1, 2),
        chat("b1", "B", 3, 4),
    ]
    assert rewards(TracerTraceToTriplet()([*spans, reward("r", "S", 10, 1.0)])) == {"a1": None, "b1": 1.0}


def test_by_siblings_a_reward_goes_to_an_earlier_child_of_its_parent_only() -> None:
    adapter = TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING, repair_hierarchy=False)
    reading = adapter.read([*two_agents(), reward("r1", "A", 8, 1.0), reward("r2", "S", 9, 2.0)])
    assert rewards(reading.triplets) == {"a1": None, "b1": None, "a2": 1.0}
    assert kinds(reading) == [("lost_reward", "r2")]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_reported_and_given_to_nobody(value: float) -> None:
    reading = TracerTraceToTriplet().read([SESSION, chat("c1", "S", 1, 2), reward("r", "S", 3, value)])
    assert rewards(reading.triplets) == {"c1": None}
    assert kinds(reading) == [("bad_reward", "r")]


# --- foreign and broken traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "foreign",
    [
        {"agentlightning.rewarder": 1.0},
        {"agentops.task.output": "[1, 2]"},
        {"agentops.task.output": "7"},
        {"logprobs.content": "{broken"},
        {"gen_ai.prompt": "hello"},
        {"agentlightning.operation.output": "a scalar"},
        {"gen_ai.prompt.00.role": "user"},
        {"agentlightning.link.0.key_match": "x"},
    ],
)
def test_one_odd_attribute_does_not_cost_the_trace(foreign: dict[str, Any]) -> None:
    spans = [SESSION, with_attributes(chat("c1", "S", 1, 2, [1], [2]), foreign), reward("r", "S", 3, 1.0)]
    (triplet,) = TracerTraceToTriplet()(spans)
    assert (triplet.prompt["token_ids"], triplet.reward) == ([1], 1.0)


def test_spans_without_times_are_read() -> None:
    spans = [span("S", "s", None, None, None), chat("c1", "S", None, None, [1], [2]), reward("r", "S", None, 1.0)]
    reading = TracerTraceToTriplet().read(spans)
    assert rewards(reading.triplets) == {"c1": None}
    assert kinds(reading) == [("lost_reward", "r")]


def test_what_was_left_out_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    TracerTraceToTriplet()([SESSION, reward("r1", "S", 3, 1.0), reward("r2", "S", 4, 1.0)])
    (record,) = caplog.records
    assert "2 parts are excluded" in record.getMessage()


def test_a_call_without_an_id_below_another_call_is_the_same_call() -> None:
    inner = span("i", "openai.chat.completion", "c1", 1.2, 1.8)
    assert list(rewards(TracerTraceToTriplet()([SESSION, chat("c1", "S", 1, 2), inner]))) == ["c1"]


def test_two_spans_of_one_response_are_one_call() -> None:
    spans = [SESSION, chat("c1", "S", 1, 2, response_id="x"), chat("c2", "S", 3, 4, response_id="x")]
    assert len(TracerTraceToTriplet()(spans)) == 1


def test_images_are_found_in_lists_and_in_text() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://x/1.png"}}]
    attributes = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": repr(parts),
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": '[{"type": "image_url", "image_url": {"url": "http://x/2.png"}}]',
        "gen_ai.prompt.2.content": "an image_url in words",
    }
    (triplet,) = TracerTraceToTriplet()([with_attributes(chat("c1", None, 1, 2), attributes)])
    assert triplet.prompt["image_urls"] == ["http://x/1.png", "http://x/2.png"]


def test_request_and_response_are_told_without_messages_and_tokens() -> None:
    attributes = {
        "agentlightning.operation.input.model": "m",
        "agentlightning.operation.input.messages.0.role": "user",
        "agentlightning.operation.input.messages.0.content": "hi",
        "agentlightning.operation.output.id": "x",
        "agentlightning.operation.output.choices.0.message.content": "hey",
        "agentlightning.operation.output.prompt_token_ids": [1],
        "agentlightning.operation.output.response_token_ids.0": [2],
    }
    (triplet,) = TracerTraceToTriplet()([with_attributes(span("c", "openai.chat.completion", None, 0, 1), attributes)])
    assert triplet.metadata["request"] == {"model": "m"}
    assert triplet.metadata["response"] == {"id": "x"}
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "hi"}]
    assert triplet.response["raw_content"] == [{"message": {"content": "hey"}}]
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1], [2])


def test_spans_of_opentelemetry_are_taken_as_they_are() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    attributes = {"gen_ai.response.id": "c1", "prompt_token_ids": [1], "response_token_ids": [2]}
    provider.get_tracer("test").start_span("openai.chat.completion", attributes=attributes).end()
    (triplet,) = TracerTraceToTriplet()(exporter.get_finished_spans())
    assert triplet.prompt["token_ids"] == [1]


def test_of_calls_side_by_side_the_last_one_that_arrived_earns_the_reward_whenever_its_client_began() -> None:
    spans = [
        SESSION,
        chat("c1", "S", 1.0, 4, response_id="r1"),
        chat("c2", "S", 1.1, 4, response_id="r2"),
        *gateway_call("g2", 1, [1], [2], response_id="r2", start=1.2),
        *gateway_call("g1", 2, [1], [3], response_id="r1", start=1.3),
        reward("r", None, 9, 1.0, sequence_id=9),
    ]
    triplets = TracerTraceToTriplet()(spans)
    assert [(t.metadata["call_id"], t.reward) for t in triplets] == [("g2", None), ("g1", 1.0)]


def test_the_search_for_calls_can_begin_within_a_larger_tree() -> None:
    """The four keywords that programs of the older system pass on from tree to tree."""
    tree = TraceTree.from_spans(
        [SESSION, chat("c1", "S", 1, 2), span("n", "openai.chat.completion", "S", 3, 4), chat("c2", "S", 5, 6)]
    )

    def found(**options: Any) -> list[tuple[str, str]]:
        return [(node.id, name) for node, name in tree.find_llm_calls(**options)]

    every = [("c1", "*"), ("n", "*"), ("c2", "*")]
    ids = {"c1"}
    first = {"llm_call_match": r"openai\.chat\.completion", "agent_match": None, "within_matching_subtree": "*"}
    assert found(**first, within_reward=False, within_llm_call=False, existing_llm_call_response_ids=ids) == every[1:]
    assert ids == {"c1", "c2"}
    assert found(within_reward=None, within_llm_call=None, existing_llm_call_response_ids=None) == every
    assert found(within_reward=True) == []
    assert found(within_llm_call=True) == [("c1", "*"), ("c2", "*")]
    assert found(agent_match="planner") == []
    assert found(agent_match="planner", within_matching_subtree="planner") == [(id, "planner") for id, _ in every]


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="llm_call_match"):
        TracerTraceToTriplet(llm_call_match="(")
    with pytest.raises(ValueError, match="agent_match"):
        TracerTraceToTriplet(agent_match="[")
    with pytest.raises(ValueError, match="second_cousin"):
        TracerTraceToTriplet(reward_match="second_cousin")


def test_a_subclass_of_the_tree_may_put_more_into_a_triplet() -> None:
    class Louder(TraceTree):
        def span_to_triplet(self, span: Span, agent_name: str) -> Triplet:
            triplet = super().span_to_triplet(span, agent_name)
            triplet.metadata["loud"] = True
            return triplet

    tree = Louder.from_spans([SESSION, chat("c1", "S", 1, 2)])
    assert [triplet.metadata["loud"] for triplet in tree.to_trajectory(final_reward=2.0)] == [True]
    assert tree.to_trajectory(final_reward=2.0)[-1].reward == 2.0


def test_an_adapter_of_a_user_needs_adapt_only() -> None:
    class Mine(TraceToTripletBase):
        def adapt(self, source: Any, /) -> list[Triplet]:
            return [Triplet(prompt=len(source), response=None)]

    assert Mine()([SESSION])[0].prompt == 1
    assert Mine().read([SESSION]).problems == []
