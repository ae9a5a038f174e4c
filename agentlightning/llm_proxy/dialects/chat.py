"""OpenAI's chat completions: the fields that request tokens, the tokens of a reply, and the reply without tokens.

Nothing is tokenised here: token ids and log-probabilities are those of the model server, in the format of its engine
(`token_fields`). In a stream, vLLM returns the prompt's ids in the first chunk, and the completion's ids in each chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Dialect, StreamReader, TranslatedDialect, event_of
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    is_list,
    is_object,
    json_bytes,
    object_in,
    objects,
)
from agentlightning.llm_proxy.dialects.pieces import Text
from agentlightning.llm_proxy.dialects.token_fields import IDS, CallTokens, tokens_in
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.llm_proxy.sse import data_of, frame_of

DONE = b"[DONE]"
_IN_CHOICES = {
    "token_ids": "return_token_ids",
    "prompt_token_ids": "return_prompt_token_ids",
    "meta_info": "return_meta_info",
}
"""Fields of a choice that are present only if requested, each with the request field."""
_LAST = ("finish_reason", "stop_reason", "matched_stop")
"""Finish reasons of a choice; the last two are those of vLLM and of SGLang."""


class ChatCompletions(Dialect):
    """`POST /chat/completions`."""

    route = "chat/completions"
    kind = "chat"
    prompt_field = ("messages", list, "a list")
    limit_names = ("max_tokens", "max_completion_tokens")

    @override
    def prompt_of(self, request: Json) -> list[object]:
        return request["messages"]

    @override
    def added(self, request: Json, token_options: Mapping[str, object]) -> Json:
        if request.get("logprobs"):  # the number of them is the agent's choice
            token_options = {name: value for name, value in token_options.items() if name != "top_logprobs"}
        return {name: value for name, value in token_options.items() if not request.get(name)}

    @override
    def tokens_of(self, reply: Json, request: Json) -> CallTokens | None:
        choice = cast(Json, reply["choices"][0])
        return tokens_in(choice, reply.get("prompt_token_ids") or choice.get("prompt_token_ids"))

    @override
    def visible(self, reply: Json, request: Json) -> Json:
        hidden = () if request.get("return_token_ids") else IDS
        in_choices = tuple(name for name, wish in _IN_CHOICES.items() if not request.get(wish))
        return without(reply, hidden, in_choices, keeps_logprobs=bool(request.get("logprobs")))

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return ChunkReader(self, request, choices_asked(request), _ChatChoice, {"object": "chat.completion"})

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        with_usage = bool(object_in(request, "stream_options").get("include_usage"))
        chunks = _chunks_of(self.visible(reply, request), with_usage=with_usage)
        return b"".join([*(frame_of(json_bytes(chunk)) for chunk in chunks), frame_of(DONE)])


def _chunks_of(reply: Json, *, with_usage: bool) -> list[Json]:
    """Return a reply as chunks: the content of a choice, its finish reason, and the usage."""
    head = {name: reply[name] for name in ("id", "created", "model", "system_fingerprint") if name in reply}
    head["object"] = "chat.completion.chunk"
    chunks: list[Json] = []
    for choice in objects(reply.get("choices")):
        message = object_in(choice, "message")
        calls: list[Json] = [{"index": i, **call} for i, call in enumerate(objects(message.get("tool_calls")))]
        delta = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
        delta.update({"tool_calls": calls} if calls else {})
        rest = {name: value for name, value in choice.items() if name not in ("message", *_LAST)}
        chunks.append({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        end: Json = {"index": choice.get("index", 0), "delta": {}, "finish_reason": None}
        end.update({name: choice[name] for name in _LAST if name in choice})
        chunks.append({**head, "choices": [end]})
    if with_usage and reply.get("usage") is not None:
        chunks.append({**head, "choices": [], "usage": reply["usage"]})
    if "prompt_token_ids" in reply and chunks:
        chunks[0]["prompt_token_ids"] = reply["prompt_token_ids"]
    return chunks


def translated(reply: Json, dialect: TranslatedDialect, request: Json) -> tuple[bytes, Json]:
    """Return a chat completion in the dialect of the agent's request: as the events of a stream, and complete."""
    writer = dialect.write_stream(request)
    first: Json = {**reply["choices"][0], "index": 0}
    chunks = _chunks_of({**reply, "choices": [first]}, with_usage=True)
    events = b"".join([*map(writer.feed, chunks), writer.end()])
    assert writer.reply is not None
    return events, writer.reply


