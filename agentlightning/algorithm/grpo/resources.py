"""The resources that a run publishes: the model that learns, and one for each role of the gateway's policies."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import LLM, NamedResources


def resources_to_publish(
    proxy: LLMProxy, name: str | None, models: Sequence[str], sampling: dict[str, object]
) -> NamedResources:
    """Return the first learning model under `name`, if there is one, and under each role the model of its policy.

    Only what is served by `models` is sampled as the algorithm says; frozen and external models keep their own way.

    Raises:
        ValueError: a role has not exactly one model.
    """
    resources: NamedResources = {}
    if name is not None:
        resources[name] = proxy.as_resource(model=models[0], sampling_parameters=sampling)
    for role, resource in (proxy.as_resources() if proxy.roles else {}).items():
        learns = isinstance(resource, LLM) and resource.model in models
        resources[role] = resource.model_copy(update={"sampling_parameters": sampling}) if learns else resource
    return resources
