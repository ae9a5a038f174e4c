"""Gateway record and tracer span of one call are matched, and a call that only one of them saw is known as such."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.adapter import ModelCall, TracerTraceToTriplet, TraceToMessages, model_calls
from agentlightning.types import Event, Span
from tests.adapter.span_maker import CHAT, chat, conversation, gateway_call, said, span, spoken_call, with_attributes

ASKED = conversation("six times seven?", system="be brief")


def seen(id: str, start: float, end: float, attributes: dict[str, Any] | None = None, **more: Any) -> Span:
    """A call as a tracer sees it that names no reply."""
    name = more.pop("name", CHAT)
    return with_attributes(span(id, name, more.pop("parent", None), start, end, **more), attributes or {})


def told(calls: list[ModelCall]) -> list[tuple[str, str, str | None]]:
    recorded = [(call, call.spans) for call in calls]
    return [(call.call_id, spans.seen_by, spans.matched_by) for call, spans in recorded if spans is not None]


def test_each_call_is_seen_by_both_by_the_gateway_only_or_by_the_tracer_only() -> None:
    spans = [
        *gateway_call("g1", 1, [1], [2], response_id="r1"),
        *gateway_call("g2", 2, [1], [2], response_id="r2"),
        chat("t1", None, 1, 2, response_id="r1", sequence_id=8),
        chat("t3", None, 3, 4, response_id="r3", sequence_id=9),
    ]
    assert told(model_calls(spans)) == [
        ("g1", "both", "response_id"),
        ("g2", "gateway", None),
        ("r3", "tracer", None),
    ]


def test_a_span_that_names_no_reply_is_known_by_what_was_asked() -> None:
    spans = [
        *spoken_call("g1", 1, [1], [2], conversation("another question")),
        *spoken_call("g2", 2, [1], [2], ASKED),
        seen("t", 50, 60, said(ASKED, "42"), sequence_id=3),
    ]
    assert told(model_calls(spans)) == [("g1", "gateway", None), ("g2", "both", "request")]


def test_of_a_clients_own_retries_the_one_that_was_answered_is_what_the_tracer_saw() -> None:
    spans = [
        *spoken_call("first", 1, [], [], ASKED, state="upstream_error"),
        *spoken_call("second", 2, [], [], ASKED, state="upstream_error"),
        *spoken_call("third", 3, [1], [2], ASKED),
        seen("t", 0.9, 4, said(ASKED, "42")),
    ]
    assert told(model_calls(spans)) == [
        ("first", "gateway", None),
        ("second", "gateway", None),
        ("third", "both", "request"),
    ]


def test_a_call_that_failed_is_one_call_for_both() -> None:
    spans = [
        *spoken_call("g", 1, [], [], ASKED, state="upstream_error"),
        seen("t", 0.9, 2, said(ASKED), status="ERROR"),
    ]
    (call,) = model_calls(spans)
    assert (told([call]), call.state) == ([("g", "both", "request")], "upstream_error")


@pytest.mark.parametrize("words", [None, said(ASKED)])
@pytest.mark.parametrize("number", [1, 3])
def test_calls_that_the_agent_broke_off_are_one_for_both_however_late_the_gateway_notices(
    words: dict[str, Any] | None, number: int
) -> None:
    spans: list[Span] = []
    for n in range(number):
        record = spoken_call(f"g{n}", n + 1, [], [], ASKED, state="client_left", start=10.0 * n)
        spans += [each.model_copy(update={"end_time": 10.0 * n + 9}) for each in record]
        spans.append(seen(f"t{n}", 10.0 * n - 0.1, 10.0 * n + 0.2, words, status="ERROR"))
    calls = model_calls(spans)
    assert [(call.state, call.spans and call.spans.seen_by) for call in calls] == [("client_left", "both")] * number


def naming(id: str, number: int, named: str, trace: str = "t" * 32, **more: Any) -> list[Span]:
    """A record of the gateway whose request named a span of its client."""
    request, raw = spoken_call(id, number, [], [], ASKED, **{"state": "client_left", "start": 5.0, **more})
    return [request, with_attributes(raw, {"agentlightning.call.client_span": f"{trace}-{named}"})]


def test_calls_whose_requests_name_the_spans_of_their_clients_are_matched_by_them() -> None:
    spans = [made for n in range(13) for made in naming(f"g{n}", n + 1, f"t{12 - n}")]
    spans += [seen(f"t{n}", 5 + n % 3, 6 + n % 3, said(ASKED), status="ERROR") for n in range(13)]
    calls = model_calls(spans)
    assert [call.spans and call.spans.matched_by for call in calls] == ["traceparent"] * 13
    assert [call.spans.certain[0].span_id for call in calls if call.spans] == [f"t{12 - n}" for n in range(13)]


def test_a_request_may_name_a_span_below_that_of_the_call() -> None:
    below = span("http", "POST", "t1", 5, 6)
    spans = [*naming("g", 1, "http"), below, *(seen(f"t{n}", 5, 6, said(ASKED), status="ERROR") for n in range(2))]
    assert told(model_calls(spans)) == [("t0", "tracer", None), ("g", "both", "traceparent")]


def test_of_the_tries_that_name_one_span_it_is_counted_with_the_last_and_the_others_take_no_other_span() -> None:
    tries = [made for n in range(3) for made in naming(f"g{n}", n + 1, "t", state="upstream_error")]
    calls = model_calls([*tries, seen("t", 5, 6, said(ASKED), status="ERROR"), seen("u", 5, 6, said(ASKED))])
    by_id = {call.call_id: call.spans for call in calls if call.spans}
    assert {id: spans.matched_by for id, spans in by_id.items()} == dict.fromkeys(("g0", "g1", "u")) | {
        "g2": "traceparent"
    }
    assert [by_id[f"g{n}"].client for n in range(3)] == [by_id["g2"].seen] * 3


def test_a_request_that_was_retried_and_answered_is_known_by_its_reply() -> None:
    spans = [
        *naming("g1", 1, "t"),
        *naming("g2", 2, "t", state="ok", response_id="r"),
        chat("t", None, 5, 9, response_id="r"),
    ]
    assert told(model_calls(spans)) == [("g1", "gateway", None), ("g2", "both", "response_id")]


def test_a_span_that_a_request_names_and_that_has_another_reply_is_another_call() -> None:
    spans = [*naming("g", 1, "t", state="ok", response_id="r1"), chat("t", None, 4, 9, response_id="r2")]
    assert told(model_calls(spans)) == [("r2", "tracer", None), ("g", "gateway", None)]


def test_spans_of_two_instrumentations_are_of_one_call_by_its_reply_and_by_its_request() -> None:
    by_name = seen("t", 4, 9, said(ASKED), status="ERROR").model_copy(update={"scope": {"name": "other"}})
    spans = [*naming("g", 1, "t", state="ok", response_id="r"), by_name, chat("u", None, 4, 9, response_id="r")]
    (call,) = model_calls(spans)
    assert call.spans is not None
    assert [each.span_id for each in call.spans.certain] == ["u", "t"]


@pytest.mark.parametrize("named", ["missing", "", "t-t", "around"])
def test_a_span_that_is_not_there_or_tells_of_no_call_proves_nothing(named: str) -> None:
    spans = [*naming("g", 1, named), span("around", "agent", None, 0, 9), seen("t", 4.9, 5.6, said(ASKED))]
    assert told(model_calls(spans)) == [("g", "both", "request")]


def test_a_span_of_that_id_in_another_trace_is_another_span() -> None:
    spans = [*naming("g", 1, "t", trace="u" * 32), seen("t", 4.9, 5.6, said(conversation("something else")))]
    assert told(model_calls(spans)) == [("t", "tracer", None), ("g", "gateway", None)]


def test_equal_requests_are_matched_in_their_order() -> None:
    spans = [made for n in range(3) for made in spoken_call(f"g{n}", n + 1, [1], [n + 2], ASKED)]
    spans += [seen(f"t{n}", 100 + n, 100.5 + n, said(ASKED)) for n in range(3)]
    calls = model_calls(spans)
    assert [(call.call_id, call.spans.seen.span_id) for call in calls if call.spans and call.spans.seen] == [
        ("g0", "t0"),
        ("g1", "t1"),
        ("g2", "t2"),
    ]


def test_where_one_of_them_kept_no_words_the_time_decides() -> None:
    spans = [*spoken_call("g", 5, [1], [2], ASKED), seen("t", 4.9, 5.6), seen("far", 8, 9)]
    assert told(model_calls(spans)) == [("far", "tracer", None), ("g", "both", "time")]


def test_where_two_records_would_fit_the_span_is_one_of_them_and_nobody_knows_which() -> None:
    spans = [*gateway_call("a", 5, [1], [2]), *gateway_call("b", 5, [1], [3]), seen("t", 4.9, 5.6)]
    calls = model_calls(spans)
    assert sorted(seen_by for _, seen_by, _ in told(calls)) == ["both", "gateway"]
    assert [call.spans.certain for call in calls if call.spans] == [[], []]


def test_a_reply_by_another_name_is_another_call() -> None:
    """One of the agent's clients goes to the gateway, the other one past it."""
    spans = [*spoken_call("g", 1, [1], [2], ASKED, response_id="r1"), chat("t", None, 50, 51, response_id="r2")]
    assert [seen_by for _, seen_by, _ in told(model_calls(spans))] == ["tracer", "gateway"]


