"""The conversation of one attempt: each model call in order, with the messages that are not part of earlier calls.

A prompt usually repeats the full conversation. Only its new messages are shown. If it does not continue the previous
call, it branches from the call with the most common messages. Texts are untrusted: they are shortened here and shown as
plain text by the dashboard.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Line, line_of
from agentlightning.adapter.explain import ExplainedCall
from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in, is_list
from agentlightning.adapter.spans.content import in_order, read_content
from agentlightning.dashboard.values import AttemptConversation, ConversationCall, Part, ShownMessage, ToolCall
from agentlightning.training.ledger import read_rollout
from agentlightning.training.rollouts import Evidence
from agentlightning.types import Span

MOST_TEXT: Final = 200_000
"""Maximum length of a text in characters. The full text is in its span."""
_ROLES: Final = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
_CUT: Final = frozenset(("length", "max_tokens", "max_output_tokens", "MAX_TOKENS"))


def conversation_of(evidence: Evidence, attempt_id: str, first: int | None = None) -> AttemptConversation:
    """Return the calls of one attempt in the order of arrival, late ones included.

    With `first`, return at most that many calls. `evidence` then has only the first spans.
    """
    reading = read_rollout(evidence.rollout, evidence.attempts, evidence.spans)
    end_time = next((a.end_time for a in evidence.attempts if a.attempt_id == attempt_id), None)
    shown = _Shown()
    calls: list[ConversationCall] = []
    cutter = _Cutter()
    for explanation in reading.explain().calls:
        if explanation.call.ref.attempt_id != attempt_id:
            continue
        prompt, replies = _said(explanation.call)
        start, branch = shown.add(explanation.number, prompt, replies[:1])
        calls.append(_call(explanation, prompt[start:], replies, branch, end_time, cutter))
        if first is not None:
            calls[-1] = calls[-1].model_copy(update={"new_row": False, "why": None})
            if len(calls) == first:
                break
    return AttemptConversation(calls=calls, shortened=cutter.shortened, whole=first is None)


def _call(
    explanation: ExplainedCall,
    new: Sequence[Fields],
    replies: Sequence[Fields],
    branch: int | None,
    end_time: float | None,
    cutter: _Cutter,
) -> ConversationCall:
    call = explanation.call
    span = _first_span(call)
    start_time = None if span is None else span.start_time
    return ConversationCall(
        number=explanation.number,
        call_id=call.call_id,
        state=call.state,
        late=call.stale or (end_time is not None and start_time is not None and start_time > end_time),
        cut_off=call.finish_reason in _CUT or call.state == "client_left",
        agent=call.agent,
        model=explanation.model,
        start_time=start_time,
        end_time=None if span is None else span.end_time,
        messages_new=[_message(each, cutter) for each in new],
        branches_from=branch,
        reply=[_message({"role": "assistant", **each}, cutter) for each in replies],
        finish_reason=call.finish_reason,
        error=explanation.error,
        prompt_tokens=explanation.prompt_tokens,
        completion_tokens=explanation.completion_tokens,
        weight_version=call.weight_version,
        new_row=explanation.begins is not None,
        why=explanation.reason or explanation.begins,
    )


class _Shown:
    """The messages shown so far, as a tree of conversation prefixes. 0 is the empty prefix.

    Each message is looked up once. A message at the same position as in the previous call is only compared with it.
    """

    def __init__(self) -> None:
        self._beginnings: dict[tuple[int, Line], int] = {}
        self._latest: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._before: list[Fields] = []
        self._path: list[int] = []

    def add(self, number: int, prompt: list[Fields], reply: list[Fields]) -> tuple[int, int | None]:
        """Return the number of messages of a prompt that were shown before, and the call from which it branches.

        The call is None if the prompt continues the last call or has no common messages with any call.
        """
        same = next((at for at, (a, b) in enumerate(zip(prompt, self._before, strict=False)) if a != b), None)
        path = self._path[: min(len(prompt), len(self._before)) if same is None else same]
        messages, count, last = [*prompt, *reply], len(path), self._path[-1:]
        for message in messages[len(path) :]:
            beginning = (path[-1] if path else 0, line_of(message))
            if count == len(path) < len(prompt) and beginning in self._beginnings:
                count += 1
            path.append(self._beginnings.setdefault(beginning, len(self._beginnings) + 1))
        node = path[count - 1] if count else 0
        branch = self._ended.get(node, self._latest.get(node)) if count and [node] != last else None
        self._latest.update(dict.fromkeys(path, number))
        self._ended[path[-1] if path else 0] = number
        self._before, self._path = messages, path
        return count, branch


# --- reading ---------------------------------------------------------------------------------------------------------


def _first_span(call: ModelCall) -> Span | None:
    """Return the span with the time of a call: the gateway's, otherwise a tracer's."""
    spans = call.spans
    return None if spans is None else spans.request or spans.record or spans.seen


def _said(call: ModelCall) -> tuple[list[Fields], list[Fields]]:
    """Return the messages of the prompt, and the replies, from the first span with messages."""
    spans = call.spans
    own = () if spans is None else (spans.request, spans.seen, *spans.also, spans.record)
    for span in own:
        if span is None:
            continue
        content = read_content(span.attributes, span.events)
        prompt = in_order(content.prompt)
        replies = [as_dict(each.get("message")) or each for each in in_order(content.completion)]
        if prompt or any(each.get("content") or each.get("tool_calls") for each in replies):
            answers = [each for each in replies if each.get("content") or each.get("tool_calls") or _reasoning(each)]
            return prompt, answers
    return [], []


def _message(message: Mapping[str, object], cutter: _Cutter) -> ShownMessage:
    parts = [Part(type="reasoning", text=cutter.cut(text)) for text in _reasoning(message)]
    parts += _content(message.get("content"), cutter)
    name, call_id = message.get("name"), message.get("tool_call_id")
    return ShownMessage(
        role=_role(message),
        content=parts,
        tool_calls=[
            ToolCall(id=_text_or_none(each.get("id")), name=_name(each), arguments=cutter.cut(_arguments(each)))
            for each in dicts_in(message.get("tool_calls"))
        ],
        tool_call_id=_text_or_none(call_id),
        name=_text_or_none(name),
    )


def _role(message: Mapping[str, object]) -> str:
    role = str(message.get("role") or "user")
    return _ROLES.get(role, role)


def _reasoning(message: Mapping[str, object]) -> list[str]:
    texts = (message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return [text for text in texts if isinstance(text, str) and text]


def _content(content: object, cutter: _Cutter) -> list[Part]:
    if isinstance(content, str) and content.startswith("[") and '"type"' in content:
        parts = decoded(content)
        content = parts if is_list(parts) else content
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Part(type="text", text=cutter.cut(content))]
    if not is_list(content):
        return [Part(type="json", text=cutter.cut(_json(content)))]
    return [_part(each, cutter) for each in content]


def _part(part: object, cutter: _Cutter) -> Part:
    fields = as_dict(part)
    kind = str(fields.get("type", ""))
    if isinstance(part, str):
        return Part(type="text", text=cutter.cut(part))
    if kind in ("thinking", "reasoning"):
        reasoning = fields.get("thinking") or fields.get("text") or fields.get("summary")
        return Part(type="reasoning", text=cutter.cut(reasoning if isinstance(reasoning, str) else _json(reasoning)))
    if "image" in kind:
        return _image(fields)
    text = fields.get("text")
    if isinstance(text, str):
        return Part(type="text", text=cutter.cut(text))
    return Part(type="json", text=cutter.cut(_json(part)))


def _image(part: Mapping[str, object]) -> Part:
    """Return the digest, size and kind of an image without its content."""
    source = as_dict(part.get("source"))
    url = as_dict(part.get("image_url")).get("url") or part.get("image_url") or source.get("data") or source.get("url")
    text = url if isinstance(url, str) else _json(part)
    media, data = source.get("media_type"), text
    if text.startswith("data:"):
        head, _, data = text.partition(",")
        media = head.removeprefix("data:").partition(";")[0]
    if text.startswith("data:") or "data" in source:
        try:
            raw = b64decode(data, validate=False)
            return Part(
                type="image", sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw), media_type=_text_or_none(media)
            )
        except ValueError:
            pass
    return Part(type="image", sha256=hashlib.sha256(text.encode(errors="replace")).hexdigest())


def _name(call: Mapping[str, object]) -> str:
    return str(as_dict(call.get("function")).get("name") or call.get("name") or "?")


def _arguments(call: Mapping[str, object]) -> str:
    arguments: Any = as_dict(call.get("function")).get("arguments", call.get("arguments"))
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


class _Cutter:
    """Shortens texts, and counts the shortened ones."""

    def __init__(self) -> None:
        self.shortened = 0

    def cut(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no JSON
        if len(text) <= MOST_TEXT:
            return text
        self.shortened += 1
        return f"{text[:MOST_TEXT]}... ({len(text)} characters; the full text is in the span)"
