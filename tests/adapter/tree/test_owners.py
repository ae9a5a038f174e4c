"""The owner of a call: a name is right or absent, never wrong, and every call counts once, whoever recorded it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter import TracerTraceToTriplet, model_calls
from agentlightning.types import Span
from tests.adapter.span_maker import conversation, said, span, spoken_call, with_attributes


def agent(name: str, start: float, end: float, parent: str | None = None, id: str | None = None) -> Span:
    made = span(id or f"agent-{name}", f"invoke_agent {name}", parent, start, end)
    return with_attributes(made, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name})


def told(
    id: str, start: float, end: float, parent: str | None = None, scope: str = "framework", **attributes: Any
) -> Span:
    """A call as an instrumentation records it."""
    made = with_attributes(span(id, "chat", parent, start, end), {"gen_ai.operation.name": "chat", **attributes})
    return made.model_copy(update={"scope": {"name": scope}})


def record(id: str, number: int, start: float, end: float, words: str, answer: str = "yes", **more: Any) -> list[Span]:
    made = spoken_call(id, number, [number], [number + 100], conversation(words), answer, start=start, **more)
    return [each.model_copy(update={"end_time": end}) for each in made]


def owners(spans: list[Span], agent_match: str | None = None) -> dict[str, str]:
    """Return the agents that the adapter names, by the gateway's ids of the calls."""
    triplets = TracerTraceToTriplet(agent_match=agent_match).read(spans).triplets
    return {triplet.metadata["call_id"]: triplet.metadata["agent_name"] for triplet in triplets}


def unknown(spans: list[Span], agent_match: str) -> int:
    problems = TracerTraceToTriplet(agent_match=agent_match).read(spans).problems
    return sum(problem.kind == "unknown_agent" for problem in problems)


SIDE_BY_SIDE = [agent("a", 0, 10), agent("b", 1, 11)]


@pytest.mark.parametrize("named", ["agent-b", "tool-of-b"])
def test_of_agents_side_by_side_the_span_that_a_request_names_tells_whose_a_call_is(named: str) -> None:
    request, raw = record("r", 1, 3, 4, "one")
    raw = with_attributes(raw, {"agentlightning.call.client_span": f"{'t' * 32}-{named}"})
    spans = [*SIDE_BY_SIDE, span("tool-of-b", "tool", "agent-b", 2, 8), request, raw]
    assert owners(spans) == {"r": "b"}
    assert owners(spans, "^b$") == {"r": "b"}
    assert owners(spans, "^a$") == {}


def test_of_agents_side_by_side_the_words_tell_whose_a_call_is() -> None:
    spans = [
        *SIDE_BY_SIDE,
        told("sa", 2, 8, "agent-a", **said(conversation("one"))),
        told("sb", 2, 8, "agent-b", **said(conversation("two"))),
        *record("r2", 1, 3, 4, "two"),
        *record("r1", 2, 3, 4, "one"),
    ]
    assert owners(spans) == {"r1": "a", "r2": "b"}
    assert owners(spans, "^b$") == {"r2": "b"}
    assert unknown(spans, "^b$") == 0


def test_where_nothing_proves_whose_a_call_is_it_has_no_name_and_a_filter_by_name_refuses_it() -> None:
    spans = [
        *SIDE_BY_SIDE,
        told("sa", 2, 8, "agent-a"),
        told("sb", 2, 8, "agent-b"),
        *record("r1", 1, 3, 4, "one"),
        *record("r2", 2, 3, 4, "two"),
    ]
    assert owners(spans) == {"r1": "*", "r2": "*"}
    assert len(model_calls(spans)) == 2
    assert (owners(spans, "^b$"), unknown(spans, "^b$")) == ({}, 2)
    assert owners(spans, "^(a|b)$") == {"r1": "*", "r2": "*"}  # whosever they are, they match
    assert (owners(spans, "^c$"), unknown(spans, "^c$")) == ({}, 0)