def test_a_framework_around_a_client_is_no_call_of_its_own() -> None:
    spans = [
        seen("outer", 0, 9, {"llm.request.type": "chat"}, name="ChatOpenAI.chat"),
        chat("inner", "outer", 1, 2, response_id="r"),
        seen("twice", 11, 19, said(ASKED)),
        seen("part", 12, 13, parent="twice"),
    ]
    assert [call.call_id for call in model_calls(spans)] == ["r", "twice"]


def test_an_operation_whose_result_has_an_id_is_no_model_call() -> None:
    looked_up = span("o", "agentlightning.operation", None, 1, 2)
    assert model_calls([with_attributes(looked_up, {"agentlightning.operation.output.id": "document-7"})]) == []
    reply = {"agentlightning.operation.output.id": "r", "agentlightning.operation.output.choices.0.index": 0}
    assert len(model_calls([with_attributes(looked_up, reply)])) == 1


PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "six times seven?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "t", "name": "calc", "arguments": {"x": 1}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t", "response": "42"}]},
]
SYSTEM_PARTS = [{"type": "text", "content": "be brief"}]
ANSWER_PARTS = [{"role": "assistant", "parts": [{"type": "text", "content": "42"}], "finish_reason": "stop"}]
TOOL_TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "six times seven?"},
    {"role": "assistant", "tool_calls.0.name": "calc", "tool_calls.0.arguments": '{"x": 1}', "tool_calls.0.id": "t"},
    {"role": "tool", "content": "42", "tool_call_id": "t"},
]
SPELLINGS: dict[str, dict[str, Any]] = {
    "newer conventions": {
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": json.dumps(SYSTEM_PARTS),
        "gen_ai.input.messages": json.dumps(PARTS),
        "gen_ai.output.messages": json.dumps(ANSWER_PARTS),
    },
    "OpenInference": {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "system",
        "llm.input_messages.0.message.content": "be brief",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.contents.0.message_content.type": "text",
        "llm.input_messages.1.message.contents.0.message_content.text": "six times seven?",
        "llm.input_messages.2.message.role": "assistant",
        "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "calc",
        "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"x": 1}',
        "llm.input_messages.3.message.role": "tool",
        "llm.input_messages.3.message.content": "42",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "42",
    },
    "Logfire": {
        "gen_ai.request.model": "m",
        "request_data": json.dumps(
            {
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "six times seven?"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "t", "function": {"name": "calc", "arguments": '{"x":1}'}}],
                    },
                    {"role": "tool", "content": "42", "tool_call_id": "t"},
                ]
            }
        ),
        "response_data": json.dumps({"message": {"role": "assistant", "content": "42"}}),
    },
    "Google's ADK": {
        "gcp.vertex.agent.llm_request": json.dumps(
            {
                "config": {"system_instruction": "be brief"},
                "contents": [
                    {"role": "user", "parts": [{"text": "six times seven?"}]},
                    {"role": "model", "parts": [{"function_call": {"id": "t", "name": "calc", "args": {"x": 1}}}]},
                    {"role": "user", "parts": [{"function_response": {"id": "t", "name": "calc", "response": "42"}}]},
                ],
            }
        ),
        "gcp.vertex.agent.llm_response": json.dumps({"content": {"role": "model", "parts": [{"text": "42"}]}}),
    },
    "OpenLLMetry": {"llm.request.type": "chat", **said(TOOL_TALK, "42")},
}


