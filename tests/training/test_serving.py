"""What GRPO gives agents: its model, and a model for each role."""

from __future__ import annotations

from typing import Any

from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.training.serving import resources_to_publish

SAMPLING = {"temperature": 1.0, "max_tokens": 16}


def models(*names: str) -> list[Any]:
    address = "http://127.0.0.1:9/v1"
    return [{"model_name": name, "litellm_params": {"model": name, "api_base": address}} for name in names]


def test_without_roles_there_is_the_learning_model() -> None:
    proxy = LLMProxy(model_list=models("policy"), store=InMemoryLightningStore())
    resources: dict[str, Any] = resources_to_publish(proxy, "main_llm", ["policy"], SAMPLING)
    assert list(resources) == ["main_llm"]
    assert (resources["main_llm"].model, resources["main_llm"].sampling_parameters) == ("policy", SAMPLING)


def test_each_role_has_the_model_of_its_policy_and_only_the_learning_one_is_sampled_as_the_algorithm_says() -> None:
    proxy = LLMProxy(
        model_list=models("policy", "judge"),
        store=InMemoryLightningStore(),
        policies={
            "learner": {"kind": "trained", "models": ["policy"], "roles": ["writer"]},
            "grader": {"kind": "frozen", "models": ["judge"], "roles": ["critic"]},
        },
    )
    resources: dict[str, Any] = resources_to_publish(proxy, "main_llm", ["policy"], SAMPLING)
    assert list(resources) == ["main_llm", "writer", "critic"]
    assert (resources["writer"].model, resources["writer"].sampling_parameters) == ("policy", SAMPLING)
    assert (resources["critic"].model, resources["critic"].sampling_parameters) == ("judge", {})
