"""The table of models: the endpoints of each name, the order in which a rollout tries them, and the fallback models
if all of them fail.

Fallbacks and aliases are accepted in the forms of `LLMProxy` and of LiteLLM's router.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentlightning.llm_proxy.access.limits import closest, hint, shown
from agentlightning.llm_proxy.dialects.json_values import Json
from agentlightning.llm_proxy.endpoints.models import ModelConfig, ModelEndpoint, read_entry
from agentlightning.llm_proxy.replies import CallFailed

ANY_MODEL = "*"
"""Name for the fallbacks of all models without specific fallbacks."""
Fallbacks = Mapping[str, Sequence[str]]
_SETTINGS = {
    "router_settings": ("fallbacks", "default_fallbacks", "model_group_alias", "num_retries"),
    "litellm_settings": ("fallbacks", "default_fallbacks", "num_retries"),
}
"""Supported settings of a configuration of LiteLLM, in addition to its `model_list`."""
_INSTEAD = {
    "timeout": "set 'timeout' in the entries of model_list",
    "request_timeout": "set 'timeout' in the entries of model_list",
    "stream_timeout": "set 'stream_timeout' in the entries of model_list",
    "allowed_fails": "set LLMProxy(health=HealthChecks(failures=...))",
    "cooldown_time": "set LLMProxy(health=HealthChecks(rest_seconds=...))",
    "routing_strategy": "a rollout keeps its endpoint, and new rollouts use the least busy one; see 'weight'",
}


class ModelTable:
    """Read-only routing table; to change the models, make a new table.

    Raises:
        ValueError: an entry is malformed, or an alias is the name of a model; names the entry, the field and what was
            expected.
    """

    def __init__(
        self,
        model_list: Sequence[ModelConfig],
        fallbacks: Fallbacks | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._endpoints: dict[str, list[ModelEndpoint]] = {}
        for index, entry in enumerate(model_list):
            name, endpoint = read_entry(f"model_list[{index}]", entry)
            self._endpoints.setdefault(name, []).append(endpoint)
        self._aliases = dict(aliases or {})
        for alias in self._aliases:
            if alias in self._endpoints:
                raise ValueError(f"aliases: {alias!r} is the name of a model in model_list; choose another name")
        self._fallbacks = {
            self.resolved(name): [self.resolved(target) for target in targets]
            for name, targets in (fallbacks or {}).items()
        }

    @property
    def names(self) -> list[str]:
        """The model names, in the order of the list."""
        return list(self._endpoints)

    @property
    def all_endpoints(self) -> list[ModelEndpoint]:
        """Every endpoint of every model, once."""
        return list(dict.fromkeys(endpoint for group in self._endpoints.values() for endpoint in group))

    def resolved(self, model: str) -> str:
        """Return the model of an alias; any other name unchanged."""
        return self._aliases.get(model, model)

    def chain(self, model: str) -> list[str]:
        """Return the model of a name, then its fallbacks and their fallbacks, in the order of the calls.

        Each is listed once. Fallbacks that are not served are excluded.
        """
        waiting, chain = [self.resolved(model)], list[str]()
        while waiting:
            name = waiting.pop(0)
            if name not in chain and (name in self._endpoints or not chain):
                chain.append(name)
                waiting = [*self._fallbacks.get(name, self._fallbacks.get(ANY_MODEL, ())), *waiting]
        return chain

    def missing(self, later: Collection[str] = ()) -> str | None:
        """Return an error message about an unknown model in aliases or fallbacks; None if all are known.

        `later` are names of models that will be added later.
        """
        names = [*self._endpoints, *later]
        for alias, model in self._aliases.items():
            if model not in names:
                return f"aliases[{alias!r}]: {model!r} is not in model_list{hint(model, names)}"
        for name, targets in self._fallbacks.items():
            for each in (name, *targets):
                if each not in names and each != ANY_MODEL:
                    return f"fallbacks[{name!r}]: {each!r} is not in model_list{hint(each, names)}"
        return None

    def endpoints(self, model: str, rollout_id: str) -> list[ModelEndpoint]:
        """Return the endpoints of a model, the rollout's own first: the same rollout always gets the same order.

        Weighted rendezvous hashing: when an endpoint is added or removed, only its rollouts move. Source: C.
        Schindelhauer, G. Schomaker, Weighted distributed hash tables (SPAA 2005), logarithmic method.

        Raises:
            CallFailed: 404, there is no model of this name; lists the models.
        """
        endpoints = self._endpoints.get(self.resolved(model))
        if endpoints is None:
            served = ", ".join(self._endpoints) or "none; add them with LLMProxy.update_model_list"
            near = closest(model, [*self._endpoints, *self._aliases])
            suggestion = f" Did you mean {near!r}?" if near else ""
            text = f"The model {shown(model)} does not exist.{suggestion} Models of this gateway: {served}"
            raise CallFailed(404, text, code="model_not_found", param="model")
        return endpoints if len(endpoints) == 1 else sorted(endpoints, key=lambda each: _distance(rollout_id, each))

    def listing(self, name: str | None = None) -> Json:
        """Return all models and aliases, or one, in a form for clients of OpenAI's and of Anthropic's API.

        Raises:
            CallFailed: 404, there is no model of this name; suggests similar names.
        """
        if name is not None:
            self.endpoints(name, "")
            return _listed(name)
        names = [*self._endpoints, *(alias for alias, model in self._aliases.items() if model in self._endpoints)]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return {"object": "list", "data": [_listed(name) for name in names], "has_more": False, **ends}


def _listed(name: str) -> Json:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _distance(rollout_id: str, endpoint: ModelEndpoint) -> float:
    """Return the distance of an endpoint from a rollout: an exponential variate with the weight as rate."""
    text = f"{rollout_id}\n{endpoint.api_base}\n{endpoint.model}"
    uniform = (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / 2**53
    return -math.log1p(-uniform) / endpoint.weight


# --- fallbacks and aliases -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiteLLMSettings:
    """The supported settings of a configuration of LiteLLM; None is a missing setting."""

    model_list: Sequence[ModelConfig] | None = None
    num_retries: int | None = None
    fallbacks: object = None
    aliases: object = None


def read_fallbacks(place: str, value: object) -> dict[str, tuple[str, ...]]:
    """Return the fallbacks of each model: `{"a": ["b"]}`, or LiteLLM's `[{"a": ["b"]}]`.

    Raises:
        ValueError: they are malformed, or a model is its own fallback; names the place and what was expected.
    """
    fallbacks: dict[str, tuple[str, ...]] = {}
    for part in cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(part, Mapping):
            raise ValueError(f"{place} must be a dict such as {{'a': ['b']}}; got {part!r}")
        for name, models in cast("Mapping[object, object]", part).items():
            targets = (models,) if isinstance(models, str) else models
            names = tuple(cast("Sequence[object]", targets)) if isinstance(targets, (list, tuple)) else ()
            if not names or not all(isinstance(each, str) and each for each in (name, *names)):
                raise ValueError(f"{place}[{name!r}] must be a list of model names; got {models!r}")
            if name in names or name in fallbacks or len(set(names)) < len(names):
                why = "is its own fallback" if name in names else "contains a model twice"
                why = "is set twice" if name in fallbacks else why
                raise ValueError(f"{place}[{name!r}] {why}: {models!r}")
            fallbacks[cast(str, name)] = cast("tuple[str, ...]", names)
    return fallbacks


def read_aliases(place: str, value: object) -> dict[str, str]:
    """Return the model of each alias.

    Raises:
        ValueError: they are malformed, or an alias refers to an alias; names the place and what was expected.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{place} must be a dict such as {{'gpt-4o': 'policy'}}; got {value!r}")
    aliases = dict(cast("Mapping[Any, Any]", value or {}))
    for alias, model in aliases.items():
        if not (isinstance(alias, str) and alias and isinstance(model, str) and model):
            raise ValueError(f"{place}[{alias!r}] must be the name of a model; got {model!r}")
        if model in aliases:
            raise ValueError(f"{place}[{alias!r}] must be the name of a model; {model!r} is also an alias")
    return aliases


