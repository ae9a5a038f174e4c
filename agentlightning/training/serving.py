"""The gateway of a run and its published resources. The policies are among the gateway's models, and each call belongs
to the policy that learns from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agentlightning.engine.policy_engine import PolicyEngine
from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.policies import PolicyConfig
from agentlightning.store.base import LightningStore
from agentlightning.training.settings import TrainingSettings
from agentlightning.training.updater import Updater
from agentlightning.types import LLM, NamedResources


async def serve_policies(
    proxy: LLMProxy | None, store: LightningStore, updater: Updater, settings: TrainingSettings, stack: AsyncExitStack
) -> LLMProxy:
    """Return a running gateway with the policies among its models, the program's or a new one; `stack` restores it.

    Raises:
        BadRequestError: the gateway already serves a model of the same name, or its policies are not those of the run.
    """
    own = None if updater.names is None else {name: _policy_of(name) for name in updater.names}
    proxy = proxy or LLMProxy(store=store, policies=own)
    if updater.names is not None:
        _check_policies(proxy, updater.names)
    others = proxy.model_list
    for engine in updater.engines:
        if any(other["model_name"] == engine.model_name for other in others):
            raise BadRequestError(
                f"The gateway already serves a model named {engine.model_name!r}, which is the name of the policy that "
                "learns. Rename the other model"
            )
    proxy.update_model_list([*others, *(entry_of(engine, settings) for engine in updater.engines)])
    stack.callback(proxy.update_model_list, others)
    if not proxy.is_running():
        await proxy.start()
        stack.push_async_callback(proxy.stop)
    async with proxy.weight_change(updater.weight_version):  # a gateway may have the version of an earlier run
        pass
    return proxy


def entry_of(engine: PolicyEngine, settings: TrainingSettings) -> Any:
    """Return the entry of an engine in the gateway's list of models."""
    return {
        "model_name": engine.model_name,
        "litellm_params": {
            "model": f"hosted_vllm/{engine.model_name}",
            "api_base": engine.base_url,
            "api_key": engine.api_key,
            "unreachable_seconds": settings.vllm_server_timeout if settings.use_vllm else 0,
        },
    }


def _policy_of(name: str) -> PolicyConfig:
    """Return the settings of a policy for a gateway, with a role and a model of its name."""
    return {"kind": "trained", "models": [name], "roles": [name]}


def _check_policies(proxy: LLMProxy, names: Sequence[str]) -> None:
    """Raise BadRequestError if the program's own gateway does not know the policies of the run."""
    by_name = {policy.name: policy for policy in proxy.policies}
    for name in names:
        policy = by_name.get(name)
        if policy is None or policy.kind != "trained" or policy.models != (name,) or not policy.roles:
            example = ", ".join(f"{each!r}: {_policy_of(each)}" for each in names)
            raise BadRequestError(
                f"GRPO trains the policies {', '.join(names)}, but the gateway has other policies ({name!r} is "
                f"{'missing' if policy is None else 'a different policy'}): pass LLMProxy(policies={{{example}}}), "
                "optionally with more roles, or do not pass llm_proxy to the Trainer"
            )
    if more := [policy.name for policy in by_name.values() if policy.kind == "trained" and policy.name not in names]:
        raise BadRequestError(
            f"The gateway has policies of kind 'trained' that GRPO does not train: {', '.join(more)}. Add them to "
            "policies= of GRPO, or set their kind to 'frozen' in LLMProxy(policies=...)"
        )


def resources_to_publish(
    proxy: LLMProxy,
    name: str | None,
    models: Sequence[str],
    sampling: dict[str, object],
    others: NamedResources | None = None,
) -> NamedResources:
    """Return the resources: the first learning model as `name` (if not None), the model of each policy as its role in
    the gateway, and the `others` unchanged.

    The algorithm's sampling settings apply only to `models`; frozen and external models keep their own.

    Raises:
        ValueError: a role has not exactly one model, or its name is that of another resource.
    """
    resources: NamedResources = {}
    if name is not None:
        resources[name] = proxy.as_resource(model=models[0], sampling_parameters=sampling)
    for role, resource in (proxy.as_resources() if proxy.roles else {}).items():
        learns = isinstance(resource, LLM) and resource.model in models
        resources[role] = resource.model_copy(update={"sampling_parameters": sampling}) if learns else resource
    check_resource_names(resources, others or {})
    return {**resources, **(others or {})}


def check_resource_names(policies: Collection[str], others: NamedResources) -> None:
    """Raise BadRequestError if one of the Trainer's resources has the name of a policy that learns."""
    if shared := sorted({*policies} & others.keys()):
        raise BadRequestError(
            f"initial_resources has {', '.join(map(repr, shared))}, which is the resource name of the model that "
            "learns. Rename the resource, or set the algorithm's resource_name"
        )
