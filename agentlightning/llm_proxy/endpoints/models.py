"""The entries of `model_list`, and the endpoints that they describe. `table` chooses the endpoints of a call."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from typing_extensions import TypedDict, override

from agentlightning.base.process_secrets import protect, secret
from agentlightning.llm_proxy.access.limits import hint
from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, TranslatedDialect
from agentlightning.llm_proxy.dialects.base import NOT_SAMPLING
from agentlightning.llm_proxy.dialects.json_values import Json, is_list, is_object
from agentlightning.llm_proxy.endpoints.engines import (
    ENGINES,
    LITELLM_ENGINE,
    address_of,
    is_reached_through_litellm,
)
from agentlightning.semconv import ATTEMPT_HEADER

_PROVIDERS = ("hosted_vllm/", "openai/")
_ANTHROPIC = "anthropic/"
_WIRE_ROUTES = tuple(route for route, dialect in DIALECTS.items() if not isinstance(dialect, TranslatedDialect))
"""Dialects of a server without `dialects` in its entry."""
_ROUTES = (*_WIRE_ROUTES, *(route for route in DIALECTS if route not in _WIRE_ROUTES))
_ENVIRONMENT = "os.environ/"
_SECRET = ("key", "secret", "token", "password", "credential")
"""Words that mark the name of a setting as secret; its value is hidden from the agent."""
_PUBLIC_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "http-referer", "referer", "user-agent", "x-title")
"""Headers with public values; the values of all others are hidden from the agent, like keys."""
_OUR_HEADERS = (
    *("accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host"),
    *("keep-alive", "te", "trailer", "transfer-encoding", "upgrade", ATTEMPT_HEADER.lower()),
)
"""Headers that the gateway sets itself or that belong to the connection."""
_KEY_HEADERS = ("authorization", "x-api-key")
_OUR_FIELDS = NOT_SAMPLING - {"tools", "tool_choice"}
"""Fields of a request that only the agent or the gateway may set."""
_USER_INFO = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*@")
_PRINTABLE = re.compile(r"[!-~]+")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NUMBERS = {
    "input_cost_per_token": ("input_cost", "", False),
    "output_cost_per_token": ("output_cost", "", False),
    "unreachable_seconds": ("unreachable_seconds", "seconds", False),
    "timeout": ("timeout", "seconds", True),
    "stream_timeout": ("stream_timeout", "seconds", True),
    "weight": ("weight", "", True),
}
"""Parameters that are numbers: the endpoint's field, the unit, and whether 0 means none."""
_PARAMETERS = (
    *("model", "api_base", "api_key", "dialects", "engine", "max_tokens", "extra_headers", "extra_body"),
    *_NUMBERS,
)


