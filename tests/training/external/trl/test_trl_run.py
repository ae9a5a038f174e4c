"""A whole run of TRL: real store, gateway, runners and engine, and TRL's own `GRPOTrainer`. By `make test-trl`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore
from tests.algorithm.parts import (
    ask,
    calls_of,
    metrics_of,
    rollouts_of,
    say,
    wants_digits,
)

pytest.importorskip("trl", reason="trl is in an environment of its own: make test-trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TASKS = ["one", "two", "three", "four"]
SMALL: dict[str, Any] = {
    "max_steps": 2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "max_completion_length": 4,
    "progress": "none",
}


def fit(agent: Any, model: Path, folder: Path, *, store: LightningStore | None = None, **settings: Any) -> Any:
    trainer_settings = {"run_id": settings.pop("run_id")} if "run_id" in settings else {}
    val_dataset = settings.pop("val_dataset", None)
    trainer = agl.Trainer(
        algorithm=agl.TRL(model=model, output_dir=folder, **{**SMALL, **settings}),
        strategy="shm",
        store=store or agl.InMemoryLightningStore(),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        **trainer_settings,
    )
    trainer.fit(agent, train_dataset=TASKS, val_dataset=val_dataset)
    return trainer.result


def test_with_full_determinism_a_run_is_the_same_each_time(untrained_model: Path, tmp_path: Path) -> None:
    import torch

    def weights(name: str) -> bytes:
        result = fit(wants_digits, untrained_model, tmp_path / name, full_determinism=True)
        return (result.model_path / "model.safetensors").read_bytes()

    try:
        assert weights("one") == weights("another")
    finally:
        torch.use_deterministic_algorithms(False)  # which transformers has switched on for the process


def test_the_reward_rises_and_the_model_is_one_of_transformers(untrained_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = {"max_steps": 24, "num_iterations": 2, "num_generations": 8, "per_device_train_batch_size": 32}
    result = fit(wants_digits, untrained_model, tmp_path, learning_rate=5e-3, beta=0.0, **settings)
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    assert len(rewards) == result.steps == 12
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    assert {figures.update["steps"] for figures in result.metrics} == {2}
    AutoModelForCausalLM.from_pretrained(result.model_path)


async def test_every_call_is_trained_or_has_a_reason_and_is_stamped_with_its_weights(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    settings = {"val_dataset": ["held out"], "eval_steps": 1, "max_steps": 3, "run_id": "counted"}
    result = await asyncio.to_thread(fit, wants_digits, untrained_model, tmp_path, store=store, **settings)
    rollouts = await rollouts_of(store)
    steps = {rollout.rollout_id: (rollout.metadata or {})["step"] for rollout in rollouts}
    calls = await calls_of(store, rollouts)
    assert {(steps[call.ref.rollout_id], call.weight_version) for call in calls} == {(1, 0), (2, 1), (3, 2)}
    endings = [
        (record.name, call["call_id"], call["ending"])
        for record in await store.query_run_records("counted", kind_in=["ledger"])
        for call in record.data["calls"]
    ]
    assert {(name, call) for name, call, _ in endings} == {(c.ref.rollout_id, c.call_id) for c in calls}
    assert len(endings) == len(calls) == sum(figures.calls_captured for figures in result.metrics)
    assert [(e.step, e.sampling) for e in result.evaluations] == [
        *((0, "sampled"), (0, "greedy"), (1, "sampled"), (2, "sampled"), (3, "sampled"), (3, "greedy"))
    ]


async def test_a_rollout_that_crashes_is_masked_and_never_counts_as_zero(untrained_model: Path, tmp_path: Path) -> None:
    numbers = itertools.count()

    @agl.rollout
    def crashes_at_times(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        number = next(numbers)
        if number % 4 == 3:
            raise RuntimeError("out of ideas")
        return float(number % 4)

    store = agl.InMemoryLightningStore()
    settings = {"max_steps": 1, "run_id": "crashes", "scale_rewards": "none", "per_device_train_batch_size": 16}
    result = await asyncio.to_thread(fit, crashes_at_times, untrained_model, tmp_path, store=store, **settings)
    assert result.metrics[0].rollouts_excluded == {"infrastructure_fault": 4}
    assert result.metrics[0].calls_excluded["infrastructure_fault"] == 4
    entries = [record.data for record in await store.query_run_records("crashes", kind_in=["ledger"])]
    for group in {entry["group"] for entry in entries}:
        own = [entry for entry in entries if entry["group"] == group]
        scored = [entry for entry in own if entry["verdict"] is None]
        mean = statistics.mean(entry["reward"] for entry in scored)
        trained = [entry for entry in scored if entry["advantage"] is not None]
        for entry in trained:  # TRL's own advantage: the crash is in no mean
            assert entry["advantage"] == pytest.approx(entry["reward"] - mean, abs=1e-5)
        assert all(entry["advantage"] is None for entry in own if entry["verdict"] is not None)


def test_a_step_without_any_reward_leaves_the_weights_and_a_run_of_them_says_so(
    untrained_model: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    @agl.rollout
    def always_crashes(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        raise RuntimeError("never again")

    with pytest.raises(agl.errors.NoScoredRolloutError, match="never again"):
        fit(always_crashes, untrained_model, tmp_path)
    before = AutoModelForCausalLM.from_pretrained(untrained_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_peft_config_trains_adapters_and_the_model_is_written_merged(untrained_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    result = fit(wants_digits, untrained_model, tmp_path, peft_config=adapter, max_steps=2)
    assert (tmp_path / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert (result.model_path / "model.safetensors").is_file()
    assert json.loads((tmp_path / "config.json").read_text())["trl"]["peft_config"]["r"] == 4


def test_a_whole_config_is_taken_as_it_is(untrained_model: Path, tmp_path: Path) -> None:
    from trl import GRPOConfig

    config = GRPOConfig(
        output_dir=str(tmp_path / "unused"),
        use_cpu=True,
        bf16=False,
        max_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        loss_type="dr_grpo",
    )
    algorithm = agl.TRL(model=untrained_model, config=config, output_dir=tmp_path / "run", progress="none")
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", store=agl.InMemoryLightningStore())
    trainer.fit(wants_digits, train_dataset=TASKS)
    assert trainer.result.steps == 4
    assert [figures.rollouts_done for figures in trainer.result.metrics] == [8] * 4
    written = json.loads((tmp_path / "run" / "config.json").read_text())["trl"]["config"]
    assert written["loss_type"] == "dr_grpo"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_vllm": True}, r"use_vllm=True does not go with agl\.TRL"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"reward_weights": [1.0]}, "reward_weights"),
        ({"eval_strategy": "steps"}, "pass val_dataset to fit"),
        ({"resume_from_checkpoint": "there"}, "run_id"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 4}, "must divide steps_per_generation=4"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed|stage 3"),
    ],
)
def test_settings_that_fight_with_a_run_are_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((agl.BadRequestError, ImportError), match=told):
        agl.TRL(model="m", **{**SMALL, **settings})


def test_iterations_are_steps_with_rollouts_of_their_own() -> None:
    given = agl.TRL(model="m", **{**SMALL, "num_iterations": 2})
    assert given.with_iterations(3).settings.max_steps(len(TASKS)) == 3
    assert given.settings.max_steps(len(TASKS)) == 1


def test_an_unknown_setting_names_the_nearest_one_and_one_of_grpo_its_name_here() -> None:
    with pytest.raises(TypeError, match="Did you mean 'num_generations'"):
        agl.TRL(model="m", num_generation=4)
    with pytest.raises(TypeError, match="peft_config"):
        agl.TRL(model="m", lora={"r": 4})


_PROGRAM = """
import sys, time
from pathlib import Path
import agentlightning as agl
from tests.algorithm.parts import wants_digits
from tests.training.external.trl.test_trl_run import SMALL, TASKS

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    settings = {**SMALL, "max_steps": int(sys.argv[3]), "save_steps": 1, "lr_scheduler_type": "linear"}
    algorithm = agl.TRL(model=sys.argv[1], output_dir=folder / "run", **settings)
    store = agl.SQLiteLightningStore(folder / "store.db")
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", store=store, run_id="interrupted")
    trainer.fit(wants_digits, train_dataset=TASKS)
