"""The worked examples of the tracing contract. Where the order differs from it, the calls are in the order made."""

from __future__ import annotations

import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages, TraceTree
from agentlightning.types import Span, Triplet
from tests.adapter.span_maker import chat, reward, span, text_call, with_attributes

SESSION = span("S", "run.session", None, 0, 20)


def agent(id: str, parent: str, start: float, end: float, name: str) -> Span:
    return with_attributes(span(id, f"{name}_node", parent, start, end), {"agent.name": name})


def rewards(triplets: list[Triplet]) -> dict[str, float | None]:
    return {triplet.metadata["response_id"]: triplet.reward for triplet in triplets}


def agents(triplets: list[Triplet]) -> list[tuple[str, str]]:
    return [(triplet.metadata["response_id"], triplet.metadata["agent_name"]) for triplet in triplets]


def planner_trace() -> list[Span]:
    return [
        SESSION,
        agent("P", "S", 1, 10, "planner"),
        chat("c1", "P", 2, 3, [1, 2], [3]),
        chat("c2", "P", 4, 5, [1, 2, 3, 9], [4, 5]),
        reward("R1", "P", 6, 0.5),
        chat("c3", "P", 7, 8, [7], [8]),
    ]


def test_a_reward_goes_to_the_call_before_it() -> None:
    triplets = TracerTraceToTriplet()(planner_trace())
    assert rewards(triplets) == {"c1": None, "c2": 0.5, "c3": None}
    assert {name for _, name in agents(triplets)} == {"planner"}


def test_a_triplet_has_exactly_these_fields_where_nothing_more_is_known() -> None:
    assert TracerTraceToTriplet()(planner_trace())[0].model_dump() == {
        "prompt": {"token_ids": [1, 2], "raw_content": None, "image_urls": []},
        "response": {"token_ids": [3], "raw_content": None},
        "reward": None,
        "metadata": {"request": None, "response": {"id": "c1"}, "response_id": "c1", "agent_name": "planner"},
    }


def test_a_second_reward_goes_to_the_call_before_that_and_a_third_is_lost() -> None:
    calls = [SESSION, chat("c1", "S", 1, 2), chat("c2", "S", 3, 4)]
    reward_spans = [reward("r1", "S", 5, 0.1), reward("r2", "S", 6, 0.9), reward("r3", "S", 7, 0.3)]
    reading = TracerTraceToTriplet().read([*calls, *reward_spans])
    assert rewards(reading.triplets) == {"c1": 0.9, "c2": 0.1}
    assert [(problem.kind, problem.span_id) for problem in reading.problems] == [("lost_reward", "r3")]


def test_a_reward_given_while_the_call_runs_is_lost_and_one_at_its_end_counts() -> None:
    call = chat("c1", "S", 1, 4)
    assert rewards(TracerTraceToTriplet()([SESSION, call, reward("r", "S", 3, 1.0)])) == {"c1": None}
    assert rewards(TracerTraceToTriplet()([SESSION, call, reward("r", "S", 4, 1.0)])) == {"c1": 1.0}


def nested_agents() -> list[Span]:
    return [
        SESSION,
        agent("P", "S", 1, 10, "planner"),
        agent("C", "P", 2, 6, "critic"),
        chat("c1", "P", 7, 8),
        chat("c2", "C", 3, 4),
        chat("c3", "S", 1.5, 1.8),
    ]


def test_an_agent_filter_takes_the_calls_of_that_agent_and_those_repaired_to_it() -> None:
    triplets = TracerTraceToTriplet(agent_match="planner")(nested_agents())
    assert agents(triplets) == [("c3", "planner"), ("c1", "planner")]


def test_without_repair_a_misplaced_call_belongs_to_nobody() -> None:
    triplets = TracerTraceToTriplet(agent_match="planner", repair_hierarchy=False)(nested_agents())
    assert agents(triplets) == [("c1", "planner")]


def test_without_a_filter_every_call_has_its_nearest_agent() -> None:
    triplets = TracerTraceToTriplet()(nested_agents())
    assert agents(triplets) == [("c3", "planner"), ("c2", "critic"), ("c1", "planner")]


def graded(operation_name: str) -> list[Span]:
    operation = span("O", "agentlightning.operation", "S", 5, 9)
    operation = with_attributes(operation, {"agentlightning.operation.name": operation_name})
    return [SESSION, chat("c1", "S", 1, 2), operation, chat("g1", "O", 6, 7), reward("r", "O", 8, 1.0)]


def test_the_calls_of_a_grader_are_left_out_and_its_reward_goes_to_the_agent() -> None:
    assert rewards(TracerTraceToTriplet()(graded("agentlightning.reward"))) == {"c1": 1.0}


def test_the_calls_of_a_grader_are_kept_on_request_or_if_it_has_another_name() -> None:
    adapter = TracerTraceToTriplet(exclude_llm_call_in_reward=False)
    assert rewards(adapter(graded("agentlightning.reward"))) == {"c1": None, "g1": 1.0}
    assert rewards(TracerTraceToTriplet()(graded("grade"))) == {"c1": None, "g1": 1.0}


def proxy_trace(reward_number: int) -> list[Span]:
    reward_span = reward("r", None, 2.7, 1.0, sequence_id=reward_number)
    calls = [text_call("c1", 1, [1, 2], [3]), text_call("c2", 2, [1, 2, 3, 4], [5]), text_call("c3", 4, [6], [7])]
    return [calls[2], reward_span, *calls[:2]]


