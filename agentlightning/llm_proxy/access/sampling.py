"""The sampling parameters in the resources of a rollout, which the gateway sets in requests that do not have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentlightning.llm_proxy.dialects.json_values import Json, fields_of
from agentlightning.types import NamedResources, ProxyLLM

ModelSampling = tuple[tuple[str, str, Json], ...]
"""The models behind the gateway: the name of the resource, the model, and the fields of a request."""


def sampling_of(resources: NamedResources) -> ModelSampling:
    """Return the parameters of the models behind the gateway. The fields of `extra_body` count like others."""
    models = ((name, each) for name, each in resources.items() if isinstance(each, ProxyLLM))
    return tuple((name, each.model, _fields(each.sampling_parameters)) for name, each in models)


def _fields(parameters: Mapping[str, object]) -> Json:
    fields = {**fields_of(parameters.get("extra_body")), **parameters}
    return {name: value for name, value in fields.items() if value is not None and name != "extra_body"}


def parameters_for(sampling: ModelSampling, resolved: Callable[[str], str], model: str, role: str | None) -> Json:
    """Return the parameters for a call of a model: those of its resource with the name of the call's role; if there is
    none, those that are equal in all its resources. `resolved` returns the model of an alias."""
    own = {name: fields for name, named, fields in sampling if resolved(named) == model}
    if role is not None and role in own:
        return own[role]
    first, *others = [*own.values()] or [Json()]
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