class ModelConfig(TypedDict):
    """One endpoint of one model."""

    model_name: str
    """Name that agents request. Several entries with the same name share its rollouts."""
    litellm_params: dict[str, Any]
    """`model` (with or without the prefix `hosted_vllm/` or `openai/`), `api_base`, and `api_key` if the server needs
    one (`os.environ/NAME` reads it and removes it from the environment). `api_base` may be omitted if the model has
    the prefix of a provider in `engines.ADDRESSES`, as in `openai/gpt-4o`. `input_cost_per_token` and
    `output_cost_per_token` are the prices for a budget in money. `dialects` lists the server's dialects, by default
    chat/completions, completions and embeddings: requests in a listed dialect are passed on unchanged. Responses and
    messages that are not listed are translated to chat/completions, for which a server returns tokens. The prefix
    `anthropic/` means a server of messages only. `engine`, one of `engines.ENGINES`, is the engine; if it is missing,
    it is detected. `unreachable_seconds` is the time for which a call is retried while the server cannot be reached,
    for a server that a supervisor restarts. The engine `litellm` reaches other providers through the package LiteLLM
    (extra `litellm`): `model` is LiteLLM's name, `api_base` may be omitted, and fields not listed here are passed to
    LiteLLM. It is the default for a provider that the program has registered with LiteLLM, and for one without an
    address that only LiteLLM knows.

    As in LiteLLM's router: `timeout` is the time limit in seconds for one reply, or for the first bytes of a stream
    (separately: `stream_timeout`); after it the next endpoint is called. `weight` is the share of new rollouts, 1 by
    default. `max_tokens` applies to requests without a limit. `extra_headers` are sent with every request (values may
    be `os.environ/NAME`), and the fields of `extra_body` replace the request's."""


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """One server of a model."""

    model: str
    """Name of the model at the server."""
    api_base: str
    api_key: str | None = field(default=None, repr=False)
    input_cost: float = 0.0
    """Cost of one prompt token."""
    output_cost: float = 0.0
    """Cost of one completion token."""
    dialects: tuple[str, ...] = _WIRE_ROUTES
    """Routes of the server."""
    engine: str | None = None
    """One of `engines.ENGINES`; None means that it is detected."""
    provider: str = "hosted_vllm"
    """Prefix of the model in its entry."""
    unreachable_seconds: float = 0.0
    """Seconds for which a call waits for an unreachable server, in addition to the usual retries."""
    timeout: float | None = None
    """Seconds for a reply in one piece."""
    stream_timeout: float | None = None
    """Seconds for the first bytes of a stream; None is `timeout`."""
    weight: float = 1.0
    """Share of new rollouts, relative to the model's other endpoints."""
    max_tokens: int | None = None
    """Token limit for requests without one."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Sent with every request; names in lower case."""
    extra_body: str = field(default="{}", repr=False)
    """Fields that replace the request's, as JSON."""
    options: str = field(default="{}", repr=False)
    """Further parameters of LiteLLM, as JSON."""

    @override
    def __hash__(self) -> int:
        return hash((self.model, self.api_base))  # a call looks an endpoint up some ten times

    @property
    def root(self) -> str:
        """Base URL of routes outside OpenAI's API: `api_base` without the version."""
        return self.api_base.removesuffix("/v1")

    @property
    def secrets(self) -> list[str]:
        """Values that only the server may see: its key, its headers, and settings with a secret name."""
        headers = [value for name, value in self.headers if name not in _PUBLIC_HEADERS]
        credentials = [value.rpartition(" ")[2] for value in headers]  # without the scheme before them
        setting_values = _secrets_in([json.loads(self.options), json.loads(self.extra_body)])
        return [value for value in (self.api_key, *headers, *credentials, *setting_values) if value]

    def seconds(self, *, streamed: bool) -> float | None:
        """Return the seconds for a reply, or for the first bytes of a stream; None is no limit."""
        return self.stream_timeout if streamed and self.stream_timeout is not None else self.timeout

    def completed(self, request: Json, limit_names: Sequence[str]) -> Json:
        """Return a request with the additions of the entry; `limit_names` are the fields that limit the reply."""
        if self.max_tokens is not None and limit_names and all(request.get(name) is None for name in limit_names):
            request = {**request, limit_names[0]: self.max_tokens}
        return request if self.extra_body == "{}" else {**request, **json.loads(self.extra_body)}

    @property
    def label(self) -> str:
        """Host and port, for logs; never user info or a key."""
        if not self.api_base:
            return f"LiteLLM's {self.provider}"
        parts = urlsplit(self.api_base)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


def read_entry(place: str, entry: object) -> tuple[str, ModelEndpoint]:
    """Return the model's name and the endpoint of one entry; `place` names the entry in errors.

    Raises:
        ValueError: the entry is malformed; names the field and what was expected.
    """
    fields = _mapping(place, entry)
    _refuse_unknown(place, fields, ("model_name", "litellm_params"))
    name = _text(f"{place}.model_name", fields.get("model_name"))
    place = f"{place}.litellm_params"
    parameters = _mapping(place, fields.get("litellm_params"))
    engine: Any = parameters.get("engine")
    if engine is not None and engine not in ENGINES:
        near = hint(str(engine), ENGINES, lists=False)
        raise ValueError(f"{place}.engine must be one of {', '.join(ENGINES)}{near}; got {engine!r}")
    model, address = _text(f"{place}.model", parameters.get("model")), parameters.get("api_base")
    if engine is None and is_reached_through_litellm(model, has_address=address is not None):
        engine = LITELLM_ENGINE
    read_fields = _litellm_fields if engine == LITELLM_ENGINE else _server_fields
    return name, ModelEndpoint(**read_fields(place, model, parameters), engine=engine, **_routing(place, parameters))


