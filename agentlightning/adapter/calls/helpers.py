"""Helper calls: model calls of a program outside its task, such as for a title of the session or a summary of it.

Such a call is not a turn of the agent's task. It is excluded from training (`helper`), has no row, and gets no reward.
The helper calls of known programs are recognised by texts in their prompts. For other helper calls, users set a rule
(`ignore=` of an adapter).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from agentlightning.adapter.calls.calls import ModelCall, model_calls
from agentlightning.adapter.calls.conversation import conversation_of
from agentlightning.types import Span

Ignore = str | re.Pattern[str] | Callable[[ModelCall], bool]
"""Selects helper calls: a regular expression that is searched in `call_text`, or a function of the call."""

_PROMPT: Final = "gen_ai.prompt"
_FIRST_ROLE, _FIRST_CONTENT = f"{_PROMPT}.0.role", f"{_PROMPT}.0.content"
_SECOND_ROLE: Final = f"{_PROMPT}.1.role"
_MAY_BE_SYSTEM: Final = tuple((f"{_PROMPT}.{index}.role", f"{_PROMPT}.{index}.content") for index in range(3))
_SYSTEM: Final = (
    "extract a 2-3 word title that captures the new topic",  # Claude Code: the title of the terminal
    "Summarize this coding conversation in under 50 characters",  # Claude Code: the list of sessions
    "succinct title for a coding session based on the provided description",  # Claude Code: a remote session
    "Generate a concise, sentence-case title",  # Claude Code: the title of a session
    "You are naming a coding session so the user can pick it out",  # Claude Code 2.1.300: the title of a session
    "Write a short summary label describing what these tool calls accomplished",  # Claude Code: a row of a list
)
"""Texts anywhere in a system message. Plain texts, because a pattern takes a millisecond for 20 KB."""
_SYSTEM_OPENINGS: Final = (
    "You are a title generator. You output ONLY a thread title",  # opencode
    "You are a context summarization agent. You are given a conversation",  # opencode: compaction
    "You are a context summarization assistant. Your task is to read a conversation",  # pi: compaction
    "You are the component that summarizes internal chat history into a given structure",  # qwen-code: compaction
    "You are now acting as the managed memory extraction subagent",  # qwen-code
    "You are an expert software engineer that generates concise, one-line Git commit messages",  # aider
    "*Briefly* summarize this partial conversation about programming",  # aider: compaction
)
_LAST_OPENINGS: Final = (
    "Your task is to create a detailed summary of the conversation so far",  # Claude Code: compaction
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",  # Claude Code 2.1.300: compaction
    "Generate a short kebab-case name (2-4 words) that captures the main topic",  # Claude Code: a session
    "The user stepped away and is coming back. Recap",  # Claude Code
    "[SUGGESTION MODE: Suggest what the user might naturally type next",  # Claude Code
    "Please write a 5-10 word title for the following conversation",  # Claude Code
    "Generate a title for this conversation:",  # opencode
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # codex: compaction
    "Analyze *only* the content and structure of your immediately preceding response",  # qwen-code: next speaker
)
_OPENS_LAST: Final = re.compile(r'(?:\A|"text": ?")\s{0,64}(?:' + "|".join(map(re.escape, _LAST_OPENINGS)) + ")")
"""Beginnings of a message, or of the text of a block in a message that is a list of blocks."""


def helper_rule(ignore: Ignore | None) -> Callable[[ModelCall], bool]:
    """Return the rule that selects helper calls: those of known programs, and those that `ignore` selects.

    Raises:
        ValueError: `ignore` is neither a valid regular expression nor a function.
    """
    if ignore is None:
        return is_known_helper
    if isinstance(ignore, str | re.Pattern):
        try:
            pattern = re.compile(ignore)
        except re.error as error:
            raise ValueError(f"ignore={ignore!r} is not a valid regular expression: {error}") from error
        return lambda call: is_known_helper(call) or pattern.search(call_text(call)) is not None
    if callable(ignore):
        return lambda call: is_known_helper(call) or bool(ignore(call))
    raise ValueError(f"ignore must be a regular expression or a function of a ModelCall; got {ignore!r}")


def call_text(call: ModelCall) -> str:
    """Return the prompt of a call as text, with each message as `role: content`; empty if it was not recorded."""
    spans = () if call.spans is None else (call.spans.request, call.spans.record, call.spans.seen)
    conversation = conversation_of(*spans)
    if conversation is None:
        return ""
    system = [f"system: {conversation.system}"] if conversation.system else []
    return "\n".join([*system, *(line.describe() for line in conversation.lines)])


def is_known_helper(call: ModelCall) -> bool:
    """True for a helper call of a program whose texts are known."""
    own = call.spans
    spans = () if own is None else (own.request, own.record, own.seen)
    return any(_says_helper(span.attributes) for span in spans if span is not None)


def without_helpers(spans: Sequence[Span], ignore: Ignore | None) -> Sequence[Span]:
    """Return the spans, excluding those of helper calls."""
    if ignore is None and not any(_says_helper(span.attributes) for span in spans):
        return spans
    is_helper = helper_rule(ignore)
    return without_calls(spans, [call for call in model_calls(spans) if is_helper(call)])


def without_calls(spans: Sequence[Span], calls: Iterable[ModelCall]) -> Sequence[Span]:
    """Return the spans, excluding those that record the calls."""
    owners = [call.spans for call in calls if call.spans is not None]
    left_out = {id(span) for own in owners for span in (own.record, own.request, *own.certain)}
    return [span for span in spans if id(span) not in left_out] if left_out else spans


def _says_helper(attributes: Mapping[str, object]) -> bool:
    first = attributes.get(_FIRST_CONTENT)
    if not isinstance(first, str):
        return False
    for role, content in _MAY_BE_SYSTEM:
        if attributes.get(role) not in ("system", "developer"):
            break
        text = str(attributes.get(content))
        if text.startswith(_SYSTEM_OPENINGS) or any(opening in text for opening in _SYSTEM):
            return True
    if _SECOND_ROLE not in attributes and first in ("quota", '[{"type": "text", "text": "quota"}]'):
        return attributes.get("gen_ai.request.max_tokens") == 1  # Claude Code: check of the remaining quota
    role, content = _FIRST_ROLE, _FIRST_CONTENT
    if _SECOND_ROLE in attributes:
        last = sum(key.startswith(f"{_PROMPT}.") and key.endswith(".role") for key in attributes) - 1
        role, content = f"{_PROMPT}.{last}.role", f"{_PROMPT}.{last}.content"
    if attributes.get(role) != "user":
        return False
    text = str(attributes.get(content))  # a cheap test first: it runs for every span
    return any(opening in text for opening in _LAST_OPENINGS) and _OPENS_LAST.search(text) is not None
