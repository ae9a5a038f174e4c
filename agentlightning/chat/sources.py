"""Sources of answers: an OpenAI-compatible endpoint over HTTP, a client object of the user, or any callable.

Each source makes one request and returns an `Answer`, or raises a `CallFault` that states whether a retry may help.
`chat.py` implements retries, limits and the bill.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from agentlightning.base.terminal import cut
from agentlightning.errors import BadRequestError
from agentlightning.types import LLM, ProxyLLM
from agentlightning.utils.backoff import retry_after_seconds
from agentlightning.utils.masking import masked_text

if TYPE_CHECKING:
    import aiohttp

_REPLY_BYTES = 16 * 1024 * 1024
"""Maximum size of a server's reply, in bytes."""
_ERROR_CHARACTERS = 400
"""Maximum length of a server's error text, in characters."""
_AGAIN = frozenset((408, 409, 425, 429))
"""Statuses below 500 after which the same request may succeed."""
_LOOPBACK = ("127.", "localhost", "::1")
_UNREACHED = frozenset(("APIConnectionError", "APITimeoutError", "ClientError", "TransportError"))
"""Exception classes of the OpenAI, LiteLLM, Anthropic, aiohttp and httpx packages for a server without a response."""


class CallFault(Exception):
    """A request failed."""

    def __init__(self, text: str, *, final: bool, retry_after: float | None = None) -> None:
        super().__init__(masked_text(text))
        self.final = final
        """True if the same request cannot succeed."""
        self.retry_after = retry_after
        """Seconds to wait before a retry, as requested by the server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a request; None for a field that the source lacks."""

    text: str
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None


def source_of(source: object) -> Source:
    """Return the source for an `LLM`, a client object or a callable.

    Raises:
        BadRequestError, TypeError: it is none of these. The message lists them.
    """
    if isinstance(source, ProxyLLM):
        raise BadRequestError(
            "A ProxyLLM has a different URL for each attempt. Pass Chat either the LLM of one attempt "
            "(llm_proxy.as_resource(rollout_id, attempt_id)) or an agl.LLM with the address of the model server"
        )
    if isinstance(source, LLM):
        return HttpSource(source.endpoint, source.api_key, source.model, dict(source.sampling_parameters))
    create = getattr(getattr(getattr(source, "chat", None), "completions", None), "create", None)
    if callable(create):
        with_options = getattr(source, "with_options", None)
        if type(source).__module__.partition(".")[0] == "openai" and callable(with_options):
            return ClientSource(with_options(max_retries=0))  # one level of the stack makes the retries
        return ClientSource(source)
    if callable(source) and not isinstance(source, type):
        return CallableSource(cast("Callable[..., Any]", source))
    raise TypeError(
        "Chat requires None, an agl.LLM, a client with chat.completions.create (sync or async), or a callable "
        f"(messages, **settings) that returns a string or an OpenAI-style reply; got {type(source).__name__}"
    )