def _server_fields(place: str, model: str, parameters: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of an endpoint that the gateway calls itself."""
    _refuse_unknown(place, parameters, _PARAMETERS)
    provider = next((prefix for prefix in (*_PROVIDERS, _ANTHROPIC) if model.startswith(prefix)), None)
    key, address = _key(f"{place}.api_key", parameters.get("api_key")), parameters.get("api_base")
    where = f"{place}.api_base"
    if address is None:
        provider_name, address, key = address_of(place, model, key)
        provider, where = f"{provider_name}/", f"{where} (from the environment)"
        key = _key(f"{place}.api_key (from the environment)", key)
    dialects, dialect_list = (MESSAGES.route,) if provider == _ANTHROPIC else _WIRE_ROUTES, parameters.get("dialects")
    if dialect_list is not None:
        dialects = tuple(cast("Sequence[Any]", dialect_list)) if isinstance(dialect_list, (list, tuple)) else ()
        if not dialects or any(name not in _ROUTES for name in dialects):
            raise ValueError(f"{place}.dialects must be a list of {', '.join(_ROUTES)}; got {dialect_list!r}")
    return {
        "model": model.removeprefix(provider or ""),
        "api_base": _url(where, address),
        "api_key": key,
        "dialects": dialects,
        "provider": (provider or _PROVIDERS[0]).rstrip("/"),
    }


def _litellm_fields(place: str, model: str, parameters: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of an endpoint that LiteLLM reaches."""
    if importlib.util.find_spec("litellm") is None:
        raise ValueError(
            f"{place}.engine is 'litellm', but the package is not installed: pip install 'agl-framework[litellm]'"
        )
    if parameters.get("dialects") is not None:
        raise ValueError(f"{place}.dialects is not supported with the engine 'litellm', which serves chats only")
    options = {
        name: _key(f"{place}.{name}", value) if str(value).startswith(_ENVIRONMENT) else value
        for name, value in parameters.items()
        if name not in _PARAMETERS
    }
    for name, value in options.items():
        if isinstance(value, str) and _USER_INFO.match(value):
            raise ValueError(
                f"{place}.{name} must not contain a user or a password in an address: use LiteLLM's field for it"
            )
    try:
        text = json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"{place}: the parameters for LiteLLM must be JSON: {error}") from None
    address = parameters.get("api_base")
    return {
        "model": model,
        "api_base": "" if address is None else _url(f"{place}.api_base", address),
        "api_key": _key(f"{place}.api_key", parameters.get("api_key")),
        "dialects": (CHAT.route,),
        "provider": model.partition("/")[0],
        "options": text,
    }


