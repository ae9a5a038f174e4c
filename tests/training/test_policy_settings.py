"""What `policies=` takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ("ab", "policies must name the policies that learn"),
        ([], "policies must name the policies that learn"),
        (["a b"], "'a b' is no name"),
        ([3], "3 is no name"),
        ({"a": None}, r"policies\['a'\] must be a dict"),
        ({"a": {"lerning_rate": 1}}, r"has no setting 'lerning_rate' of its own: did you mean 'learning_rate'"),
        ({"a": {"batch_size": 1}}, "its own can be model, lora"),
        ({"a": {"learning_rate": -1.0}}, r"policies\['a'\]: learning_rate must be a number above 0"),
    ],
)
def test_what_is_no_set_of_policies_is_refused(policies: Any, told: str) -> None:
    with pytest.raises(agl.BadRequestError, match=told):
        agl.GRPO(model="m", policies=policies)


def test_each_policy_has_what_it_names_and_else_what_the_run_has() -> None:
    settings = agl.GRPO(
        model="m", learning_rate=1e-3, policies={"a": {"model": Path("n")}, "b": {"learning_rate": 1e-4}}
    ).settings
    own = settings.by_policy()
    assert [(name, one.model, one.learning_rate) for name, one in own.items()] == [("a", "n", 1e-3), ("b", "m", 1e-4)]
    assert agl.GRPO(model="m").settings.by_policy().keys() == {None}


def test_a_model_is_needed_unless_every_policy_names_one() -> None:
    assert agl.GRPO(policies={"a": {"model": "n"}, "b": {"model": "o"}}).settings.model == "n"
    with pytest.raises(agl.BadRequestError, match="or each of policies must name one"):
        agl.GRPO(policies={"a": {"model": "n"}, "b": {}})


def test_vllm_serves_one_policy() -> None:
    with pytest.raises(agl.BadRequestError, match="one vLLM server serves one policy"):
        agl.GRPO(model="m", use_vllm=True, policies=["a", "b"])