# --- over HTTP -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HttpSource:
    """An OpenAI-compatible endpoint. It opens one connection per request, so any event loop may call it."""

    endpoint: str
    api_key: str | None = field(repr=False)
    model: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])

    async def ask(self, model: str, messages: list[dict[str, Any]], settings: Mapping[str, Any]) -> Answer:
        import aiohttp  # a web stack, for users of it only

        url = f"{self.endpoint.rstrip('/')}/chat/completions"
        body = {**self.sampling, **settings, "model": model, "messages": messages}
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        is_local = (urlsplit(url).hostname or "").startswith(_LOOPBACK)
        try:
            async with (
                aiohttp.ClientSession(trust_env=not is_local, timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(url, json=body, headers=headers, allow_redirects=False) as response,
            ):
                raw = await _read(response)
                status, wait = response.status, response.headers.get("retry-after")
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise CallFault(f"{self.endpoint!r} is not the address of a server: {error}", final=True) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"{self.endpoint} did not return a complete response: {type(error).__name__}: {error}"
            raise CallFault(self._without_key(text), final=False) from error
        try:
            reply: Any = json.loads(raw)
        except (ValueError, RecursionError):
            reply = None
        if status != 200:
            error_text = self._without_key(_error_text(reply) or raw.decode("utf-8", "replace"))
            raise _refused(status, f"{self.endpoint} returned {status}: {error_text}", reply, wait)
        return _read_reply(reply, self.endpoint)

    def _without_key(self, text: str) -> str:
        return text.replace(self.api_key, "[hidden]") if self.api_key else text


async def _read(response: aiohttp.ClientResponse) -> bytes:
    reply = bytearray()
    async for piece in response.content.iter_any():
        reply += piece
        if len(reply) > _REPLY_BYTES:
            raise CallFault(f"The reply is longer than {_REPLY_BYTES} bytes", final=True)
    return bytes(reply)


def _refused(status: int, text: str, reply: object, wait: str | None) -> CallFault:
    """Return the fault of an error status."""
    can_help = status >= 500 or status in _AGAIN
    if status == 429 and "insufficient_quota" in json.dumps(reply, default=str):  # OpenAI: the account is empty
        can_help = False
    return CallFault(cut(text, _ERROR_CHARACTERS), final=not can_help, retry_after=retry_after_seconds(wait))


def _error_text(reply: object) -> str | None:
    error = cast("dict[str, Any]", reply).get("error") if isinstance(reply, dict) else None
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


# --- clients and callables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientSource:
    """A client object with `chat.completions.create`, such as those of OpenAI and LiteLLM."""

    client: Any = field(repr=False)
    model: str | None = None

    async def ask(self, model: str, messages: list[dict[str, Any]], settings: Mapping[str, Any]) -> Answer:
        create = self.client.chat.completions.create
        return await _called(create, "The client", model=model, messages=messages, **settings)


@dataclass(frozen=True)
class CallableSource:
    """A user's function `(messages, **settings)`, called with the settings that its signature accepts."""

    function: Callable[..., Any]
    model: str | None = ""

    async def ask(self, model: str, messages: list[dict[str, Any]], settings: Mapping[str, Any]) -> Answer:
        offered = {**settings, **({"model": model} if model else {})}
        name = getattr(self.function, "__name__", type(self.function).__name__)
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a builtin without a signature
            return await _called(self.function, name, messages)
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        arguments = {key: value for key, value in offered.items() if takes_all or key in parameters}
        if "messages" in parameters:
            return await _called(self.function, name, messages=messages, **arguments)
        return await _called(self.function, name, messages, **arguments)


async def _called(function: Callable[..., Any], name: str, *args: Any, **settings: Any) -> Answer:
    """Call a function, a plain one on a thread, which continues alone if the caller is cancelled."""
    try:
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            reply = await function(*args, **settings)
        else:
            reply = await asyncio.to_thread(function, *args, **settings)
            reply = await reply if inspect.isawaitable(reply) else reply
    except CallFault:
        raise
    except Exception as error:  # boundary: code of the user and of clients
        raise _fault_of(error, name) from error
    if isinstance(reply, str):
        return Answer(reply)
    dump = getattr(reply, "model_dump", None)
    return _read_reply(dump() if callable(dump) else reply, name)


def _fault_of(error: Exception, name: str) -> CallFault:
    """Return the fault of a client's exception; one that is no failure of a server is final."""
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    text = cut(f"{name} failed: {type(error).__name__}: {error}", _ERROR_CHARACTERS)
    if isinstance(status, int):
        wait = _part(getattr(getattr(error, "response", None), "headers", None), "retry-after")
        return _refused(status, text, str(error), wait if isinstance(wait, str) else None)
    unreached = {cls.__name__ for cls in type(error).__mro__} & _UNREACHED
    return CallFault(text, final=not (unreached or isinstance(error, (OSError, TimeoutError))))


Source = HttpSource | ClientSource | CallableSource
"""A source with the default model of calls and a method `ask`, which returns an answer or raises a `CallFault`."""


# --- replies ---------------------------------------------------------------------------------------------------------


def _read_reply(reply: object, who: str) -> Answer:
    """Return the answer in an OpenAI-shaped reply, a dict or an object with the same attributes.

    Raises:
        CallFault: it has another shape.
    """
    choices = _part(reply, "choices")
    first = cast("Sequence[Any]", choices)[0] if isinstance(choices, (list, tuple)) and choices else None
    message = _part(first, "message")
    if message is None:
        raise CallFault(f"{who} returned no chat completion: {cut(repr(reply), _ERROR_CHARACTERS)}", final=False)
    usage, content = _part(reply, "usage"), _part(message, "content")
    if isinstance(content, (list, tuple)):
        content = "".join(str(_part(part, "text") or "") for part in cast("Sequence[Any]", content))
    return Answer(
        _text(content) or "",
        _text(_part(reply, "model")),
        _count(_part(usage, "prompt_tokens")),
        _count(_part(usage, "completion_tokens")),
        _text(_part(first, "finish_reason")),
    )


def _part(value: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
