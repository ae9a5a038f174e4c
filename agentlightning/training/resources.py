"""The resources that a run publishes: the model that learns, one for each role of the gateway's policies, and the
Trainer's own beside them, such as a frozen prompt or a judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import LLM, NamedResources


def resources_to_publish(
    proxy: LLMProxy,
    name: str | None,
    models: Sequence[str],
    sampling: dict[str, object],
    beside: NamedResources | None = None,
) -> NamedResources:
    """Return the first learning model under `name`, if there is one, and under each role the model of its policy,
    and what stands `beside` them as it is.

    Only what is served by `models` is sampled as the algorithm says; frozen and external models keep their own way.

    Raises:
        ValueError: a role has not exactly one model, or its name is that of a resource of the Trainer's.
    """
    resources: NamedResources = {}
    if name is not None:
        resources[name] = proxy.as_resource(model=models[0], sampling_parameters=sampling)
    for role, resource in (proxy.as_resources() if proxy.roles else {}).items():
        learns = isinstance(resource, LLM) and resource.model in models
        resources[role] = resource.model_copy(update={"sampling_parameters": sampling}) if learns else resource
    check_beside(resources, beside or {})
    return {**resources, **(beside or {})}


def check_beside(policies: Collection[str], beside: NamedResources) -> None:
    """Check that the Trainer's resources have other names than the policies that learn.

    Raises:
        BadRequestError: one has not; names it.
    """
    if taken := sorted({*policies} & beside.keys()):
        raise BadRequestError(
            f"initial_resources have {', '.join(map(repr, taken))}, by which agents are given the model that learns: "
            "choose another name for it, or set the algorithm's resource_name"
        )