class Choice:
    """Collects the pieces of one choice of a stream; by default a choice with a text."""

    def __init__(self, index: int) -> None:
        self.fields: Json = {"index": index}
        self._text = Text()

    def collect(self, piece: Json) -> None:
        """Add one chunk's piece of the choice."""
        if is_list(ids := piece.get("token_ids")):
            self.fields.setdefault("token_ids", []).extend(ids)
        for name, entries in object_in(piece, "logprobs").items():
            if is_list(entries):
                self.fields.setdefault("logprobs", {}).setdefault(name, []).extend(entries)
        for name in (*_LAST, "prompt_token_ids"):
            if piece.get(name) is not None:
                self.fields[name] = piece[name]
        if isinstance(text := piece.get("text"), str):
            self._text.add(text)

    def whole(self) -> Json:
        """Return the choice in the form of a reply without a stream."""
        return {**self.fields, "text": str(self._text)}


class ChunkReader(StreamReader):
    """Reads the chunks of OpenAI's APIs up to `[DONE]`: pieces of `asked` choices; `whole` is the reply's `object`."""

    def __init__(
        self, dialect: Dialect, request: Json, count: int, choice: type[Choice] = Choice, whole: Json | None = None
    ) -> None:
        self._dialect, self._request, self._asked = dialect, request, count
        self._choice, self._whole = choice, whole or {}
        self._reply: Json = {}
        self._choices: dict[int, Choice] = {}

    @property
    @override
    def complete(self) -> bool:
        finished = [choice.fields.get("finish_reason") is not None for choice in self._choices.values()]
        return len(finished) >= self._asked and all(finished)

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is None:
            return frame
        if data.strip() == DONE:
            self.ended = True
            return frame
        chunk = event_of(data)
        if chunk.get("error") is not None and "choices" not in chunk:
            text = f"The model server failed in the stream: {json.dumps(chunk['error'])[:2000]}"
            raise CallFailed(502, text, code="upstream_error", state="upstream_error")
        self._reply.update({name: value for name, value in chunk.items() if name != "choices" and value is not None})
        for piece in objects(chunk.get("choices")):
            if isinstance(index := piece.get("index"), int):
                if index not in self._choices:
                    self._choices[index] = self._choice(index)
                self._choices[index].collect(piece)
        visible = self._dialect.visible(chunk, self._request)
        return frame if visible == chunk else frame_of(json_bytes(visible))

    @override
    def reply(self) -> Json | None:
        if not self._choices:
            return None
        choices = [self._choices[index].whole() for index in sorted(self._choices)]
        return {**self._reply, **self._whole, "choices": choices}


class _ChatChoice(Choice):
    """A choice with a message."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.fields["finish_reason"] = None
        self._message: Json = {"role": "assistant", "content": None}
        """Its texts are `Text` objects while they grow."""
        self._calls: dict[int | str | None, Json] = {}

    @override
    def collect(self, piece: Json) -> None:
        super().collect(piece)
        for name, value in object_in(piece, "delta").items():
            if value is None:
                continue
            if name == "tool_calls":
                for part in objects(value):
                    self._collect_call(part)
            elif isinstance(value, str) and name != "role":
                if not isinstance(so_far := self._message.get(name), Text):
                    so_far = self._message[name] = Text()
                so_far.add(value)
            else:
                self._message[name] = value

    def _collect_call(self, part: Json) -> None:
        index = part.get("index")
        texts: dict[str, Text] = {"name": Text(), "arguments": Text()}
        empty: Json = {"index": index, "id": None, "type": "function", "function": texts}
        call = self._calls.setdefault(index if isinstance(index, (int, str)) else None, empty)
        call.update({field: part[field] for field in ("id", "type") if part.get(field)})
        texts = call["function"]
        for field, text in object_in(part, "function").items():
            # the name is ignored where it is repeated, as some servers do in each piece
            if isinstance(text, str) and not (field == "name" and texts["name"].is_just(text)):
                texts.setdefault(field, Text()).add(text)

    @override
    def whole(self) -> Json:
        message = {name: str(value) if isinstance(value, Text) else value for name, value in self._message.items()}
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {name: str(text) for name, text in call["function"].items()}}
                for call in self._calls.values()
            ]
        return {"index": self.fields["index"], "message": message, **self.fields}


def choices_asked(request: Json) -> int:
    """Return the number of requested choices, at least one."""
    count = request.get("n")
    return max(1, count) if isinstance(count, int) else 1


def without(reply: Json, hidden: tuple[str, ...], in_choices: tuple[str, ...], *, keeps_logprobs: bool) -> Json:
    """Return a reply without the fields `hidden`, its choices without `in_choices` and with empty log-probabilities."""
    if not hidden and not in_choices and keeps_logprobs:
        return reply
    visible = {name: value for name, value in reply.items() if name not in hidden}
    if is_list(choices := reply.get("choices")):
        visible["choices"] = [
            {
                name: value if keeps_logprobs or name != "logprobs" else None
                for name, value in choice.items()
                if name not in in_choices
            }
            if is_object(choice)
            else choice
            for choice in choices
        ]
    return visible
