"""The reason why a call begins a row: from the words of two calls, and from their tokens where words are not kept."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.adapter import ModelCall, SampleReading, model_calls, samples_from_calls
from agentlightning.adapter.rows.seams import RowStart, describe
from agentlightning.types import Span
from tests.adapter.span_maker import conversation, gateway_call, spoken_call

SYSTEM = "You are a helpful agent. Be brief and kind to those who ask."
FIRST = conversation("six times seven?", system=SYSTEM)
SECOND = conversation("six times seven?", "42", "and eight?", system=SYSTEM)
ALL_OF_IT = [*SECOND, {"role": "assistant", "content": "48"}]


def read(*spans: list[Span], agents: dict[str, str] | None = None, **options: Any) -> SampleReading:
    calls = model_calls([made for several in spans for made in several])
    named = [_named(call, (agents or {}).get(call.call_id)) for call in calls]
    return samples_from_calls(named, **options)


def _named(call: ModelCall, agent: str | None) -> ModelCall:
    fields = {name: getattr(call, name) for name in ModelCall.__dataclass_fields__}
    return ModelCall(**{**fields, "agent": agent})


def first() -> list[Span]:
    return spoken_call("a", 1, [1, 2], [3, 4, 9], FIRST, "42")


def second() -> list[Span]:
    return spoken_call("b", 2, [1, 2, 3, 4, 9, 5], [6, 7, 9], SECOND, "48")


def after(messages: list[dict[str, Any]], tokens: list[int], **options: Any) -> RowStart:
    """Return why a third call with this prompt begins a row."""
    return read(first(), second(), spoken_call("c", 3, tokens, [8], messages), **options).starts[-1]


def test_words_that_came_back_as_they_were_are_drift() -> None:
    start = after([*ALL_OF_IT, {"role": "user", "content": "thanks"}], [1, 2, 3, 4, 9, 5, 67, 9, 5])
    assert start == RowStart("c", "tokenisation", previous="b", at=6)


def test_thoughts_that_a_template_leaves_out_are_the_templates_doing() -> None:
    thought = spoken_call("a", 1, [1, 2], [70, 71, 72, 3, 4, 9], FIRST, "42")
    (_, start) = read(thought, second()).starts
    assert start == RowStart("b", "template", previous="a", at=2)


@pytest.mark.parametrize("answer", ["<think>6*7</think>42", " 42\n"])
def test_an_answer_that_templates_show_in_their_own_way_is_likelier_theirs(answer: str) -> None:
    first_call = spoken_call("a", 1, [1, 2], [3, 4, 9], FIRST, answer)
    messages = conversation("six times seven?", answer, "and eight?", system=SYSTEM)
    (_, start) = read(first_call, spoken_call("b", 2, [1, 2, 34, 9, 5], [6], messages)).starts
    assert start.cause == "template"


@pytest.mark.parametrize(
    ("spelt", "cause"), [({3: "4", 4: "2", 34: "42", 43: "4 2"}, "tokenisation"), ({34: "x"}, "template")]
)
def test_with_the_models_own_text_it_is_certain(spelt: dict[int, str], cause: str) -> None:
    def decode(ids: Any) -> str:
        return "".join(spelt.get(id, f"<{id}>") for id in ids)

    (_, start) = read(first(), spoken_call("b", 2, [1, 2, 34, 9, 5], [6], SECOND), decode=decode).starts
    assert start.cause == cause


def changed(*places: tuple[int, str]) -> list[dict[str, Any]]:
    """The whole conversation with other texts at some places, and one more question."""
    messages = [dict(message) for message in ALL_OF_IT]
    for place, text in places:
        messages[place]["content"] = text
    return [*messages, {"role": "user", "content": "thanks"}]


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (changed((1, "six times nine?")), "edit"),
        (changed((2, "an answer that nobody gave")), "edit"),
        (changed((0, SYSTEM + " It is 10:05.")), "edit"),
        ([*changed()[:3], {"role": "user", "content": "a note"}, *changed()[3:]], "edit"),
        ([ALL_OF_IT[0], {"role": "user", "content": "summary: 42, 48"}, *changed()[4:]], "edit"),
        ([ALL_OF_IT[0], *changed()[3:]], "truncation"),
        (changed((1, "six times")), "truncation"),
        (changed((0, SYSTEM[:30])), "truncation"),
        (changed((0, "Criticise what others did!")), "other_agent"),
        (conversation("another question", system=SYSTEM), "other_agent"),
        (conversation("another question", system="Criticise what others did!"), "other_agent"),
    ],
)
def test_what_an_agent_changed_is_told_by_the_first_line_that_differs(
    messages: list[dict[str, Any]], cause: str
) -> None:
    assert after(messages, [1, 99, 98, 97]).cause == cause


def with_tool(result: str, *more: str) -> list[dict[str, Any]]:
    return conversation("look it up", "I look it up", f"tool: {result}", *more)


def test_the_changed_result_of_a_tool_is_told_as_such() -> None:
    calls = [
        spoken_call("a", 1, [1], [2, 9], with_tool("")[:1], "I look it up"),
        spoken_call("b", 2, [1, 2, 9, 3], [4, 9], with_tool("nothing was found here"), "so be it"),
    ]
    again = spoken_call("c", 3, [1, 2, 9, 77, 4, 9, 5], [6], with_tool("much was found", "so be it", "go on"))
    assert read(*calls, again).starts[-1] == RowStart("c", "tool_result_changed", previous="b", at=3)
    cut = spoken_call("c", 3, [1, 2, 9, 77, 4, 9, 5], [6], with_tool("nothing was", "so be it", "go on"))
    assert read(*calls, cut).starts[-1].cause == "truncation"
    other_way = spoken_call("c", 3, [1, 2, 9, 77], [6], with_tool("a third result"))
    assert read(*calls, other_way).starts[-1].cause == "tool_result_changed"


def test_an_answer_that_the_agent_changed_is_an_edit_although_the_prompt_continues_an_earlier_turn() -> None:
    messages = changed((4, "an answer that nobody gave"))
    assert after(messages, [1, 2, 3, 4, 9, 5, 68, 9, 5]) == RowStart("c", "edit", previous="a", at=5)


def test_two_ways_on_from_one_turn_are_a_branch() -> None:
    messages = conversation("six times seven?", "42", "and nine?", system=SYSTEM)
    assert after(messages, [1, 2, 3, 4, 9, 55]) == RowStart("c", "branch", previous="a", at=5)


def test_the_same_words_again_are_a_repeated_prompt_though_the_template_tells_the_time() -> None:
    assert after(FIRST, [1, 22]).cause == "repeated_prompt"


def test_agents_that_a_tracer_names_are_others_whatever_they_say() -> None:
    messages = [*ALL_OF_IT, {"role": "user", "content": "thanks"}]
    agents = {"a": "planner", "b": "planner", "c": "critic"}
    assert after(messages, [1, 2, 3, 4, 9, 5, 67, 9, 5], agents=agents).cause == "other_agent"


def test_tools_that_are_offered_anew_are_an_edit() -> None:
    offered = spoken_call("b", 2, [77, 1, 2, 3, 4, 9, 5], [6], SECOND)
    offered[0].attributes["llm.request.functions.0.name"] = "calculator"
    assert read(first(), offered).starts[-1].cause == "edit"


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ([1, 1, 1, 2, 3, 45, 6, 9, 7], "tokenisation"),
        ([1, 1, 1, 2, 4, 9, 7], "template"),
        ([1, 1, 1, 2, 3, 4, 9, 8], "branch"),
        ([1, 5, 6, 7, 8, 9], "other_agent"),
    ],
)
def test_without_words_the_tokens_tell(prompt: list[int], cause: str) -> None:
    def silent(name: str, number: int, prompt: list[int], completion: list[int]) -> list[Span]:
        request, record = gateway_call(name, number, prompt, completion)
        return [request.model_copy(update={"attributes": {}}), record]

    calls = [silent("a", 1, [1, 1, 1, 2], [3, 4, 9]), silent("b", 2, [1, 1, 1, 2, 3, 4, 9, 5], [6, 9])]
    assert read(*calls, silent("c", 3, prompt, [11])).starts[-1].cause == cause


def test_left_out_turns_are_known_by_their_tokens() -> None:
    turns = [list(range(start, start + 20)) for start in (100, 200, 300, 400)]
    whole = gateway_call("a", 1, [*range(10), *turns[0], *turns[1], *turns[2]], [7])
    short = gateway_call("b", 2, [*range(10), *turns[2], *turns[3]], [7])
    noted = gateway_call("c", 3, [*range(10), *range(900, 930), *turns[0], *turns[1]], [7])
    for made in (whole, short, noted):
        made[0].attributes.clear()
    assert [start.cause for start in read(whole, short, noted).starts] == ["first_call", "truncation", "edit"]


def test_a_seam_is_shown_with_its_tokens_and_words() -> None:
    calls = [*first(), *spoken_call("b", 2, [1, 2, 34, 9, 5], [6], SECOND)]
    reading = samples_from_calls(model_calls(calls))
    shown = describe(reading.seams[0], model_calls(calls), lambda ids: "".join(chr(96 + id) for id in ids))
    assert shown == (
        "call b does not continue call a: tokenisation, after 2 equal tokens\n"
        "  recorded: 1 2 | 3 4 9   'abcdi'\n"
        "  prompt:   1 2 | 34 9 5   'ab\\x82ie'\n"
        "  earlier:  assistant: 42\n"
        "  now:      assistant: 42"
    )


def test_drifts_are_counted_per_turn() -> None:
    reading = read(first(), second(), spoken_call("c", 3, [1, 2, 3, 4, 9, 5, 67, 9], [8], ALL_OF_IT))
    assert (reading.turns, len(reading.drifts), [start.call_id for start in reading.seams]) == (3, 1, ["c"])
