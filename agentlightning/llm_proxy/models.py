"""The table of models: which endpoints serve which name, and in which order one rollout tries them."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from agentlightning.llm_proxy.engines import ENGINES, LITELLM_ENGINE
from agentlightning.llm_proxy.replies import refuse

_PROVIDERS = ("hosted_vllm/", "openai/")
_ANTHROPIC = "anthropic/"
_OPENAI_DIALECTS = ("chat/completions", "completions", "embeddings")
_DIALECTS = (*_OPENAI_DIALECTS, "responses", "messages")
_ENVIRONMENT = "os.environ/"
_PRICES = ("input_cost_per_token", "output_cost_per_token")
_PARAMETERS = ("model", "api_base", "api_key", "dialects", "engine", *_PRICES)


class ModelConfig(TypedDict):
    """One endpoint of one model."""

    model_name: str
    """What agents ask for. Several entries with the same name share its rollouts."""
    litellm_params: dict[str, Any]
    """`model` (with or without `hosted_vllm/` or `openai/` before it), `api_base`, and `api_key` if the server wants
    one (`os.environ/NAME` reads it from the environment); `input_cost_per_token` and `output_cost_per_token` for a
    budget in money. `dialects` lists what the server speaks, if that is not chat/completions, completions and
    embeddings: what agents say in a listed dialect is passed on as it is. Responses and messages that are not listed
    are translated for a server of chat/completions, which gives their tokens. `anthropic/` before the model stands for
    a server of messages only. `engine`, one of `engines.ENGINES`, says what serves it; without it the server is
    asked. `litellm` for it reaches a provider that the gateway does not speak to through the package LiteLLM (extra
    `litellm`): `model` is LiteLLM's name, `api_base` may be left out, and fields not named here are LiteLLM's own."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is served."""

    model: str
    """The name that the model server knows."""
    api_base: str
    api_key: str | None = field(default=None, repr=False)
    input_cost: float = 0.0
    """Of one prompt token."""
    output_cost: float = 0.0
    """Of one completion token."""
    dialects: tuple[str, ...] = _OPENAI_DIALECTS
    """Routes that the server itself has."""
    engine: str | None = None
    """One of `engines.ENGINES`; None is found out."""
    provider: str = "hosted_vllm"
    """Before the model in its entry."""
    options: str = field(default="{}", repr=False)
    """JSON: what LiteLLM is given beside all that."""

    @property
    def root(self) -> str:
        """Where the server has what is not of OpenAI's API: `api_base` without the version."""
        return self.api_base.removesuffix("/v1")

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
        self._endpoints: dict[str, list[Endpoint]] = {}
        for index, entry in enumerate(model_list):
            name, endpoint = _read_entry(f"model_list[{index}]", entry)
            self._endpoints.setdefault(name, []).append(endpoint)

    @property
    def names(self) -> list[str]:
        """The model names, in the order of the list."""
        return list(self._endpoints)

    @property
    def all_endpoints(self) -> list[Endpoint]:
        """Every endpoint of every model, once."""
        return list(dict.fromkeys(endpoint for group in self._endpoints.values() for endpoint in group))

    def endpoints(self, model: str, rollout_id: str) -> list[Endpoint]:
        """Return the endpoints of a model, the rollout's own first: the same rollout always gets the same order.

        Rendezvous hashing: when an endpoint comes or goes, only the rollouts that it serves move.

        Raises:
            CallFailed: 404 that lists the models.
        """
        endpoints = self._endpoints.get(model)
        if endpoints is None:
            known = ", ".join(self._endpoints) or "none yet: LLMProxy.update_model_list adds them"
            near = difflib.get_close_matches(model, self._endpoints, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            text = f"There is no model {model!r}.{hint} Models of this gateway: {known}"
            raise refuse(404, text, code="model_not_found", param="model")
        if len(endpoints) == 1:
            return endpoints
        return sorted(endpoints, key=lambda endpoint: _weight(rollout_id, endpoint))


def _weight(rollout_id: str, endpoint: Endpoint) -> bytes:
    return hashlib.sha256(f"{rollout_id}\n{endpoint.api_base}\n{endpoint.model}".encode()).digest()


def _read_entry(place: str, entry: Any) -> tuple[str, Endpoint]:
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
    return name, Endpoint(
        model.removeprefix(provider or ""),
        _url(f"{place}.api_base", parameters.get("api_base")),
        _key(f"{place}.api_key", parameters.get("api_key")),
        *_prices(place, parameters),
        dialects=_dialects(f"{place}.dialects", parameters.get("dialects"), model),
        engine=_engine(f"{place}.engine", parameters.get("engine")),
        provider=(provider or _PROVIDERS[0]).rstrip("/"),
    )


def _litellm_endpoint(place: str, parameters: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of an entry that says that LiteLLM reaches it."""
    if importlib.util.find_spec("litellm") is None:
        raise ValueError(
            f"{place}.engine is 'litellm', and the package is not installed: pip install 'agentlightning[litellm]'"
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
    try:
        text = json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"{place}: what LiteLLM is given must be JSON: {error}") from None
    return Endpoint(
        model,
        "" if api_base is None else _url(f"{place}.api_base", api_base),
        _key(f"{place}.api_key", parameters.get("api_key")),
        *_prices(place, parameters),
        dialects=_OPENAI_DIALECTS[:1],
        engine=LITELLM_ENGINE,
        provider=model.partition("/")[0],
        options=text,
    )


def _url(place: str, value: Any) -> str:
    url = _text(place, value)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"{place} must be a URL such as http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def _prices(place: str, parameters: Mapping[str, Any]) -> list[float]:
    return [_price(f"{place}.{name}", parameters.get(name)) for name in _PRICES]


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} must be a dict; got {type(value).__name__}")
    return cast(Mapping[str, Any], value)


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        problem = "is missing" if value is None else f"must be a non-empty string; got {type(value).__name__}"
        raise ValueError(f"{place} {problem}")
    return value


def _price(place: str, value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{place} must be a number of 0 or more; got {value!r}")
    return float(value)


def _key(place: str, value: Any) -> str | None:
    """Return the provider's key; `os.environ/NAME` reads it from the environment. Errors never show it."""
    if value is None:
        return None
    key = _text(place, value)
    if not key.startswith(_ENVIRONMENT):
        return key
    variable = key.removeprefix(_ENVIRONMENT)
    if not os.environ.get(variable):
        raise ValueError(f"{place} names the environment variable {variable}, which is not set")
    return os.environ[variable]


def _dialects(place: str, value: Any, model: str) -> tuple[str, ...]:
    if value is None:
        return ("messages",) if model.startswith(_ANTHROPIC) else _OPENAI_DIALECTS
    names = cast(Sequence[Any], value) if isinstance(value, (list, tuple)) else ()
    if not names or any(name not in _DIALECTS for name in names):
        raise ValueError(f"{place} must be a list out of {', '.join(_DIALECTS)}; got {value!r}")
    return tuple(names)


def _engine(place: str, value: Any) -> str | None:
    if value is None or value in ENGINES:
        return value
    near = difflib.get_close_matches(str(value), ENGINES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{place} must be one of {', '.join(ENGINES)}{hint}; got {value!r}")


def _refuse_unknown(place: str, fields: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ValueError(f"{place}.{name} is not supported{hint}")
