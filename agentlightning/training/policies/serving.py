"""The gateway of a run: the policies are among its models, and each call belongs to the policy that learns from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentlightning.engine.engine import ONLY_POLICY, InferenceEngine
from agentlightning.engine.policy_engine import PolicyEngine
from agentlightning.engine.seeds import PlaceOf
from agentlightning.engine.vllm import VLLMEngine
from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.policies import PolicyConfig
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint.resume import place_of
from agentlightning.training.policies.learners import Learner, Learners
from agentlightning.training.settings import GRPOSettings


async def serve_policies(
    given: LLMProxy | None, store: LightningStore, learners: Learners, settings: GRPOSettings, stack: AsyncExitStack
) -> LLMProxy:
    """Return a running gateway with the policies among its models; `stack` leaves it as it was found.

    `given` is that of the program; without one, the run has its own.

    Raises:
        BadRequestError: it serves a model of the same name already, or its policies are not those of the run.
    """
    proxy = given or LLMProxy(store=store, policies=_policies_of(learners.names))
    if learners.names is not None:
        _check_policies(proxy, learners.names)
    others = proxy.model_list
    for engine in learners.engines:
        if any(other["model_name"] == engine.model_name for other in others):
            raise BadRequestError(
                f"The gateway serves a model named {engine.model_name!r} already, which is the name of the policy "
                "that learns; give the other one another name"
            )
    proxy.update_model_list([*others, *(entry_of(engine, settings) for engine in learners.engines)])
    stack.callback(proxy.update_model_list, others)
    if not proxy.is_running():
        await proxy.start()
        stack.push_async_callback(proxy.stop)
    async with proxy.weight_change(
        learners.weight_version
    ):  # a gateway that served a run before has that run's version
        pass
    return proxy


def entry_of(engine: PolicyEngine, settings: GRPOSettings) -> Any:
    """Return an engine as one of the gateway's list of models."""
    return {
        "model_name": engine.model_name,
        "litellm_params": {
            "model": f"hosted_vllm/{engine.model_name}",
            "api_base": engine.base_url,
            "api_key": engine.api_key,
            "unreachable_seconds": settings.vllm_server_timeout if settings.use_vllm else 0,
        },
    }


def _policies_of(names: Sequence[str] | None) -> dict[str, PolicyConfig] | None:
    """Return the settings of the policies for a gateway: each has a role and a model of its name."""
    return None if names is None else {name: _policy_of(name) for name in names}


def _policy_of(name: str) -> PolicyConfig:
    return {"kind": "trained", "models": [name], "roles": [name]}


def _check_policies(proxy: LLMProxy, names: Sequence[str]) -> None:
    """Check that a gateway of the program's own knows the policies of the run.

    Raises:
        BadRequestError: it does not; says what to write.
    """
    known = {policy.name: policy for policy in proxy.policies}
    for name in names:
        found = known.get(name)
        if found is None or found.kind != "trained" or found.models != (name,) or not found.roles:
            wanted = ", ".join(f"{each!r}: {_policy_of(each)}" for each in names)
            raise BadRequestError(
                f"GRPO trains the policies {', '.join(names)}, and the gateway's policies do not fit ({name!r} is "
                f"{'missing' if found is None else 'another one'}): give LLMProxy(policies={{{wanted}}}), with further "
                "roles if you like, or give the Trainer no llm_proxy"
            )
    if more := [policy.name for policy in known.values() if policy.kind == "trained" and policy.name not in names]:
        raise BadRequestError(
            f"The gateway has trained policies that GRPO does not train: {', '.join(more)}. Name them in policies=, or "
            "make them 'frozen' in LLMProxy(policies=...)"
        )


def engine_for(learner: Learner, store: LightningStore, folder: Path, *, begun: int) -> PolicyEngine:
    """Return what serves a policy; `begun` steps were taken by earlier starts of the run."""
    settings, policy = learner.settings, learner.policy
    seed = settings.seed if settings.deterministic else settings.seed + begun
    if settings.use_vllm:
        return VLLMEngine(
            policy,
            settings,
            model=settings.model,
            folder=folder,
            has_adapters=settings.lora is not None,
            seed=seed,
            max_batch=settings.engine_batch,
        )
    place = _place_in(store) if settings.deterministic else None
    name = learner.name or ONLY_POLICY
    return InferenceEngine(policy, max_batch=settings.engine_batch, seed=seed, place_of=place, model_name=name)


def _place_in(store: LightningStore) -> PlaceOf:
    """Return what gives the place in the run of a rollout of this store."""

    async def place(rollout_id: str) -> str | None:
        rollout = await store.get_rollout_by_id(rollout_id)
        return None if rollout is None else place_of(rollout)

    return place
