"""The table of models: which endpoints serve which name, and in which order one rollout tries them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from agentlightning.llm_proxy.access.limits import closest, hint, shown
from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, WireDialect
from agentlightning.llm_proxy.dialects.json_values import Json
from agentlightning.llm_proxy.endpoints.engines import ENGINES, LITELLM_ENGINE
from agentlightning.llm_proxy.endpoints.providers import address_of
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.process_secrets import protect, secret

_PROVIDERS = ("hosted_vllm/", "openai/")
_ANTHROPIC = "anthropic/"
_WIRE_ROUTES = tuple(route for route, dialect in DIALECTS.items() if isinstance(dialect, WireDialect))
"""What a server speaks whose entry lists no dialects."""
_ROUTES = (*_WIRE_ROUTES, *(route for route in DIALECTS if route not in _WIRE_ROUTES))
_ENVIRONMENT = "os.environ/"
_SECRET = ("key", "secret", "token", "password", "credential")
"""In the names of LiteLLM's settings whose values are not for the agent."""
_USER_INFO = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*@")
_PRINTABLE = re.compile(r"[!-~]+")
_PRICES = ("input_cost_per_token", "output_cost_per_token")
_PARAMETERS = ("model", "api_base", "api_key", "dialects", "engine", "unreachable_seconds", *_PRICES)


class ModelConfig(TypedDict):
    """One endpoint of one model."""

    model_name: str
    """What agents ask for. Several entries with the same name share its rollouts."""
    litellm_params: dict[str, Any]
    """`model` (with or without `hosted_vllm/` or `openai/` before it), `api_base`, and `api_key` if the server wants
    one (`os.environ/NAME` takes it out of the environment). The address may be left out where the model names a
    provider of `providers.ADDRESSES`, as in `openai/gpt-4o`; `input_cost_per_token` and `output_cost_per_token` for a
    budget in money. `dialects` lists what the server speaks, if that is not chat/completions, completions and
    embeddings: what agents say in a listed dialect is passed on as it is. Responses and messages that are not listed
    are translated for a server of chat/completions, which gives their tokens. `anthropic/` before the model stands for
    a server of messages only. `engine`, one of `engines.ENGINES`, says what serves it; without it the server is
    asked. `unreachable_seconds` is how long a call is tried again while the server cannot be reached, for one that is
    started again by whoever watches it. `litellm` as the engine reaches a provider that the gateway does not speak to
    through the package LiteLLM (extra `litellm`): `model` is LiteLLM's name, `api_base` may be left out, and fields not
    named here are LiteLLM's own."""


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where a model is served."""

    model: str
    """The name that the model server knows."""
    api_base: str
    api_key: str | None = field(default=None, repr=False)
    input_cost: float = 0.0
    """Of one prompt token."""
    output_cost: float = 0.0
    """Of one completion token."""
    dialects: tuple[str, ...] = _WIRE_ROUTES
    """Routes that the server itself has."""
    engine: str | None = None
    """One of `engines.ENGINES`; None is found out."""
    provider: str = "hosted_vllm"
    """Before the model in its entry."""
    unreachable_seconds: float = 0.0
    """How long a call waits for a server that cannot be reached, beyond the usual tries."""
    options: str = field(default="{}", repr=False)
    """JSON: what LiteLLM is given beside all that."""

    @property
    def root(self) -> str:
        """Where the server has what is not of OpenAI's API: `api_base` without the version."""
        return self.api_base.removesuffix("/v1")

    @property
    def secrets(self) -> list[str]:
        """Values that are for the server only: its key, and what LiteLLM is given under such names."""
        options: Json = json.loads(self.options)
        named = [value for name, value in options.items() if any(word in name for word in _SECRET)]
        return [value for value in (self.api_key, *named) if isinstance(value, str)]

    @property
    def label(self) -> str:
        """Host and port, for logs; never user info or a key."""
        if not self.api_base:
            return f"LiteLLM's {self.provider}"
        parts = urlsplit(self.api_base)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)


