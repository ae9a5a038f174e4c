"""A dialect: the requests, replies, streams and errors of one family of model APIs. No I/O: bytes in, values out.

For servers that support a dialect, the gateway adds the fields that request tokens, and removes the tokens from the
reply. A *translated* dialect can also be served by servers that support only chat completions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from typing_extensions import override

from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    is_object,
    json_bytes,
    objects,
    read_json,
    read_model_request,
)
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, json_reply, unusable
from agentlightning.llm_proxy.sse import data_of, frame_of

NOT_SAMPLING = frozenset(
    {
        *("model", "messages", "prompt", "input", "instructions", "system", "stream", "stream_options", "n", "tools"),
        *("tool_choice", "logprobs", "top_logprobs", "return_token_ids", "return_prompt_token_ids", "return_meta_info"),
    }
)
"""Fields of a request that are no sampling parameters: only the agent or the gateway may set them."""
_NOT_FILLED_IN = NOT_SAMPLING | {
    *("functions", "function_call", "best_of", "use_beam_search", "echo", "prompt_logprobs", "background", "store"),
    *("previous_response_id", "conversation", "extra_headers", "extra_query", "timeout"),
}
"""Keys of sampling parameters that are not set in a request: they change more than the tokens of one reply, or are
arguments of a client."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of the limit in sampling parameters; the first one that is set counts."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Types of OpenAI's errors by status; other 4xx and 5xx statuses have a common type."""


class Dialect(ABC):
    """One family of APIs."""

    route: str
    """Route below an attempt's URL, and below `api_base` of a server that supports the dialect."""
    kind: str
    """Kind of the call, for spans: `chat`, `completion`, `embedding`, ..."""
    prompt_field: tuple[str, type | tuple[type, ...], str]
    """The field of a request that contains the prompt, its types, and the description of the types for errors."""
    forwarded: tuple[str, ...] = ()
    """Headers of the agent that are also sent to a server of the same dialect."""
    reply_form = "JSON with a list of choices"
    """Description of a usable reply, for errors."""
    limit_names: tuple[str, ...] = ("max_tokens",)
    """Fields of a request that limit the tokens of its reply; the first is the one that the gateway sets."""
    generates = True
    """True if a model generates text, so that a server could return its tokens."""

    # --- requests and errors of agents ---------------------------------------------------------------------------

    def read_request(self, raw: bytes, model: str | None = None) -> Json:
        """Return the request of an agent; `model` replaces the one that it names.

        Raises:
            CallFailed: 400, a field is invalid; names it.
        """
        return read_model_request(raw, *self.prompt_field, model)

    @abstractmethod
    def prompt_of(self, request: Json) -> list[object]:
        """Return the prompt of a request, as messages with a role and a content, for the record."""

    def with_sampling(self, request: Json, sampling: Json) -> Json:
        """Return a request with those sampling parameters that it does not have. The agent's own are kept; null counts
        as missing."""
        if not self.generates:
            return request
        fields = {name: value for name, value in sampling.items() if name not in (*_LIMITS, *_NOT_FILLED_IN)}
        limit = next((name for name in _LIMITS if name in sampling), None)
        if limit is not None and all(request.get(name) is None for name in self.limit_names):
            fields[limit if limit in self.limit_names else self.limit_names[0]] = sampling[limit]
        return {**request, **{name: value for name, value in fields.items() if request.get(name) is None}}

    def wants_stream(self, request: Json) -> bool:
        """True if the agent requested a stream."""
        return bool(request.get("stream"))

    def failure(self, failed: CallFailed) -> JsonReply:
        """Return a failure in the dialect's form; if the server's error already has that form, return it."""
        if failed.upstream_error is not None and self.has_form_of(failed.upstream_error):
            return JsonReply(failed.status, failed.upstream_error, failed.headers)
        return json_reply(self.error_of(failed), failed.status, failed.headers)

    def error_of(self, failed: CallFailed) -> Json:
        """Return the body of an error; by default that of OpenAI's API."""
        return {"error": openai_error(failed)}

    def has_form_of(self, error: bytes) -> bool:
        """True if a server's error body can be sent to the agent unchanged."""
        return read_json(error) is not None

    def stream_failure(self, failed: CallFailed, sent: int) -> bytes:
        """Return the frames that end a stream which failed after `sent` frames."""
        return frame_of(json_bytes(self.error_of(failed)))

    # --- requests to servers, and their replies ------------------------------------------------------------------

    def key_headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers for the key of a server of this dialect, and those that it always requires."""
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def added(self, request: Json, token_options: Mapping[str, object]) -> Json:
        """Return the fields that the gateway adds to this request to get tokens."""
        return {}

    def upstream_request(self, request: Json, model: str, token_options: Mapping[str, object]) -> bytes:
        """Return the body for the server: the agent's, with the server's model name and the fields added."""
        return json_bytes({**request, "model": model, **self.added(request, token_options)})

    def read_reply(self, raw: bytes) -> Json | None:
        """Return the server's reply; None if it is not one of this dialect (by default: has no choices)."""
        reply = read_json(raw) or {}
        choices = entries_of(reply.get("choices"))
        return reply if choices and all(is_object(choice) for choice in choices) else None

    def tokens_of(self, reply: Json, request: Json) -> CallTokens | None:
        """Return the tokens of the first choice; None if they are missing or unusable."""
        return None

    def further_tokens_of(self, reply: Json, request: Json) -> list[CallTokens | None]:
        """Return the tokens of the choices after the first one."""
        further = objects(reply.get("choices"))[1:] if self.generates else []
        return [self.tokens_of({**reply, "choices": [choice]}, request) for choice in further]

    def visible(self, reply: Json, request: Json) -> Json:
        """Return a reply, or a chunk of one, without the fields that the agent did not request."""
        return reply

    def record_of(self, reply: Json) -> Json:
        """Return the reply in the shape of a chat completion, for the record: `id`, `model`, `choices`, `usage`."""
        return reply

    def read_stream(self, request: Json) -> StreamReader:
        """Return the reader for the stream of a reply to this request."""
        raise AssertionError(f"{self.route} does not support streams")

    def stream_of(self, reply: Json, request: Json) -> bytes:
        """Return a complete reply as a stream, for a server that replied to a stream request in one piece."""
        raise AssertionError(f"{self.route} does not support streams")


