"""The models that GRPO gives agents: its own, and one for each role."""

from __future__ import annotations

from typing import Any

from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.training.serving import resources_to_publish

SAMPLING = {"temperature": 1.0, "max_tokens": 16}


def resources_of(policies: Any, *models: str) -> dict[str, Any]:
    """Return model and sampling of each resource that a gateway of these models publishes."""
    address = "http://127.0.0.1:9/v1"
    entries: list[Any] = [
        {"model_name": name, "litellm_params": {"model": name, "api_base": address}} for name in models
    ]
    proxy = LLMProxy(model_list=entries, store=InMemoryLightningStore(), policies=policies)
    resources: dict[str, Any] = resources_to_publish(proxy, "main_llm", ["policy"], SAMPLING)
    return {name: (resource.model, resource.sampling_parameters) for name, resource in resources.items()}


def test_each_role_has_the_model_of_its_policy_and_only_the_learning_one_is_sampled_as_the_algorithm_says() -> None:
    assert resources_of(None, "policy") == {"main_llm": ("policy", SAMPLING)}
    policies = {
        "learner": {"kind": "trained", "models": ["policy"], "roles": ["writer"]},
        "grader": {"kind": "frozen", "models": ["judge"], "roles": ["critic"]},
    }
    learning = ("policy", SAMPLING)
    assert resources_of(policies, "policy", "judge") == {
        "main_llm": learning, "writer": learning, "critic": ("judge", {}),
    }  # fmt: skip