def event(name: str, **attributes: Any) -> Event:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in attributes.items()}
    return Event(name=name, attributes=texts)


USE = {"toolUse": {"toolUseId": "t", "name": "calc", "input": {"x": 1}}}
RESULT = {"toolResult": {"toolUseId": "t", "status": "success", "content": [{"text": "42"}]}}
CALL = {"id": "t", "type": "function", "function": {"name": "calc", "arguments": '{"x":1}'}}
EVENTS: dict[str, list[Event]] = {
    "events of Strands": [
        event("gen_ai.system.message", content=[{"text": "be brief"}]),
        event("gen_ai.user.message", content=[{"text": "six times seven?"}]),
        event("gen_ai.assistant.message", content=[USE]),
        event("gen_ai.tool.message", content=[RESULT]),
        event("gen_ai.choice", message=[{"text": "42"}], finish_reason="end_turn"),
    ],
    "older events of the conventions": [
        event("gen_ai.system.message", content="be brief"),
        event("gen_ai.user.message", content="six times seven?"),
        event("gen_ai.assistant.message", tool_calls=[CALL]),
        event("gen_ai.tool.message", content="42", id="t"),
        event("gen_ai.choice", index="0", message={"role": "assistant", "content": "42"}, finish_reason="stop"),
    ],
    "older events with their fields as one text": [
        event("gen_ai.system.message", **{"gen_ai.event.content": {"role": "system", "content": "be brief"}}),
        event("gen_ai.user.message", **{"gen_ai.event.content": {"role": "user", "content": "six times seven?"}}),
        event("gen_ai.assistant.message", **{"gen_ai.event.content": {"tool_calls": [CALL]}}),
        event("gen_ai.tool.message", **{"gen_ai.event.content": {"content": "42", "id": "t"}}),
        event("gen_ai.choice", **{"gen_ai.event.content": {"message": {"content": "42"}, "finish_reason": "stop"}}),
    ],
    "newer events of the conventions": [
        event("gen_ai.client.inference.operation.details", **{"gen_ai.system_instructions": SYSTEM_PARTS}),
        event("gen_ai.client.inference.operation.details", **{"gen_ai.input.messages": PARTS}),
        event("gen_ai.client.inference.operation.details", **{"gen_ai.output.messages": ANSWER_PARTS}),
    ],
}