class StreamReader(ABC):
    """Reads one stream of a server: the part of each frame for the agent, and the complete reply at the end."""

    ended = False
    """True once the server has ended the stream; data after that is not read."""

    @property
    def complete(self) -> bool:
        """True if the reply is complete even if the connection ends now."""
        return self.ended

    @abstractmethod
    def feed(self, frame: bytes) -> bytes:
        """Process one frame and return it for the agent: the same bytes, unless the gateway has to remove something.

        The last frame of the stream, after which `ended` is true, is returned like the others.

        Raises:
            CallFailed: the server reports an error in the stream.
        """

    @abstractmethod
    def reply(self) -> Json | None:
        """Return the reply in the form of a call without a stream; None before its first piece."""


class EventReader(StreamReader):
    """Reads a stream of events with a `type`, to which the gateway adds nothing; each is passed on unchanged."""

    errors: tuple[str, ...]
    """Types of the events that report an error of the server."""

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is not None:
            fields = event_of(data)
            if fields.get("type") in self.errors:
                text = f"The model server failed in the stream: {data[:2000].decode('utf-8', 'replace')}"
                raise CallFailed(502, text, code="upstream_error", state="upstream_error", upstream_error=data)
            self.collect(fields)
        return frame

    @abstractmethod
    def collect(self, fields: Json) -> None:
        """Process the fields of one event; the last one sets `ended`."""


class StreamWriter(ABC):
    """Turns the chunks of one chat stream into the events of a translated dialect."""

    reply: Json | None = None
    """The complete reply in that dialect; set at the end."""

    @abstractmethod
    def feed(self, chunk: Json) -> bytes:
        """Return the events for one chunk, possibly none."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events that end the stream."""


class TranslatedDialect(Dialect):
    """A dialect that servers of chat completions can also serve."""

    def read_count(self, raw: bytes) -> Json:
        """Return a request to count the tokens of a prompt; fields for the reply may be missing.

        Raises:
            CallFailed: 400, a field is invalid; names it.
        """
        return Dialect.read_request(self, raw)

    @abstractmethod
    def prompt_to_chat(self, request: Json) -> Json:
        """Return the request as a chat completion, without checks for a reply.

        Raises:
            CallFailed: 400, a field cannot be translated; names it. Nothing is dropped silently.
        """

    def to_chat(self, request: Json) -> Json:
        """Return the request as a chat completion.

        Raises:
            CallFailed: as `prompt_to_chat`.
        """
        return self.prompt_to_chat(request)

    def count_to_chat(self, request: Json) -> Json:
        """Return the prompt's fields as a chat completion; the last message may be the assistant's.

        Raises:
            CallFailed: as `prompt_to_chat`.
        """
        chat = self.prompt_to_chat(request)
        fields = {name: chat[name] for name in ("messages", "tools", "chat_template_kwargs") if name in chat}
        is_prefill = bool(chat["messages"]) and chat["messages"][-1]["role"] == "assistant"
        return {**fields, "add_generation_prompt": not is_prefill}

    @abstractmethod
    def write_stream(self, request: Json) -> StreamWriter:
        """Return the writer for the stream of a reply to this request."""


def chat_record(reply: Json, fields: Json, calls: list[Json], reason: object, usage: Json) -> Json:
    """Return a reply of a translated dialect in the shape of a chat completion, for the record.

    `fields` are those of the message; empty ones are excluded. `calls` have an `id`, a `name` and `arguments`.
    """
    message: Json = {"role": "assistant", "content": None, **{name: text for name, text in fields.items() if text}}
    if calls:
        message["tool_calls"] = [{"id": call.pop("id"), "function": call} for call in calls]
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {"id": reply.get("id"), "model": reply.get("model"), "choices": [choice], "usage": usage}


def event(kind: str, fields: Json) -> bytes:
    """Return the frame of an event with a `type`."""
    return frame_of(json_bytes({"type": kind, **fields}), kind)


def event_of(data: bytes) -> Json:
    """Return the JSON object in a frame of a stream.

    Raises:
        CallFailed: 502, it is not a JSON object.
    """
    fields = read_json(data)
    if fields is None:
        raise unusable(f"The model server sent a frame that is not a JSON object: {data[:200]!r}")
    return fields


def openai_error(failed: CallFailed) -> Json:
    """Return the error object of OpenAI's APIs."""
    kind = _TYPES.get(failed.status) or ("server_error" if failed.status >= 500 else "invalid_request_error")
    return {"message": failed.message, "type": kind, "param": failed.param, "code": failed.code}