def test_gateway_spans_alone_are_ordered_and_rewarded_by_their_numbers() -> None:
    triplets = LlmProxyTraceToTriplet()(proxy_trace(3))
    assert rewards(triplets) == {"c1": None, "c2": 1.0, "c3": None}
    assert triplets[1].prompt == {"token_ids": [1, 2, 3, 4]}
    assert triplets[1].response == {"token_ids": [5]}
    assert triplets[1].metadata == {"response_id": "c2", "finish_reason": "stop"}


def test_a_reward_is_younger_than_its_call_only_with_a_larger_number() -> None:
    assert rewards(LlmProxyTraceToTriplet()(proxy_trace(2))) == {"c1": 1.0, "c2": None, "c3": None}


def test_gateway_spans_alone_may_be_none_and_a_tree_may_not() -> None:
    assert LlmProxyTraceToTriplet()([]) == []
    with pytest.raises(ValueError, match="No spans provided"):
        TracerTraceToTriplet()([])


def test_branches_side_by_side_come_in_the_order_of_time_and_say_where_they_belong() -> None:
    spans = [
        SESSION,
        agent("X", "S", 0, 19, "X"),
        agent("Y", "S", 0, 19, "Y"),
        chat("x1", "X", 1, 2),
        chat("x2", "X", 5, 6),
        chat("y1", "Y", 3, 4),
        reward("r", "S", 10, 1.0),
    ]
    triplets = TracerTraceToTriplet()(spans)
    assert [(triplet.metadata["response_id"], triplet.metadata["branch"]) for triplet in triplets] == [
        ("x1", "X"),
        ("y1", "Y"),
        ("x2", "X"),
    ]
    assert rewards(triplets) == {"x1": None, "y1": None, "x2": 1.0}


def test_the_tree_of_the_first_example() -> None:
    tree = TraceTree.from_spans(planner_trace())
    leaves = [("openai.chat.completion", []), ("openai.chat.completion", []), ("agentlightning.annotation", [])]
    assert tree.names_tuple() == (
        "run.session",
        [("planner_node [planner]", [*leaves, ("openai.chat.completion", [])])],
    )
    assert [node.id for node, _ in tree.find_llm_calls()] == ["c1", "c2", "c3"]
    assert tree.match_rewards("first_occurrence", [node for node, _ in tree.find_llm_calls()]) == {
        "c1": None,
        "c2": 0.5,
        "c3": None,
    }


def test_a_reward_as_it_is_on_the_wire() -> None:
    wire = {
        "agentlightning.reward.0.name": "task_completion",
        "agentlightning.reward.0.value": 1.0,
        "agentlightning.reward.1.name": "efficiency",
        "agentlightning.reward.1.value": 0.8,
        "agentlightning.tag.0": "fast",
        "agentlightning.link.0.key_match": "gen_ai.response.id",
        "agentlightning.link.0.value_match": "chatcmpl-7",
    }
    annotation = with_attributes(span("r", "agentlightning.annotation", "S", 9, 9), wire)
    spans = [SESSION, chat("c1", "S", 1, 2, response_id="chatcmpl-7"), chat("c2", "S", 3, 4), annotation]
    first, second = TracerTraceToTriplet()(spans)
    assert (first.reward, first.metadata["rewards"]) == (1.0, {"task_completion": 1.0, "efficiency": 0.8})
    assert second.reward is None


def test_a_call_with_a_tool_as_instrumented_clients_write_it() -> None:
    """The keys of a chat call with a function offered and called, the call itself on a child span."""
    call = with_attributes(
        chat("c", "S", 1, 2, [1, 2], [3], response_id="chatcmpl-7"),
        {
            "gen_ai.system": "OpenAI",
            "gen_ai.request.type": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.request.functions.0.name": "get_weather",
            "gen_ai.request.functions.0.description": "tells the weather",
            "gen_ai.request.functions.0.parameters": '{"type": "object", "properties": {"city": {"type": "string"}}}',
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "Is it warm in Paris?",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.finish_reason": "tool_calls",
            "logprobs.content": '[{"token": "x", "logprob": -0.5}]',
        },
    )
    child = {"tool.name": "get_weather", "tool.parameters": '{"city": "Paris"}'}
    child |= {"tool.call.id": "call_1", "tool.call.type": "function"}
    spans = [SESSION, call, with_attributes(span("k", "tool_call.get_weather", "c", 1, 2), child)]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    offered = {"name": "get_weather", "description": "tells the weather", "parameters": parameters}
    assert TraceToMessages()(spans) == [
        {
            "messages": [
                {"role": "user", "content": "Is it warm in Paris?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
                },
            ],
            "tools": [{"type": "function", "function": offered}],
        }
    ]
    (triplet,) = TracerTraceToTriplet()(spans)
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "Is it warm in Paris?"}]
    assert triplet.response["raw_content"] == [{"role": "assistant", "finish_reason": "tool_calls"}]
    assert triplet.response["logprobs"] == [{"token": "x", "logprob": -0.5}]
    assert triplet.response["token_logprobs"] == [-0.5]
    assert triplet.metadata["response"] == {"id": "chatcmpl-7"}
    assert triplet.metadata["request"]["model"] == "m"