"""


@pytest.mark.timeout(600)  # three processes, each of which loads trl
def test_ctrl_c_saves_what_was_learned_and_the_run_goes_on_from_trls_checkpoint(
    untrained_model: Path, tmp_path: Path
) -> None:
    program, metrics = tmp_path / "program.py", tmp_path / "run" / "metrics.jsonl"
    program.write_text(_PROGRAM)

    def lines_when_interrupted_after(count: int) -> list[dict[str, Any]]:
        """Train until so many steps are written, press Ctrl+C, and return the metrics."""
        with (tmp_path / "errors").open("w+") as errors:
            command = [sys.executable, str(program), str(untrained_model), str(tmp_path), "500"]
            environment = {**os.environ, "PYTHONPATH": os.getcwd()}
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
            while running.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") >= count):
                time.sleep(0.05)  # another process writes the file
            assert running.poll() is None, (tmp_path / "errors").read_text()[-2000:]
            running.send_signal(signal.SIGINT)
            running.wait(180)
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    first = lines_when_interrupted_after(2)
    last = first[-1]["step"]
    checkpoint = tmp_path / "run" / "checkpoints" / f"checkpoint-{last}"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == last
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()

    lines = lines_when_interrupted_after(last + 2)
    assert lines[:last] == first
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    rates = [line["update"]["learning_rate"] for line in lines]
    assert rates == sorted(set(rates), reverse=True)  # TRL's schedule went on where it was


def test_another_setting_than_the_run_began_with_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    folder = tmp_path / "run"
    fit(wants_digits, untrained_model, folder, store=store, run_id="same", max_steps=1)
    other = agl.SQLiteLightningStore(tmp_path / "store.db")
    with pytest.raises(agl.BadRequestError, match="begun with other settings"):
        fit(wants_digits, untrained_model, folder, store=other, run_id="same", max_steps=1, epsilon=0.1)


async def test_metrics_have_what_trl_says_of_its_update_and_how_far_it_moved_the_policy(
    untrained_model: Path, tmp_path: Path
) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return float((rollout.metadata or {})["sample"] % 2)

    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.1, "temperature": 0.7, "run_id": "moved"}
    result = await asyncio.to_thread(fit, agent, untrained_model, tmp_path, store=store, **settings)
    (line,) = metrics_of(result)
    assert {"loss", "grad_norm", "learning_rate", "entropy", "clip_fraction"} <= set(line["update"])
    calls = await calls_of(store, await rollouts_of(store))
    before, after = (_logprobs(place, calls, 0.7) for place in (untrained_model, result.model_path))
    moved = [math.exp(b - a) - 1 - (b - a) for a, b in zip(before, after, strict=True)]
    assert line["update"]["update_kl"] == pytest.approx(statistics.mean(moved), rel=1e-3)
    assert line["update"]["update_kl"] > 0.5
    assert line["update"]["first_ratio_error"] < 1e-3, "the engine is over the same weights"
    alarms = await store.query_run_records("moved", kind_in=["alarm"])
    assert "policy_shift" in {record.name for record in alarms}


def _logprobs(place: Path, calls: Any, temperature: float) -> list[float]:
    """Return the log-probability of each token of the replies under the model in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place).eval()
    found: list[float] = []
    for call in calls:
        prompt, reply = call.prompt_token_ids, call.completion_token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        found += (logits / temperature).log_softmax(dim=-1).gather(1, torch.tensor(reply)[:, None])[:, 0].tolist()
    return found