@pytest.mark.parametrize("spelling", [*SPELLINGS, *EVENTS])
def test_a_call_is_known_in_every_spelling(spelling: str) -> None:
    attributes = SPELLINGS.get(spelling, {"gen_ai.operation.name": "chat"})
    told_by_tracer = seen("t", 50, 60, attributes, name="some library", sequence_id=9)
    told_by_tracer = told_by_tracer.model_copy(update={"events": EVENTS.get(spelling, [])})
    spans = [*spoken_call("g", 1, [1], [2], TOOL_TALK, "42"), told_by_tracer]
    assert told(model_calls(spans)) == [("g", "both", "request")]
    (triplet,) = TracerTraceToTriplet(llm_call_match="some library")([told_by_tracer])
    assert [message["role"] for message in triplet.prompt["raw_content"]] == ["system", "user", "assistant", "tool"]
    assert triplet.response["raw_content"][0]["content"] == "42"
    (record,) = TraceToMessages()([told_by_tracer])
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert record["messages"][2]["tool_calls"][0]["function"]["name"] == "calc"
    assert record["messages"][-1] == {"role": "assistant", "content": "42"}


def test_openinference_names_the_reply_in_its_whole_text() -> None:
    reply = {"openinference.span.kind": "LLM", "output.value": json.dumps({"id": "r", "choices": []})}
    spans = [*gateway_call("g", 1, [1], [2], response_id="r"), seen("t", 50, 60, reply, name="ChatCompletion")]
    assert told(model_calls(spans)) == [("g", "both", "response_id")]


SEEN = {
    "by its words": lambda parent: seen("t", 1, 2, said(ASKED), parent=parent),
    "by its reply": lambda parent: chat("t", parent, 1, 2, response_id="r"),
}


@pytest.mark.parametrize("how", SEEN)
def test_the_place_of_a_call_comes_from_the_tracer_however_they_were_matched(how: str) -> None:
    planner = with_attributes(span("P", "p", None, 0, 9), {"agent.name": "planner"})
    record = spoken_call("g", 1, [1], [2], ASKED, start=1.1, response_id="r")
    (triplet,) = TracerTraceToTriplet()([*record, planner, SEEN[how]("P")])
    assert (triplet.metadata["agent_name"], triplet.metadata["call_id"]) == ("planner", "g")
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1], [2])


@pytest.mark.parametrize("how", SEEN)
def test_the_record_of_a_graders_call_is_left_out_however_they_were_matched(how: str) -> None:
    operation = span("O", "agentlightning.operation", None, 0, 9)
    grading = with_attributes(operation, {"agentlightning.operation.name": "agentlightning.reward"})
    record = spoken_call("g", 1, [1], [2], ASKED, start=1.1, response_id="r")
    assert TracerTraceToTriplet()([grading, SEEN[how]("O"), *record]) == []
    assert len(TracerTraceToTriplet(exclude_llm_call_in_reward=False)([grading, SEEN[how]("O"), *record])) == 1


def test_thousands_of_calls_that_name_no_reply_are_matched_by_time() -> None:
    spans = [made for n in range(2000) for made in gateway_call(f"g{n}", n + 1, [1], [2])]
    spans += [seen(f"t{n}", n + 0.99, n + 1.6) for n in range(2000)]
    assert {how for _, _, how in told(model_calls(spans))} == {"time"}
