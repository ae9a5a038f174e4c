"""Helper calls: those of known programs, found by their texts, and those that a rule of the user names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.adapter.calls.calls import ModelCall, model_calls
from agentlightning.adapter.calls.helpers import call_text, helper_rule, is_known_helper
from tests.adapter.span_maker import spoken_call, with_attributes


def call(*messages: tuple[str, str], **request: Any) -> ModelCall:
    conversation = [{"role": role, "content": content} for role, content in messages]
    spans = spoken_call("c", 1, [1], [2], conversation)
    spans[0] = with_attributes(spans[0], {f"gen_ai.request.{key}": value for key, value in request.items()})
    [only_call] = model_calls(spans)
    return only_call


COMPACTION = "Your task is to create a detailed summary of the conversation so far, paying close attention to"


@pytest.mark.parametrize(
    "spans",
    [
        call(("user", "quota"), max_tokens=1),
        call(("system", "Summarize this coding conversation in under 50 characters.\n..."), ("user", "hi")),
        call(("system", "You are Claude Code."), ("system", "Generate a concise, sentence-case title (3-7 words)")),
        call(("system", "You are Claude Code."), ("user", "hi"), ("assistant", "hello"), ("user", COMPACTION)),
        call(
            (
                "system",
                "You are a Claude agent.\n\nYou are naming a coding session so the user can pick it out of a long",
            )
        ),
        call(("user", "hi"), ("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use Read")),
        call(("user", "hi"), ("user", "[SUGGESTION MODE: Suggest what the user might naturally type next into it.]")),
        call(*[("user", "on"), ("assistant", "well")] * 40, ("user", COMPACTION)),
        call(("user", f'[{{"type": "text", "text": "{COMPACTION} the files"}}]')),
        call(("user", f"  \n{COMPACTION}")),
        call(("user", f'[{{"type":"text","text":"the files"}}, {{"type":"text","text":"\n {COMPACTION}"}}]')),
        call(("system", "You are a title generator. You output ONLY a thread title. Nothing else."), ("user", "hi")),
        call(("system", "You are a context summarization agent. You are given a conversation between"), ("user", "hi")),
        call(("system", "You are a context summarization assistant. Your task is to read a conversation between a")),
        call(("system", "You are the component that summarizes internal chat history into a given structure.")),
        call(("system", "You are now acting as the managed memory extraction subagent for an AI"), ("user", "hi")),
        call(("system", "You are an expert software engineer that generates concise, one-line Git commit messages ba")),
        call(
            ("system", "*Briefly* summarize this partial conversation about programming.\nInclude"), ("user", "# USER")
        ),
        call(("user", "hi"), ("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary")),
        call(
            ("user", "hi"), ("user", "Analyze *only* the content and structure of your immediately preceding response")
        ),
    ],
)
def test_helper_calls_of_known_programs_are_recognised(spans: ModelCall) -> None:
    assert is_known_helper(spans)


@pytest.mark.parametrize(
    "work",
    [
        call(("user", "quota"), max_tokens=100),
        call(("user", "quota"), ("assistant", "?"), ("user", "disk"), max_tokens=1),
        call(("user", "Explain what 'Summarize this coding conversation in under 50 characters' does")),
        call(("system", "You are Claude Code."), ("user", f"What is meant by: {COMPACTION}")),
        call(("user", f"He said: {COMPACTION}. Then again: {COMPACTION}")),
        call(("user", "x" + " " * 500 + COMPACTION)),
        call(("system", "See: You are a title generator. You output ONLY a thread title"), ("user", "hi")),
        call(("user", COMPACTION), ("assistant", "A summary."), ("user", "go on")),
        call(("system", "Write a title for the user's poem."), ("user", "hi")),
        call(("system", "You are an expert software engineer."), ("user", "Write a one-line Git commit message.")),
    ],
)
def test_the_work_of_an_agent_is_not_taken_for_a_helper_call(work: ModelCall) -> None:
    assert not is_known_helper(work)


def test_a_rule_is_searched_in_the_text_of_the_prompt() -> None:
    named = call(("system", "Be brief."), ("user", "name this chat"))
    assert call_text(named) == "system: Be brief.\nuser: name this chat"
    assert helper_rule(r"^user: name this")(named) is False
    assert helper_rule(re.compile(r"^user: name this", re.MULTILINE))(named) is True
    assert helper_rule(lambda each: each.finish_reason == "stop")(named) is True


@pytest.mark.parametrize("rule", ["(", 1, b"title"])
def test_a_rule_that_is_none_is_refused_when_the_adapter_is_made(rule: Any) -> None:
    with pytest.raises(ValueError, match="ignore"):
        TracerTraceToTriplet(ignore=rule)
