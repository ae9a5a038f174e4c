"""The outcome of each call, as a value and as the table that a person reads."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.errors import AgentLightningError, NoTrainableCallError
from agentlightning.types import Span
from tests.adapter.span_maker import chat, conversation, gateway_call, span, spoken_call, with_attributes

QUESTION = conversation("six times seven?")
PLANNER = with_attributes(span("P", "p", None, 0, 99), {"agent.name": "planner"})


def two_turns() -> list[Span]:
    went_on = conversation("six times seven?", "42", "and eight?")
    return [
        PLANNER,
        *spoken_call("a", 1, [1, 2], [3, 4, 9], QUESTION, "42"),
        *spoken_call("b", 2, [1, 2, 34, 9, 5], [6], went_on),
        chat("seen", "P", 1, 2, response_id="a", sequence_id=3),
    ]


def failed(state: str, text: str) -> list[Span]:
    request, record = gateway_call("x", 4, [], [], state=state)
    status = record.status.model_copy(update={"status_code": "ERROR", "description": text})
    return [request, record.model_copy(update={"status": status})]


def test_each_call_says_who_saw_it_how_it_ended_and_where_it_went() -> None:
    story = TracerTraceToTriplet().explain([*two_turns(), *failed("upstream_error", "no such model")])
    a, b, x = story.calls
    assert (a.seen_by, a.matched_by, a.call.agent) == ("both", "response_id", "planner")
    assert (a.row, a.begins) == (1, "first_call")
    assert (b.seen_by, b.matched_by, b.row, b.begins, b.has_tokens) == ("gateway", None, 2, "tokenisation", True)
    assert (x.row, x.reason, x.error, x.has_tokens) == (None, "upstream_error", "no such model", False)
    assert (b.prompt_tokens, b.completion_tokens) == (5, 1)
    assert [each.number for each in story.trainable] == [1, 2]


def test_it_prints_as_a_table_with_the_seams_below() -> None:
    table, *rest = str(TracerTraceToTriplet().explain(two_turns())).partition("2 of 2 model calls in rows")
    assert [line.split() for line in table.splitlines()] == [
        ["call", "agent", "model", "state", "in", "out", "ids", "seen", "by", "row", "why"],
        ["1", "planner", "-", "ok", "2", "3", "yes", "both", "1", "first_call"],
        ["2", "planner", "-", "ok", "5", "1", "yes", "gateway", "2", "tokenisation"],
    ]
    assert "call 2 does not continue call 1: tokenisation, after 2 equal tokens" in "".join(rest)


def test_a_call_that_continues_its_row_says_so() -> None:
    story = TracerTraceToTriplet().explain([*gateway_call("a", 1, [1], [2]), *gateway_call("b", 2, [1, 2, 3], [4])])
    assert [each.cells()[-2:] for each in story.calls] == [("1", "first_call"), ("1", "continues its row")]


def test_counts_are_shown_where_the_ids_were_not_kept() -> None:
    counts = {"agentlightning.call.prompt_tokens": 11, "agentlightning.call.completion_tokens": 3}
    (call,) = TracerTraceToTriplet().explain(gateway_call("a", 1, [], [], **counts)).calls
    assert (call.prompt_tokens, call.completion_tokens, call.has_tokens, call.reason) == (11, 3, False, "no_tokens")


@pytest.mark.parametrize(
    ("spans", "advice"),
    [
        ([], "no model call was recorded: pass base_url=llm.endpoint to the agent's client"),
        (
            [chat("t", None, 1, 2), chat("u", None, 3, 4)],
            "2 model calls seen by the tracer only: the agent's client did not use the gateway's base URL",
        ),
        (gateway_call("g", 1, [], [], state="no_tokens"), "1 model call no_tokens: the model server returned no token"),
        (gateway_call("g", 1, [1], [2], logprobs=[]), "1 model call no_logprobs: the model server returned no"),
        (gateway_call("g", 1, [1], [2], logprobs=[-1.0, -2.0]), "1 model call bad_logprobs: the model server did not"),
        (failed("upstream_error", "it is asleep"), "1 model call upstream_error: the model server failed"),
        (failed("refused", "no such model"), "(error: no such model)"),
        (failed("client_left", "the agent closed"), "increase the timeout of its client"),
        (gateway_call("g", 1, [1], [2], **{"agentlightning.stale": True}), "1 model call stale: they arrived after"),
    ],
)
def test_a_rollout_without_a_trainable_call_is_an_error_that_says_what_to_try(spans: list[Span], advice: str) -> None:
    story = TracerTraceToTriplet().explain(spans)
    with pytest.raises(NoTrainableCallError) as raised:
        story.require_trainable()
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, AgentLightningError)
    assert advice in str(raised.value)
    assert "To try:" in str(raised.value)


def test_a_rollout_with_one_trainable_call_is_no_error() -> None:
    TracerTraceToTriplet().explain([*gateway_call("g", 1, [1], [2]), chat("t", None, 1, 2)]).require_trainable()


def test_what_an_adapter_leaves_out_is_said_to_be_left_out_by_it() -> None:
    story = TracerTraceToTriplet(agent_match="critic").explain(two_turns())
    assert story.counts() == {"not_selected": 2}
    assert "check its agent_match" in str(story)
    assert LlmProxyTraceToTriplet().explain(two_turns()).counts() == {}


def test_several_attempts_are_explained_together() -> None:
    first = gateway_call("a", 1, [1], [2], attempt_id="at-1")
    second = gateway_call("b", 2, [1, 2, 3], [4], attempt_id="at-2")
    story = TracerTraceToTriplet().explain([*first, *second])
    assert [(each.number, each.row, each.begins) for each in story.calls] == [
        (1, 1, "first_call"),
        (2, 1, "first_call"),
    ]


def test_a_user_reads_it_without_a_tracer_or_a_gateway_of_ours() -> None:
    attributes: dict[str, Any] = {
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.operation.name": "chat",
    }
    (call,) = TracerTraceToTriplet().explain([with_attributes(span("t", "chat m", None, 1, 2), attributes)]).calls
    assert (call.model, call.prompt_tokens, call.completion_tokens, call.seen_by) == ("m", 7, None, "tracer")