class ModelTable:
    """Read-only routing table; a change of models is a new table.

    Raises:
        ValueError: an entry is malformed; names the entry, the field and what was expected.
    """

    def __init__(self, model_list: Sequence[ModelConfig]) -> None:
        self._endpoints: dict[str, list[ModelEndpoint]] = {}
        for index, entry in enumerate(model_list):
            name, endpoint = _read_entry(f"model_list[{index}]", entry)
            self._endpoints.setdefault(name, []).append(endpoint)

    @property
    def names(self) -> list[str]:
        """The model names, in the order of the list."""
        return list(self._endpoints)

    @property
    def all_endpoints(self) -> list[ModelEndpoint]:
        """Every endpoint of every model, once."""
        return list(dict.fromkeys(endpoint for group in self._endpoints.values() for endpoint in group))

    def endpoints(self, model: str, rollout_id: str) -> list[ModelEndpoint]:
        """Return the endpoints of a model, the rollout's own first: the same rollout always gets the same order.

        Rendezvous hashing: when an endpoint comes or goes, only the rollouts that it serves move.

        Raises:
            CallFailed: 404 that lists the models.
        """
        endpoints = self._endpoints.get(model)
        if endpoints is None:
            known = ", ".join(self._endpoints) or "none yet: LLMProxy.update_model_list adds them"
            near = closest(model, self._endpoints)
            meant = f" Did you mean {near!r}?" if near else ""
            text = f"There is no model {shown(model)}.{meant} Models of this gateway: {known}"
            raise CallFailed(404, text, code="model_not_found", param="model")
        if len(endpoints) == 1:
            return endpoints
        return sorted(
            endpoints, key=lambda at: hashlib.sha256(f"{rollout_id}\n{at.api_base}\n{at.model}".encode()).digest()
        )

    def listing(self, name: str | None = None) -> Json:
        """Return the models, or one of them, in a form that the clients of OpenAI's and of Anthropic's API both read.

        Raises:
            CallFailed: 404, there is no model of this name; says what it may have meant.
        """
        if name is not None:
            self.endpoints(name, "")
            return _listed(name)
        names = self.names
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return {"object": "list", "data": [_listed(name) for name in names], "has_more": False, **ends}


def _listed(name: str) -> Json:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _read_entry(place: str, entry: object) -> tuple[str, ModelEndpoint]:
    fields = _mapping(place, entry)
    _refuse_unknown(place, fields, ("model_name", "litellm_params"))
    name = _text(f"{place}.model_name", fields.get("model_name"))
    place = f"{place}.litellm_params"
    parameters = _mapping(place, fields.get("litellm_params"))
    if parameters.get("engine") == LITELLM_ENGINE:
        return name, _litellm_endpoint(place, parameters)
    _refuse_unknown(place, parameters, _PARAMETERS)
    model = _text(f"{place}.model", parameters.get("model"))
    provider = next((known for known in (*_PROVIDERS, _ANTHROPIC) if model.startswith(known)), None)
    given = parameters.get("api_base")
    if given is None:
        named, given = address_of(place, model, parameters.get("api_key"))
        provider = f"{named}/"
    url = _url(f"{place}.api_base", given)
    key = _key(f"{place}.api_key", parameters.get("api_key"))
    prices, listed = _prices(place, parameters), parameters.get("dialects")
    dialects = (MESSAGES.route,) if provider == _ANTHROPIC else _WIRE_ROUTES
    if listed is not None:
        dialects = tuple(cast("Sequence[Any]", listed)) if isinstance(listed, (list, tuple)) else ()
        if not dialects or any(name not in _ROUTES for name in dialects):
            raise ValueError(f"{place}.dialects must be a list out of {', '.join(_ROUTES)}; got {listed!r}")
    return name, ModelEndpoint(
        model.removeprefix(provider or ""),
        url,
        key,
        *prices,
        dialects=dialects,
        engine=_engine(f"{place}.engine", parameters.get("engine")),
        provider=(provider or _PROVIDERS[0]).rstrip("/"),
        unreachable_seconds=_seconds(f"{place}.unreachable_seconds", parameters.get("unreachable_seconds", 0)),
    )