def test_equal_words_at_the_same_time_have_no_name_unless_the_answers_differ() -> None:
    def spans(first: str, second: str) -> list[Span]:
        return [
            *SIDE_BY_SIDE,
            told("sa", 2, 8, "agent-a", **said(conversation("same"), first)),
            told("sb", 2, 8, "agent-b", **said(conversation("same"), second)),
            *record("r1", 1, 3, 4, "same", first),
            *record("r2", 2, 3, 4, "same", second),
        ]

    assert owners(spans("yes", "yes")) == {"r1": "*", "r2": "*"}
    assert owners(spans("yes", "no")) == {"r1": "a", "r2": "b"}


def test_calls_of_one_agent_at_the_same_time_are_its_own_whichever_is_which() -> None:
    spans = [
        agent("a", 0, 10),
        agent("b", 20, 30),
        *(told(f"s{n}", 2, 8, "agent-a", **said(conversation("same"))) for n in range(3)),
        *(made for n in range(3) for made in record(f"r{n}", n, 3, 4, "same")),
    ]
    assert owners(spans) == dict.fromkeys(("r0", "r1", "r2"), "a")


def test_an_agent_as_a_tool_of_another_one_has_its_own_calls() -> None:
    spans = [
        agent("outer", 0, 20),
        told("s1", 1, 2, "agent-outer"),
        span("tool", "execute_tool", "agent-outer", 3, 15),
        agent("inner", 4, 14, "tool"),
        told("s2", 5, 8, "agent-inner"),
        told("s3", 16, 19, "agent-outer"),
        *record("r1", 1, 1.2, 1.8, "x"),
        *record("r2", 2, 5.2, 7.8, "y"),
        *record("r3", 3, 16.2, 18.8, "z"),
    ]
    assert owners(spans) == {"r1": "outer", "r2": "inner", "r3": "outer"}


def test_a_call_that_no_tracer_saw_belongs_to_the_only_agent_around_it() -> None:
    spans = [agent("a", 0, 5), agent("b", 6, 11), *record("r1", 1, 1, 2, "x"), *record("r2", 2, 7, 8, "x")]
    assert owners(spans) == {"r1": "a", "r2": "b"}
    nested = [agent("a", 0, 20), agent("b", 6, 11, "agent-a"), *record("r", 2, 7, 8, "x")]
    assert owners(nested) == {"r": "*"}  # a may have made it while b ran


def test_the_role_in_the_url_says_whose_call_it_is_whatever_runs_beside_it() -> None:
    spans = [
        *SIDE_BY_SIDE,
        *record("r1", 1, 3, 4, "x", **{"agentlightning.call.role": "b"}),
        *record("r2", 2, 3, 4, "x"),
    ]
    assert owners(spans) == {"r1": "b", "r2": "*"}
    assert (owners(spans, "^b$"), unknown(spans, "^b$")) == ({"r1": "b"}, 1)


def test_an_instrumentation_without_a_place_and_one_without_ids_tell_of_one_call_together() -> None:
    """The client's span has the id and no parent, the model's span the agent, as in OpenInference for LangChain."""
    spans = [
        *SIDE_BY_SIDE,
        told("sa", 2, 8, "agent-a", "langchain", **said(conversation("one"))),
        told("sb", 2, 8, "agent-b", "langchain", **said(conversation("two"))),
        told("ca", 2.5, 7.5, None, "openai", **{"gen_ai.response.id": "r1"}, **said(conversation("one"))),
        told("cb", 2.5, 7.5, None, "openai", **{"gen_ai.response.id": "r2"}, **said(conversation("two"))),
        *record("r1", 1, 3, 4, "one"),
        *record("r2", 2, 3, 4, "two"),
    ]
    assert len(model_calls(spans)) == 2
    assert owners(spans) == {"r1": "a", "r2": "b"}
    without_gateway = [each for each in spans if each.scope]
    assert len(model_calls(without_gateway)) == 2


def test_a_wrapper_without_words_is_no_call() -> None:
    spans = [
        told("wrapper", 0, 20),
        told("s1", 1, 5, "wrapper", "client", **said(conversation("one"))),
        told("s2", 6, 9, "wrapper", "client", **said(conversation("two"))),
    ]
    assert [call.call_id for call in model_calls(spans)] == ["s1", "s2"]


