"""Features of agl.TRL alone: TRL's settings, adapters and figures. By `make test-trl`."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import agentlightning as agl
from agentlightning.training.external.trl.settings import _REFUSED
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import load_policy
from tests.algorithm.parts import ask, say, wants_digits
from tests.packaging import learning_settings
from tests.packaging.test_learning_settings import SHORTER, run_program
from tests.training.conformance.cases import TASKS, TRL, fit, read
from tests.training.learner.rows import make_advantages, make_rows

pytest.importorskip("trl", reason="trl is in an environment of its own: make test-trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_the_page_of_settings_lists_those_of_the_installed_version() -> None:
    ours = learning_settings.names_of("trl")
    assert ours == learning_settings.installed("trl"), "run: python -m tests.packaging.learning_settings trl"


def test_settings_that_the_page_leaves_to_agl_trl_are_not_refused_by_it() -> None:
    left = {name for line in learning_settings.lines_of("trl") for name in line.names if "`agl.TRL`" in line.note}
    assert "torch_compile" in left
    assert left & set(_REFUSED) == set()


def test_the_program_of_trl_on_the_page_of_settings_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SHORTER, 'output_dir="runs/words"', 'output_dir="runs", use_cpu=True, bf16=False')
    assert run_program(0).state.global_step == 1


def test_with_full_determinism_a_run_is_the_same_each_time(untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 2, "deterministic": True}
    folders = [tmp_path / "one", tmp_path / "another"]
    for folder in folders:
        folder.mkdir()
    one, another = (fit(TRL, wants_digits, untrained_model, folder, **settings).model_path for folder in folders)
    assert (one / "model.safetensors").read_bytes() == (another / "model.safetensors").read_bytes()


def test_a_peft_config_trains_adapters_and_the_model_is_written_merged(untrained_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    result = fit(TRL, wants_digits, untrained_model, tmp_path, peft_config=adapter, max_steps=2)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert (result.model_path / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trl"]["peft_config"]["r"] == 4


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
    ("settings", "message"),
    [
        ({"use_vllm": True}, r"use_vllm=True is not supported by agl\.TRL"),
        ({"generation_kwargs": {"stop": ["a"]}}, "set top_p, top_k, min_p and repetition_penalty"),
        ({"reward_weights": [1.0]}, "reward_weights"),
        ({"eval_strategy": "steps"}, "pass val_dataset to fit"),
        ({"resume_from_checkpoint": "there"}, "run_id"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 4}, "must divide steps_per_generation=4"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed|stage 3"),
    ],
)
def test_settings_that_fight_with_a_run_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((agl.BadRequestError, ImportError), match=message):
        agl.TRL(model="m", **{"num_generations": 4, "per_device_train_batch_size": 8, **settings})


def test_an_unknown_setting_names_the_nearest_one_and_one_of_grpo_its_name_here() -> None:
    with pytest.raises(TypeError, match="Did you mean 'num_generations'"):
        agl.TRL(model="m", num_generation=4)
    with pytest.raises(TypeError, match="peft_config"):
        agl.TRL(model="m", lora={"r": 4})


def test_iterations_are_steps_with_rollouts_of_their_own() -> None:
    algorithm = agl.TRL(model="m", num_generations=4, per_device_train_batch_size=8, max_steps=2, num_iterations=2)
    assert algorithm.with_iterations(3).settings.max_steps(len(TASKS)) == 3
    assert algorithm.settings.max_steps(len(TASKS)) == 1


def test_another_setting_than_the_run_began_with_is_refused(untrained_model: Path, tmp_path: Path) -> None:
    fit(TRL, wants_digits, untrained_model, tmp_path, max_steps=1)
    with pytest.raises(agl.BadRequestError, match="its settings have changed"):
        fit(TRL, wants_digits, untrained_model, tmp_path, max_steps=1, epsilon=0.1)


def test_metrics_have_what_trl_says_of_its_update_and_how_far_it_moved_the_policy(
    untrained_model: Path, tmp_path: Path
) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        return float((rollout.metadata or {})["sample"] % 2)

    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.1, "temperature": 0.7}
    result = fit(TRL, agent, untrained_model, tmp_path, **settings)
    books = read(tmp_path)
    update = books.lines[0]["update"]
    assert {"loss", "grad_norm", "learning_rate", "entropy", "clip_fraction"} <= set(update)
    before, after = (_logprobs(place, books.calls, 0.7) for place in (untrained_model, result.model_path))
    moved = [math.exp(b - a) - 1 - (b - a) for a, b in zip(before, after, strict=True)]
    assert update["update_kl"] == pytest.approx(statistics.mean(moved), rel=1e-3)
    assert update["update_kl"] > 0.5
    assert "policy_shift" in {record.name for record in books.of("alarm")}


def _logprobs(place: Path, calls: Any, temperature: float) -> list[float]:
    """Return the log-probability of each token of the replies under the model in a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place).eval()
    logprobs: list[float] = []
    for call in calls:
        prompt, reply = call.prompt_token_ids, call.completion_token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        logprobs += (logits / temperature).log_softmax(dim=-1).gather(1, torch.tensor(reply)[:, None])[:, 0].tolist()
    return logprobs


@pytest.mark.parametrize("steps", [1, 2])
def test_a_moving_reference_of_our_learner_is_that_of_trls_callback(untrained_model: Path, steps: int) -> None:
    from accelerate import Accelerator
    from trl import GRPOConfig
    from trl.trainer.callbacks import SyncRefModelCallback

    config = GRPOConfig(sync_ref_model=True, ref_model_sync_steps=steps, use_cpu=True, bf16=False)
    Accelerator(cpu=True)  # TRL asks it about DeepSpeed; after the config, which forgets it
    settings = agl.GRPO(
        untrained_model, beta=0.1, learning_rate=1e-2, sync_ref_model=True, ref_model_sync_steps=steps
    ).settings
    policy = load_policy(settings, None)
    theirs = AutoModelForCausalLM.from_pretrained(untrained_model)
    callback = SyncRefModelCallback(ref_model=theirs, accelerator=None)
    taken: list[None] = []

    def follow(*_: object) -> None:
        taken.append(None)
        callback.on_step_end(config, SimpleNamespace(global_step=len(taken)), None, model=policy.model)

    policy._optimizer.optimizers[0].register_step_post_hook(follow)
    for seed in (0, 1):
        rows = make_rows(8, policy.model.config.vocab_size, seed=seed)
        policy.update(rows, make_advantages(8), UpdateSettings(loss=settings.loss_settings, minibatch_rollouts=1))
    assert len(taken) == 8
    for name, weight in theirs.named_parameters():
        assert torch.allclose(policy.state().reference[name], weight, rtol=0, atol=1e-6)
        assert steps == 1 or not torch.allclose(policy.state().weights[name], weight, rtol=0, atol=1e-6)
