"""The messages of one model call, in a form in which two calls can be compared.

Two messages are equal if their content is equal. White space at the ends, the formatting of JSON in the arguments of
tools, ids of tool calls and reasoning in addition to the answer are ignored. `rows/seams.py` compares tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agentlightning.adapter.spans.attributes import as_dict, decode_text, dicts_in, is_list
from agentlightning.adapter.spans.content import in_order, read_content
from agentlightning.types import Span

_ROLES: Final = {"developer": "system", "function": "tool", "human": "user", "ai": "assistant", "model": "assistant"}
_TOOLS: Final = ("llm.request.functions.", "gen_ai.request.functions.", "gen_ai.tool.definitions", "llm.tools.")


class Line(NamedTuple):
    """One message."""

    role: str
    text: str
    calls: str = ""
    """The tools that the message calls, with their arguments, as one text."""

    def describe(self) -> str:
        """Return the message as readable text."""
        return f"{self.role}: {' '.join(part for part in (self.text, self.calls) if part)}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a prompt, and the answer."""

    system: str
    """The leading system messages."""
    tools: str
    """Definitions of the tools."""
    lines: tuple[Line, ...]
    """All other messages of the prompt."""
    answer: Line | None
    verbatim: bool
    """True if the answer is plain text, without parts that a chat template renders in a special way."""

    @property
    def request(self) -> tuple[str, tuple[Line, ...]]:
        """The messages of the prompt. Tools are excluded, because the gateway and tracers record them differently."""
        return self.system, self.lines

    @property
    def whole(self) -> tuple[Line, ...]:
        """The lines with the answer."""
        return self.lines if self.answer is None else (*self.lines, self.answer)


def conversation_of(*spans: Span | None) -> Conversation | None:
    """Return the conversation of the first span that records one, or None.

    A span whose texts were not kept has none.
    """
    conversations = (_read(span) for span in spans if span is not None)
    return next((conversation for conversation in conversations if conversation is not None), None)


def _read(span: Span) -> Conversation | None:
    content = read_content(span.attributes, span.events)
    messages = in_order(content.prompt)
    if not messages or not all(map(_has_text, messages)):
        return None
    lines = [line_of(message) for message in messages]
    leading = next((at for at, line in enumerate(lines) if line.role != "system"), len(lines))
    tools = [f"{key}={value}" for key, value in span.attributes.items() if key.startswith(_TOOLS)]
    answers = [as_dict(each.get("message")) or each for each in in_order(content.completion)]
    has_answer = bool(answers) and _has_text(answers[0])
    text = answers[0].get("content") if has_answer else None
    return Conversation(
        system="\n".join(line.text for line in lines[:leading]),
        tools="\n".join(sorted(tools)),
        lines=tuple(lines[leading:]),
        answer=line_of({"role": "assistant", **answers[0]}) if has_answer else None,
        verbatim=isinstance(text, str)
        and text == text.strip()
        and "<" not in text
        and not any(answers[0].get(key) for key in ("tool_calls", "reasoning_content", "reasoning")),
    )


def _has_text(message: Mapping[str, object]) -> bool:
    called = dicts_in(message.get("tool_calls"))
    return "content" in message or any("name" in call or "function" in call for call in called)


def line_of(message: Mapping[str, object]) -> Line:
    """Return a message in a normal form in which equal messages are equal."""
    role = str(message.get("role") or "")
    role = _ROLES.get(role, role)
    calls = [_call(call) for call in dicts_in(message.get("tool_calls"))]
    text = _text(message.get("content"))
    return Line(role, _in_one_spelling(text) if role == "tool" else text, " ".join(calls))


def _call(call: Mapping[str, object]) -> str:
    fields = as_dict(call.get("function")) or call
    arguments = fields.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    return f"{fields.get('name')}({_in_one_spelling(text)})"


def _in_one_spelling(text: str) -> str:
    """Return JSON with sorted keys; another text unchanged."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text.strip()


def _text(content: object) -> str:
    """Return a content as one text; parts that are no text are shown as JSON."""
    if isinstance(content, str):
        if not (content.startswith("[") and '"type"' in content):
            return content.strip()
        try:
            content = decode_text(content)
        except ValueError:
            return str(content).strip()
    if not is_list(content):
        return "" if content is None else str(content).strip()
    parts = [str(part["text"]) if "text" in part else json.dumps(part, sort_keys=True) for part in dicts_in(content)]
    return "".join(parts).strip()