def choices(id: str, number: int, start: float, end: float, words: str) -> list[Span]:
    """The gateway's records of a call with two choices."""
    more = {"agentlightning.call.choices": 2}
    first = record(id, number, start, end, words, "yes", **more, **{"agentlightning.call.choice": 0})
    second = record(f"{id}-1", number, start, end, words, "no", response_id=f"{id}#1", **more)
    return [*first, second[0], with_attributes(second[1], {"agentlightning.call.choice": 1})]


@pytest.mark.parametrize("told_ids", [True, False])
def test_every_choice_of_a_call_is_of_the_agent_that_made_it_and_has_its_own_tokens(told_ids: bool) -> None:
    def seen(id: str, name: str, words: str) -> Span:
        attributes = {"gen_ai.response.id": id} if told_ids else said(conversation(words), "yes")
        return told(f"s-{id}", 2, 8, f"agent-{name}", **attributes)

    spans = [
        *SIDE_BY_SIDE,
        seen("r1", "a", "one"),
        seen("r2", "b", "two"),
        *choices("r1", 1, 3, 4, "one"),
        *choices("r2", 2, 3, 4, "two"),
    ]
    assert owners(spans) == {"r1": "a", "r1-1": "a", "r2": "b", "r2-1": "b"}
    assert len(model_calls(spans)) == 4
    answers = [triplet.response["raw_content"][0]["content"] for triplet in TracerTraceToTriplet().adapt(spans)]
    assert sorted(answers) == ["no", "no", "yes", "yes"]


# --- random agents ---------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Agents that ran side by side and within each other, with what is true of their calls."""

    spans: list[Span] = field(default_factory=list[Span])
    owner: dict[str, str] = field(default_factory=dict[str, str])
    """The owner of every call that the gateway saw."""
    names: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Instrumentation:
    scope: str
    has_ids: bool
    has_words: bool
    has_answers: bool
    has_places: bool


instrumentations = st.lists(
    st.builds(Instrumentation, st.sampled_from(["x", "y"]), *(st.booleans() for _ in range(4))),
    max_size=2,
    unique_by=lambda each: each.scope,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    trace = Trace()
    tools = draw(instrumentations)
    gateway_keeps_words = draw(st.integers(0, 4)) > 0
    seconds = draw(st.sampled_from([0.002, 0.2, 1.0]))
    for number in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["a", "b", "c"]))
        start = draw(st.integers(0, 20)) * seconds
        length = draw(st.integers(4, 20)) * seconds
        parent = draw(
            st.sampled_from([None, *(each.span_id for each in trace.spans if each.name.startswith("invoke"))])
        )
        around = next((each for each in trace.spans if each.span_id == parent), None)
        if around is not None and around.start_time is not None and around.end_time is not None:
            start = max(start, around.start_time)
            length = min(length, around.end_time - start)
            if length <= 0:
                continue
        id = f"agent-{number}"
        trace.spans.append(agent(name, start, start + length, parent, id))
        trace.names.append(name)
        for _ in range(draw(st.integers(0, 3))):
            _add_call(draw, trace, id, name, (start, start + length), tools, gateway_keeps_words)
    trace.spans = draw(st.permutations(trace.spans))
    return trace


def _add_call(
    draw: st.DrawFn,
    trace: Trace,
    parent: str,
    name: str,
    within: tuple[float, float],
    tools: list[Instrumentation],
    gateway_keeps_words: bool,
) -> None:
    number = len(trace.owner) + 1
    start, end = within
    began = start + (end - start) * draw(st.integers(0, 8)) / 10
    ended = began + (end - began) * draw(st.integers(1, 10)) / 10
    quarter = (ended - began) / 4
    words, answer = draw(st.sampled_from(["one", "two"])), draw(st.sampled_from(["yes", "no"]))
    call = f"call-{number}"
    trace.owner[call] = name
    made = record(call, number, began + quarter, ended - quarter, words, answer, response_id=f"reply-{number}")
    if not gateway_keeps_words:
        made = [_without_words(each) for each in made]
    clients = [None, parent, *(f"{tool.scope}-{number}" for tool in tools)]
    if (client := draw(st.sampled_from(clients))) is not None:
        made[1] = with_attributes(made[1], {"agentlightning.call.client_span": f"{'t' * 32}-{client}"})
    trace.spans += made
    for tool in tools:
        attributes = {"gen_ai.response.id": f"reply-{number}"} if tool.has_ids else {}
        if tool.has_words:
            attributes |= said(conversation(words), answer if tool.has_answers else None)
        place = parent if tool.has_places else None
        trace.spans.append(told(f"{tool.scope}-{number}", began, ended, place, tool.scope, **attributes))