def _litellm_endpoint(place: str, parameters: Mapping[str, object]) -> ModelEndpoint:
    """Return the endpoint of an entry that says that LiteLLM reaches it."""
    if importlib.util.find_spec("litellm") is None:
        raise ValueError(
            f"{place}.engine is 'litellm', and the package is not installed: pip install 'agl-framework[litellm]'"
        )
    if parameters.get("dialects") is not None:
        raise ValueError(f"{place}.dialects is not supported with the engine 'litellm', which is asked for chats only")
    model = _text(f"{place}.model", parameters.get("model"))
    api_base = parameters.get("api_base")
    options = {
        name: _key(f"{place}.{name}", value) if str(value).startswith(_ENVIRONMENT) else value
        for name, value in parameters.items()
        if name not in _PARAMETERS
    }
    for name, value in options.items():
        if isinstance(value, str) and _USER_INFO.match(value):
            raise ValueError(
                f"{place}.{name} must not hold a user or a password in an address: use LiteLLM's own field"
            )
    try:
        text = json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"{place}: what LiteLLM is given must be JSON: {error}") from None
    return ModelEndpoint(
        model,
        "" if api_base is None else _url(f"{place}.api_base", api_base),
        _key(f"{place}.api_key", parameters.get("api_key")),
        *_prices(place, parameters),
        dialects=(CHAT.route,),
        engine=LITELLM_ENGINE,
        provider=model.partition("/")[0],
        options=text,
    )


def _seconds(place: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{place} must be a number of seconds, 0 or more; got {value!r}")
    return float(value)


def _url(place: str, value: object) -> str:
    """Return the address of a server: a place and nothing that opens it. Errors never show it."""
    url = _text(place, value)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # brackets or a port that are none; its text repeats the address
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not _PRINTABLE.fullmatch(url):
        raise ValueError(f"{place} must be a URL such as http://127.0.0.1:8000/v1")
    if "@" in parts.netloc:
        raise ValueError(
            f"{place} must not hold a user or a password, which logs and errors could repeat: give the server's key as "
            "api_key, best as 'os.environ/NAME'"
        )
    if "?" in url or "#" in url:
        raise ValueError(
            f"{place} must not hold a query or a fragment, which logs and errors could repeat: give a key as api_key, "
            "best as 'os.environ/NAME', and the address without what follows the '?'"
        )
    return url.rstrip("/")


def _prices(place: str, parameters: Mapping[str, object]) -> list[float]:
    prices: list[float] = []
    for name in _PRICES:
        value = 0.0 if parameters.get(name) is None else parameters[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{place}.{name} must be a number of 0 or more; got {value!r}")
        prices.append(float(value))
    return prices


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
    """Return the provider's key; `os.environ/NAME` takes it out of the environment. Errors never show it."""
    if value is None:
        return None
    key = _text(place, value)
    if key.startswith(_ENVIRONMENT):
        variable = key.removeprefix(_ENVIRONMENT)
        held = secret(variable)
        if not held:
            raise ValueError(f"{place} names the environment variable {variable}, which is not set")
        place, key = f"{place} (the environment variable {variable})", held
    if not _PRINTABLE.fullmatch(key):
        raise ValueError(
            f"{place} holds what no HTTP header can: a space, a line break or a character that is not ASCII"
        )
    protect()
    return key


def _engine(place: str, value: Any) -> str | None:
    if value is None or value in ENGINES:
        return value
    near = hint(str(value), ENGINES, lists=False)
    raise ValueError(f"{place} must be one of {', '.join(ENGINES)}{near}; got {value!r}")


def _refuse_unknown(place: str, fields: Mapping[str, object], known: Sequence[str]) -> None:
    for name in fields:
        if name not in known:
            raise ValueError(f"{place}.{name} is not supported{hint(name, known)}")