def _routing(place: str, parameters: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of an endpoint for its routing and its costs."""
    read: dict[str, Any] = {}
    for name, (field_name, unit, positive) in _NUMBERS.items():
        if (value := parameters.get(name)) is not None:
            read[field_name] = _number(f"{place}.{name}", value, unit, positive=positive)
    if (most := parameters.get("max_tokens")) is not None:
        if type(most) is not int or most < 1:
            raise ValueError(f"{place}.max_tokens must be a whole number of 1 or more; got {most!r}")
        read["max_tokens"] = most
    if (headers := parameters.get("extra_headers")) is not None:
        read["headers"] = tuple(_headers(f"{place}.extra_headers", headers))
    if (body := parameters.get("extra_body")) is not None:
        read["extra_body"] = _extra_body(f"{place}.extra_body", body)
    return read


def _headers(place: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the headers of an entry. Errors never show their values."""
    names: set[str] = set()
    for name, entry in _mapping(place, value).items():
        lower = str(name).lower()
        if not _HEADER_NAME.fullmatch(lower):
            raise ValueError(f"{place}: {name!r} is not a valid name of an HTTP header")
        if lower in _KEY_HEADERS:
            raise ValueError(f"{place}.{name} must not be set: pass the server's key as api_key")
        if lower in _OUR_HEADERS or lower in names:
            why = "is set twice" if lower in names else "must not be set: the gateway sets it for each request"
            raise ValueError(f"{place}.{name} {why}")
        names.add(lower)
        yield lower, _secret_text(f"{place}.{name}", entry, _HEADER_VALUE)
    if names.difference(_PUBLIC_HEADERS):
        protect()


def _extra_body(place: str, value: object) -> str:
    fields = _mapping(place, value)
    for name in fields:
        if name in _OUR_FIELDS:
            raise ValueError(
                f"{place}.{name} must not be set: only the agent and the gateway set this field of a request"
            )
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} must be JSON: {error}") from None
    if f'"{_ENVIRONMENT}' in text:
        raise ValueError(f"{place} does not support '{_ENVIRONMENT}NAME': pass a secret as api_key or in extra_headers")
    return text


def _secrets_in(value: object, name: str = "") -> Iterator[str]:
    """Yield the texts in a value that have a secret name."""
    if is_object(value):
        for inner, entry in value.items():
            yield from _secrets_in(entry, inner.lower())
    elif is_list(value):
        for entry in value:
            yield from _secrets_in(entry, name)
    elif isinstance(value, str) and any(word in name for word in _SECRET):
        yield value


def _number(place: str, value: object, unit: str, *, positive: bool = False) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (positive and not number):
        bound = "above 0" if positive else "0 or more"
        what = f"a number of {unit}, {bound}" if unit else f"a number {bound}"
        raise ValueError(f"{place} must be {what}; got {value!r}")
    return float(number)


def _url(place: str, value: object) -> str:
    """Return the address of a server, checked to have no credentials. Errors never show it."""
    url = _text(place, value)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # invalid brackets or port; its text repeats the address
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not _PRINTABLE.fullmatch(url):
        raise ValueError(f"{place} must be a URL such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc:
        raise ValueError(
            f"{place} must not contain a user or a password, because logs and errors could show them. Pass the "
            "server's key as api_key, preferably 'os.environ/NAME'"
        )
    if "?" in url or "#" in url:
        raise ValueError(
            f"{place} must not contain a query or a fragment, because logs and errors could show them. Remove the "
            "part after '?' or '#', and pass a key as api_key, preferably 'os.environ/NAME'"
        )
    return url.rstrip("/")


def _mapping(place: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} must be a dict; got {type(value).__name__}")
    return cast(Mapping[str, object], value)


def _text(place: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        problem = "is missing" if value is None else f"must be a non-empty string; got {type(value).__name__}"
        raise ValueError(f"{place} {problem}")
    return value


def _key(place: str, value: object) -> str | None:
    """Return the provider's key; `os.environ/NAME` is read and removed from the environment. Errors never show it."""
    if value is None:
        return None
    key = _secret_text(place, value, _PRINTABLE)
    protect()
    return key


def _secret_text(place: str, value: object, form: re.Pattern[str]) -> str:
    """Return the value of a header, or of the environment variable that it names."""
    text = _text(place, value)
    if text.startswith(_ENVIRONMENT):
        variable = text.removeprefix(_ENVIRONMENT)
        content = secret(variable)
        if not content:
            raise ValueError(f"{place} refers to the environment variable {variable}, which is not set")
        place, text = f"{place} (the environment variable {variable})", content
    if not form.fullmatch(text):
        space = "a space" if form is _PRINTABLE else "a space at the beginning or end"
        raise ValueError(
            f"{place} cannot be sent in an HTTP header: it has {space}, a line break or a non-ASCII character"
        )
    return text


def _refuse_unknown(place: str, fields: Mapping[str, object], names: Sequence[str]) -> None:
    for name in fields:
        if name not in names:
            raise ValueError(f"{place}.{name} is not supported{hint(name, names)}")