def _without_words(made: Span) -> Span:
    others = {key: value for key, value in made.attributes.items() if not key.startswith(("gen_ai.p", "gen_ai.c"))}
    return made.model_copy(update={"attributes": others})


@pytest.mark.heavy
@settings(max_examples=400, deadline=None)
@given(traces())
def test_a_name_is_right_or_absent_and_each_call_is_counted_once(trace: Trace) -> None:
    if not trace.spans:
        return
    assert sorted(call.call_id for call in model_calls(trace.spans)) == sorted(trace.owner)
    named = owners(trace.spans)
    assert sorted(named) == sorted(trace.owner)
    assert {call: name for call, name in named.items() if name not in ("*", trace.owner[call])} == {}
    for name in set(trace.names):
        calls = owners(trace.spans, f"^{re.escape(name)}$")
        assert {call for call in calls if trace.owner[call] != name} == set()
        missing = [call for call, owner in trace.owner.items() if owner == name and call not in calls]
        assert len(missing) <= unknown(trace.spans, f"^{re.escape(name)}$")


def test_a_random_id_is_no_name_of_an_agent() -> None:
    for made_up in ("3f2b8a5e-0c1d-4e7f-9a6b-1234567890ab", "3f2b8a5e0c1d4e7f9a6b1234567890ab"):
        agent = with_attributes(span("A", "invoke_agent", None, 0, 40), {"gen_ai.agent.name": made_up})
        (triplet,) = TracerTraceToTriplet()([agent, *spoken_call("a", 1, [1], [2], conversation("hi"))])
        assert triplet.metadata["agent_name"] == "*"


@pytest.mark.parametrize(
    "nameless",
    [
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "3f2b8a5e-0c1d-4e7f-9a6b-1234567890ab"},
        {"gen_ai.operation.name": "invoke_agent"},
        {"openinference.span.kind": "AGENT"},
    ],
)
def test_a_call_of_an_agent_without_a_name_just_before_that_of_another_is_not_the_others(
    nameless: dict[str, Any],
) -> None:
    spans = [
        with_attributes(span("A", "invoke_agent", None, 0, 9.99), nameless),
        told("t", 9, 9.99, "A", **{"gen_ai.response.id": "r"}),
        *record("r", 1, 9.2, 9.98, "one", response_id="r"),
        agent("other", 9.995, 20),
    ]
    assert owners(spans) == {"r": "*"}
    assert (owners(spans, "^other$"), unknown(spans, "^other$")) == ({}, 0)


def test_a_call_of_no_agent_just_before_that_of_an_agent_is_not_its_own() -> None:
    spans = [
        told("t", 9, 9.99, **{"gen_ai.response.id": "r"}),
        *record("r", 1, 9.2, 9.98, "one", response_id="r"),
        agent("other", 9.995, 20),
    ]
    assert owners(spans) == {"r": "*"}


def test_an_agent_with_a_made_up_name_within_another_is_not_the_other() -> None:
    inner = {"gen_ai.agent.name": "3f2b8a5e-0c1d-4e7f-9a6b-1234567890ab"}
    spans = [
        agent("outer", 0, 10),
        with_attributes(span("inner", "invoke_agent", "agent-outer", 2, 8), inner),
        told("t", 3, 5, "inner", **{"gen_ai.response.id": "r"}),
        *record("r", 1, 3, 4, "one", response_id="r"),
    ]
    assert owners(spans) == {"r": "*"}