def read_litellm_config(config: object) -> LiteLLMSettings:
    """Return the models, retries, fallbacks and aliases of a configuration of LiteLLM.

    Raises:
        ValueError: it has another setting; names it and its replacement.
    """
    place = "litellm_config"
    if not isinstance(config, Mapping):
        raise ValueError(f"{place} must be a dict such as {{'router_settings': {{...}}}}; got {config!r}")
    sections = dict(cast("Mapping[str, Any]", config))
    models, settings = sections.pop("model_list", None), dict[str, Any]()
    for section, entries in sections.items():
        if section not in _SETTINGS:
            suggestion = hint(str(section), ("model_list", *_SETTINGS))
            raise ValueError(f"{place}[{section!r}] is not supported: this gateway does not run on LiteLLM{suggestion}")
        if not isinstance(entries, Mapping):
            raise ValueError(f"{place}[{section!r}] must be a dict; got {entries!r}")
        for name, value in cast("Mapping[str, Any]", entries).items():
            if name not in _SETTINGS[section]:
                instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else hint(str(name), _SETTINGS[section])
                raise ValueError(
                    f"{place}[{section!r}][{name!r}] is not supported: this gateway does not run on LiteLLM{instead}"
                )
            if settings.setdefault(name, value) != value:
                raise ValueError(f"{place} contains two values of {name!r}: {settings[name]!r} and {value!r}")
    fallbacks: Any = settings.get("fallbacks")
    if (default := settings.get("default_fallbacks")) is not None:
        fallback_parts = cast(
            "list[Any]", fallbacks if isinstance(fallbacks, list) else [fallbacks] if fallbacks else []
        )
        fallbacks = [*fallback_parts, {ANY_MODEL: default}]
    return LiteLLMSettings(models, settings.get("num_retries"), fallbacks, settings.get("model_group_alias"))
