"""A whole run of GRPO: real store, gateway, runner, engine and model; what it learns, records and leaves behind."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentlightning as agl
from agentlightning.engine.completion import Completion
from agentlightning.engine.service import ChatService
from agentlightning.training.result import GRPOResult
from tests.algorithm.parts import SMALL, ask, calls_of, fit, metrics_of, rollouts_of, say, two_turns, wants_digits

TASKS = ["one", "two", "three", "four"]


def test_the_reward_rises_and_the_weights_change(untrained_model: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 10, "batch_size": 4, "num_generations": 8, "num_iterations": 2, "learning_rate": 5e-3}
    result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, **settings)
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    before = AutoModelForCausalLM.from_pretrained(untrained_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_run_folder_holds_model_metrics_and_settings(untrained_model: Path, tmp_path: Path) -> None:
    result = fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path, val_dataset=["five"], seed=3)
    assert isinstance(result, GRPOResult)
    assert result.output_dir == tmp_path
    assert result.steps == 2

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False)
    assert prompt == "<user>one"
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["grpo"]["seed"] == 3
    assert config["grpo"]["model"] == str(untrained_model)
    assert {"python", "torch", "transformers"} <= set(config["versions"])

    lines = metrics_of(result)
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["held_out"] is None for line in lines] == [True, False]
    for line in lines:
        assert set(line["seconds"]) == {"generate", "wait", "train"}
        assert line["cpu_seconds"]["store_and_gateway"] >= 0
        assert line["calls_captured"] == line["calls_trained"] + sum(line["calls_excluded"].values())
        assert line["rollouts_done"] == 8


def test_held_out_tasks_are_measured_before_and_after_and_never_trained(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    result = fit(
        wants_digits,
        TASKS,
        store=store,
        model=untrained_model,
        output_dir=tmp_path,
        val_dataset=["held out"],
        eval_steps=1,
        max_steps=3,
    )
    assert [(e.step, e.sampling) for e in result.evaluations] == [
        (0, "sampled"),
        (0, "greedy"),
        (1, "sampled"),
        (2, "sampled"),
        (3, "sampled"),
        (3, "greedy"),
    ]


async def test_held_out_rollouts_enter_no_ledger(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await _run(untrained_model, tmp_path, val_dataset=["held out"])
    trained, held_out = await rollouts_of(store, "train"), await rollouts_of(store, "val")
    assert {rollout.input for rollout in held_out} == {"held out"}
    assert "held out" not in {rollout.input for rollout in trained}
    calls = await calls_of(store, trained)
    assert sum(figures.calls_captured for figures in result.metrics) == len(calls) == 2 * len(trained)


async def test_the_limits_of_the_trainer_are_recorded_with_every_rollout(untrained_model: Path, tmp_path: Path) -> None:
    limits = {"infrastructure_retries": 1, "max_attempts": 2, "retry_condition": ["unresponsive"]}
    settings: dict[str, Any] = {"max_steps": 1, "val_dataset": ["held out"], "step_timeout_seconds": 90.0}
    store, _ = await _run(untrained_model, tmp_path, trainer_rollout_config=limits, **settings)
    expected = agl.RolloutConfig(**limits, timeout_seconds=90.0)
    for mode in ("train", "val"):
        assert {rollout.config == expected for rollout in await rollouts_of(store, mode)} == {True}


async def test_each_call_is_stamped_with_the_weights_that_served_it(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await _run(untrained_model, tmp_path, max_steps=3)
    rollouts = await rollouts_of(store)
    steps = {rollout.rollout_id: (rollout.metadata or {})["step"] for rollout in rollouts}
    versions = {(steps[call.ref.rollout_id], call.weight_version) for call in await calls_of(store, rollouts)}
    assert versions == {(1, 0), (2, 1), (3, 2)}
    assert result.steps == 3


async def test_a_gateway_that_served_a_run_before_stamps_from_zero_again_and_gets_its_models_back(
    untrained_model: Path, tmp_path: Path
) -> None:
    judge: Any = {"model_name": "judge", "litellm_params": {"model": "hosted_vllm/j", "api_base": "http://127.0.0.1:9"}}
    proxy = agl.LLMProxy(model_list=[judge])
    await _run(untrained_model, tmp_path / "first", trainer_llm_proxy=proxy)
    store, _ = await _run(untrained_model, tmp_path / "second", trainer_llm_proxy=proxy)
    assert {call.weight_version for call in await calls_of(store, await rollouts_of(store))} == {0, 1}
    assert proxy.model_list == [judge]
    assert not proxy.is_running()


async def test_gateway_spans_hold_exactly_what_the_engine_consumed_and_produced(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = _remember_replies(monkeypatch)
    store, _ = await _run(untrained_model, tmp_path)
    calls = await calls_of(store, await rollouts_of(store))
    assert len(calls) == len(replies) > 0
    for call in calls:
        completion, weight_version = replies[call.response_id]
        assert call.prompt_token_ids == completion.prompt_ids
        assert call.completion_token_ids == completion.token_ids
        assert call.logprobs == completion.logprobs
        assert call.weight_version == weight_version


async def test_log_probabilities_are_those_of_a_forward_pass_of_the_same_weights(
    untrained_model: Path, tmp_path: Path
) -> None:
    store, _ = await _run(untrained_model, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(untrained_model).eval()
    calls = [call for call in await calls_of(store, await rollouts_of(store)) if call.weight_version == 0]
    assert len(calls) == 16
    for call in calls:
        tokens = torch.tensor([[*call.prompt_token_ids, *call.completion_token_ids]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)
        first = len(call.prompt_token_ids) - 1
        expected = [float(logprobs[first + i, token]) for i, token in enumerate(call.completion_token_ids)]
        assert call.logprobs == pytest.approx(expected, abs=1e-4)


async def test_turns_that_continue_each_other_are_one_row_and_the_first_ratio_is_one(
    untrained_model: Path, tmp_path: Path
) -> None:
    _, result = await _run(untrained_model, tmp_path)
    for figures in result.metrics:
        assert figures.update["rows"] < figures.calls_trained
        assert figures.update["first_ratio_error"] < 1e-3
        assert figures.update["rows"] == sum(figures.seams.values())


def test_the_same_seed_and_one_runner_give_the_same_rewards(untrained_model: Path, tmp_path: Path) -> None:
    def rewards(name: str) -> list[float | None]:
        result = fit(
            wants_digits,
            TASKS,
            model=untrained_model,
            output_dir=tmp_path / name,
            max_steps=3,
            seed=5,
            trainer_runner=None,
        )
        return [figures.mean_reward for figures in result.metrics]

    assert rewards("first") == rewards("second")


def test_an_output_folder_that_holds_a_run_is_refused_and_left_as_it_is(untrained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(agl.BadRequestError, match="holds a run already"):
        fit(wants_digits, TASKS, model=untrained_model, output_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


async def _run(model: Path, folder: Path, **settings: Any) -> tuple[agl.InMemoryLightningStore, GRPOResult]:
    """Run `two_turns` in a thread, so that the store can be asked from here afterwards."""
    store = agl.InMemoryLightningStore()
    result = await asyncio.to_thread(fit, two_turns, TASKS, store=store, model=model, output_dir=folder, **settings)
    return store, result


def _remember_replies(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, tuple[Completion, int]]:
    """Return what every reply of an engine joins by its id: its completion, and the version of the weights."""
    replies: dict[str | None, tuple[Completion, int]] = {}
    respond = ChatService._response

    def remembered(service: Any, request: Any, completions: Sequence[Completion], version: int) -> dict[str, object]:
        response = respond(service, request, completions, version)
        replies[str(response["id"])] = completions[0], version
        return response

    monkeypatch.setattr(ChatService, "_response", remembered)
    return replies


@pytest.mark.parametrize("algorithm", [agl.GRPO, agl.PPO, agl.SFT])
def test_agents_have_the_trainers_resources_beside_the_policy(
    untrained_model: Path, tmp_path: Path, algorithm: Any
) -> None:
    seen = set[tuple[str, ...]]()

    @agl.rollout
    def agent(task: str, main_llm: agl.LLM, judge: agl.LLM, prompt: agl.PromptTemplate, rollout: agl.Rollout) -> float:
        ask(main_llm, [say(prompt.format(task=task))])
        seen.add((rollout.mode or "", main_llm.model, judge.model, prompt.template))
        return float(len(seen) % 2)

    beside: dict[str, Any] = {
        "prompt": agl.PromptTemplate(template="Say {task}.", engine="f-string"),
        "judge": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="judge"),
    }
    settings = {name: value for name, value in SMALL.items() if name in inspect.signature(algorithm).parameters}
    chosen: dict[str, Any] = {"min_reward": 0.0} if algorithm is agl.SFT else {}
    made = algorithm(model=untrained_model, **{**settings, "output_dir": tmp_path / "run", "max_steps": 1, **chosen})
    trainer = agl.Trainer(algorithm=made, strategy="shm", store="memory", initial_resources=beside)
    trainer.fit(agent, train_dataset=["a"], val_dataset=["b"])
    assert seen == {(mode, "policy", "judge", "Say {task}.") for mode in ("train", "val")}


def test_two_hundred_parallel_calls_of_one_attempt_are_answered_and_trained(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = iter((0.0, 1.0))  # a group of equal rewards would train nothing

    @agl.rollout
    def many(task: str, llm: agl.LLM) -> float:
        with ThreadPoolExecutor(200) as pool:
            texts = list(pool.map(lambda number: ask(llm, [say(f"{task} {number}")])["content"], range(200)))
        assert len(texts) == 200
        return next(rewards)

    settings = {"max_steps": 1, "batch_size": 1, "num_generations": 2, "max_completion_length": 2}
    result = fit(many, ["one"], model=untrained_model, output_dir=tmp_path, **settings)
    [line] = metrics_of(result)
    assert (line["calls_captured"], line["calls_trained"], line["calls_excluded"]) == (400, 400, {})


@pytest.mark.parametrize(("limit", "val_dataset"), [(3, ["held out"] * 9), (12, None)])
def test_a_smoke_test_by_max_rollouts_ends_without_an_error(
    untrained_model: Path, tmp_path: Path, limit: int, val_dataset: list[str] | None
) -> None:
    store = agl.InMemoryLightningStore()
    fit(
        wants_digits,
        TASKS,
        store=store,
        model=untrained_model,
        output_dir=tmp_path,
        val_dataset=val_dataset,
        max_steps=20,
        trainer_max_rollouts=limit,
    )
    ended = asyncio.run(store.query_rollouts())
    assert {rollout.status for rollout in ended} == {"succeeded", "cancelled"}
    assert sum(rollout.status == "succeeded" for rollout in ended) == limit
