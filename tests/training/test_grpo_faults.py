"""Runs of GRPO that cannot go on, or must not begin."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentlightning as agl
from agentlightning.errors import BadRequestError, NonFiniteLossError
from agentlightning.training.ledger import read_rollout
from agentlightning.training.rollouts import evidence
from agentlightning.types import Span
from tests.algorithm.parts import ask, fit, say, wants_digits


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


WEIGHT = 1e25
"""With it rewards within their bound are beyond 32-bit floats when they are compared."""


def _agent_with_rewards(rewards: Any) -> Any:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> dict[str, float]:
        ask(llm, [say(task)])
        return {"reward": next(rewards) / WEIGHT}

    return agent


def test_a_loss_that_is_not_finite_skips_the_step_counts_it_and_leaves_the_weights(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = itertools.chain([1e39, -1e39, 1e39, -1e39], itertools.cycle([1.0, 0.0]))  # beyond 32-bit floats
    settings: dict[str, Any] = {
        "scale_rewards": "none",
        "reward_weights": {"reward": WEIGHT},
        "max_steps": 2,
        "batch_size": 1,
    }
    result = fit(_agent_with_rewards(rewards), ["a"], model=untrained_model, output_dir=tmp_path, **settings)
    first, second = _lines(tmp_path)
    assert first["update"]["skipped_steps"] == 1
    assert first["calls_excluded"] == {"step_skipped": 4}
    assert first["update"]["loss"] is None
    assert second["calls_trained"] == 4
    assert (result.steps, second["update"]["steps"]) == (1, 1)


def test_three_steps_in_a_row_without_a_finite_loss_end_the_run(untrained_model: Path, tmp_path: Path) -> None:
    agent = _agent_with_rewards(itertools.cycle([1e39, -1e39]))
    settings: dict[str, Any] = {
        "scale_rewards": "none",
        "reward_weights": {"reward": WEIGHT},
        "max_steps": 9,
        "batch_size": 1,
    }
    with pytest.raises(NonFiniteLossError, match=r"three|3 steps in a row"):
        fit(agent, ["a"], model=untrained_model, output_dir=tmp_path, **settings)
    assert [line["calls_excluded"] for line in _lines(tmp_path)] == [{"step_skipped": 4}] * 3
    before, after = _weights(untrained_model), _weights(tmp_path / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_skipped_step_does_not_count_when_another_one_follows(untrained_model: Path, tmp_path: Path) -> None:
    skipped, taken = [1e39, -1e39, 1e39, -1e39], [1.0, 0.0, 1.0, 0.0]
    agent = _agent_with_rewards(iter(skipped + skipped + taken + skipped + skipped))
    settings: dict[str, Any] = {
        "scale_rewards": "none",
        "reward_weights": {"reward": WEIGHT},
        "max_steps": 5,
        "batch_size": 1,
    }
    assert fit(agent, ["a"], model=untrained_model, output_dir=tmp_path, **settings).steps == 1


def test_calls_after_a_skipped_step_are_stamped_with_the_weights_that_are_there(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = itertools.chain([1e39, -1e39, 1e39, -1e39], itertools.cycle([1.0, 0.0]))
    proxy = agl.LLMProxy()
    settings: dict[str, Any] = {
        "scale_rewards": "none",
        "reward_weights": {"reward": WEIGHT},
        "max_steps": 3,
        "batch_size": 1,
        "trainer_llm_proxy": proxy,
    }
    result = fit(_agent_with_rewards(rewards), ["a"], model=untrained_model, output_dir=tmp_path, **settings)
    assert result.steps == proxy.weight_version == 2


def test_a_model_with_broken_weights_ends_the_run_after_three_steps(untrained_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(untrained_model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(tmp_path / "broken")
    with pytest.raises(NonFiniteLossError):
        fit(wants_digits, ["a"], model=tmp_path / "broken", output_dir=tmp_path / "run", max_steps=9, batch_size=1)
    lines = _lines(tmp_path / "run")
    assert [line["update"]["skipped_steps"] for line in lines] == [1, 1, 1]
    assert [line["calls_excluded"] for line in lines] == [{"upstream_error": 4}] * 3


def test_a_learning_rate_that_destroys_the_weights_ends_the_run(untrained_model: Path, tmp_path: Path) -> None:
    agent = _agent_with_rewards(itertools.cycle([1.0, 0.0]))
    with pytest.raises(NonFiniteLossError, match="smaller learning_rate"):
        fit(agent, ["a"], model=untrained_model, output_dir=tmp_path, max_steps=20, batch_size=1, learning_rate=1e30)


@pytest.mark.parametrize("tasks", [None, []])
def test_no_tasks_are_refused(untrained_model: Path, tmp_path: Path, tasks: Any) -> None:
    with pytest.raises(agl.BadRequestError, match="GRPO needs tasks: pass train_dataset"):
        fit(wants_digits, tasks, model=untrained_model, output_dir=tmp_path)


def test_evaluations_without_tasks_to_evaluate_on_are_refused(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match=r"eval_steps=2 has no effect .* val_dataset"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path, eval_steps=2)


def test_an_adapter_that_makes_no_triplets_is_refused_by_name(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match=r"adapter TraceToMessages makes none. Use TracerTraceToTriplet"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path, trainer_adapter=agl.TraceToMessages())
    assert not list(tmp_path.iterdir())


def test_a_reply_length_that_leaves_no_room_for_a_prompt_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match=r"max_completion_length=512 leaves no room .* 256 tokens"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path, max_completion_length=512)


def test_a_second_model_by_the_name_of_the_policy_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    entry: Any = {
        "model_name": "policy",
        "litellm_params": {"model": "hosted_vllm/p", "api_base": "http://127.0.0.1:9"},
    }
    proxy = agl.LLMProxy(model_list=[entry])
    with pytest.raises(agl.BadRequestError, match="serves a model named 'policy' already"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path, trainer_llm_proxy=proxy)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "meta"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    untrained_model: Path, tmp_path: Path, device: str
) -> None:
    with pytest.raises(agl.BadRequestError, match=rf"device='{device}' cannot be used: .*sees these devices: cpu"):
        fit(wants_digits, ["one"], model=untrained_model, output_dir=tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["no/where/at/all", "no-such-owner/no-such-model", "misspelt"])
def test_a_model_that_is_not_there_is_refused_without_asking_the_network(model: str, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match=f"model='{model}' is neither a folder nor the name of a model"):
        fit(wants_digits, ["a"], model=model, output_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_cannot_be_written_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(agl.BadRequestError, match=r"output folder .*file/run' cannot be written"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path / "file" / "run")


async def test_rewards_that_are_too_large_are_left_out_and_the_rest_is_trained(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = itertools.cycle([1e308, 1.0, -1e200, 0.0, 10**400, 1.0, float("nan"), 0.0])

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return next(rewards)

    settings: dict[str, Any] = {"model": untrained_model, "output_dir": tmp_path, "batch_size": 1, "max_steps": 1}
    await asyncio.to_thread(fit, agent, ["a"], num_generations=8, **settings)
    [line] = _lines(tmp_path)
    assert (line["calls_trained"], line["calls_excluded"]) == (4, {"infrastructure_fault": 4})


async def test_a_stored_reward_that_is_too_large_is_left_out_with_a_reason() -> None:
    """As a store has it of an older version, or of a program in another language."""
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout("task", mode="train")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1e308}
    await store.add_span(Span.from_attributes(attributes=attributes, rollout_id=ids[0], attempt_id=ids[1]))
    await store.update_attempt(*ids, status="succeeded", outcome="scored")
    rollout = await store.get_rollout_by_id(rollout.rollout_id)
    assert rollout is not None
    found = await evidence(store, rollout)
    assert (found.reward, found.attempts[0].reward) == (None, None)
    assert read_rollout(rollout, found.attempts, found.spans).verdict == "no_reward"


@pytest.mark.parametrize("name", ["main_llm", "policy"])
def test_a_resource_by_the_name_of_the_policy_is_refused(untrained_model: Path, tmp_path: Path, name: str) -> None:
    judge = {name: agl.LLM(endpoint="http://127.0.0.1:1/v1", model="judge")}
    settings: dict[str, Any] = {"trainer_initial_resources": judge, "resource_name": name}
    with pytest.raises(BadRequestError, match=f"initial_resources have '{name}'.* choose another name for it"):
        fit(wants_digits, ["a"], model=untrained_model, output_dir=tmp_path / "run", **settings)
