"""The resources that a run publishes: the model that learns, and one for each role of the gateway's policies."""

from __future__ import annotations

from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import LLM, NamedResources


def resources_to_publish(proxy: LLMProxy, name: str, model: str, sampling: dict[str, object]) -> NamedResources:
    """Return the learning model under `name`, and under each role the model of its policy.

    Only what is served by `model` is sampled as the algorithm says; frozen and external models keep their own way.

    Raises:
        ValueError: a role has not exactly one model.
    """
    resources: NamedResources = {name: proxy.as_resource(model=model, sampling_parameters=sampling)}
    for role, resource in (proxy.as_resources() if proxy.roles else {}).items():
        learns = isinstance(resource, LLM) and resource.model == model
        resources[role] = resource.model_copy(update={"sampling_parameters": sampling}) if learns else resource
    return resources
