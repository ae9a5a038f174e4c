"""Optimizers and schedules are those of transformers and torch: equal gradients give equal weights, bit for bit."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import agentlightning as agl
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.learner.memory import needed_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import digest_of, load_policy, restore_policy, save_policy
from agentlightning.training.settings import GRPOSettings
from tests.training.learner.rows import make_advantages, make_rows

STEPS = 5
LORA = {"r": 4, "target_modules": "all-linear"}
SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "linear", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.3},
    {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-6}},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}, "warmup_steps": 1},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 2},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 1},
]
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
OF_TORCH: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    {"optim": "adamw_torch", "weight_decay": 0.1},
    {"optim": "sgd"},
    {"optim": "sgd", "optim_args": {"momentum": 0.9}, "weight_decay": 0.1},
    {"optim": "adafactor", "weight_decay": 0.1},
    {"optim": "adagrad"},
    {"optim": "rmsprop", "optim_args": {"centered": True}},
]
OF_BITSANDBYTES: list[Any] = [
    pytest.param({"optim": name, "weight_decay": 0.1}, marks=needs_bitsandbytes)
    for name in (
        *("adamw_8bit", "adamw_bnb_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"),
        *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    )
]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def name_of(value: Any) -> str:
    return "-".join(str(part) for part in value.values()) or "default"


def settings_of(model: Path, **settings: Any) -> GRPOSettings:
    return GRPOSettings(model=str(model), learning_rate=1e-2, max_steps=STEPS, **settings)


def learn(policy: Policy, settings: GRPOSettings, step: int) -> None:
    rate = settings.learning_rate_at(step)
    rows = make_rows(4, 80, seed=step)
    policy.update(rows, make_advantages(4), UpdateSettings(learning_rate=rate, max_grad_norm=1e9))


def gradients_of(policy: Policy) -> list[dict[str, torch.Tensor]]:
    """Return a list that receives the gradients of each later optimizer step by name."""
    seen: list[dict[str, torch.Tensor]] = []
    learner = policy._optimizer

    def keep(*_: object) -> None:
        gradients = {name: weight.grad for name, weight in learner.learned.items()}
        if all(each is not None and each.any() for each in gradients.values()):  # not those of a rehearsal
            seen.append({name: each.clone() for name, each in gradients.items() if each is not None})

    learner.optimizers[0].register_step_pre_hook(keep)
    return seen


def trainer_of(model: Any, folder: Path, **settings: Any) -> Trainer:
    arguments = {"learning_rate": 1e-2, "adam_beta2": 0.99, "report_to": [], "use_cpu": True, **settings}
    return Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **arguments))


def follow(model: nn.Module, optimizers: list[Any], schedule: Any, gradients: list[dict[str, torch.Tensor]]) -> None:
    for step in gradients:
        for name, weight in model.named_parameters():
            weight.grad = step[name]
        for optimizer in optimizers:
            optimizer.step()
        if schedule is not None:
            schedule.step()


def same_weights(policy: Policy, model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        assert torch.equal(policy.state().weights[name], weight), name


@pytest.mark.parametrize("own", [*OF_TORCH, *OF_BITSANDBYTES], ids=name_of)
def test_the_weights_are_those_of_transformers_optimizer(
    model_folder: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    run_beside_theirs(model_folder, tmp_path, own, SCHEDULES[1])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_the_weights_are_those_of_transformers_schedule(
    model_folder: Path, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    run_beside_theirs(model_folder, tmp_path, OF_TORCH[1], schedule)


def run_beside_theirs(model_folder: Path, folder: Path, own: dict[str, Any], schedule: dict[str, Any]) -> None:
    settings = settings_of(model_folder, **own, **schedule)
    policy = load_policy(settings, None)
    gradients = gradients_of(policy)
    for step in range(1, STEPS + 1):
        learn(policy, settings, step)
    assert len(gradients) == STEPS
    arguments = {**own, **schedule}
    if "optim_args" in own:
        arguments["optim_args"] = ",".join(f"{name}={value}" for name, value in own["optim_args"].items())
    theirs: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    trainer = trainer_of(theirs, folder, **arguments)
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(STEPS, optimizer)
    for step, each in enumerate(gradients, 1):
        assert settings.learning_rate_at(step) == scheduler.get_last_lr()[0]
        follow(theirs, [optimizer], scheduler, [each])
    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim import GlobalOptimManager

        GlobalOptimManager.get_instance().initialize()  # or what Trainer set would hold for every later optimizer
    same_weights(policy, theirs)


def test_muon_steps_the_hidden_matrices_and_adamw_all_other_weights(model_folder: Path) -> None:
    settings = settings_of(model_folder, optim="muon", weight_decay=0.1, optim_args={"momentum": 0.9})
    policy = load_policy(settings, None)
    gradients = gradients_of(policy)
    for step in range(1, STEPS + 1):
        learn(policy, settings, step)
    theirs: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = dict(theirs.named_parameters())
    hidden = [weight for name, weight in weights.items() if "_proj.weight" in name]
    outside = [weight for name, weight in weights.items() if "embed" in name or "lm_head" in name]
    flat = [weight for name, weight in weights.items() if "norm" in name or "bias" in name]
    assert len(hidden) + len(outside) + len(flat) == len(weights)
    assert min(len(hidden), len(outside), len(flat)) > 0
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": outside, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    follow(theirs, [muon, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), fused=True)], None, gradients)
    same_weights(policy, theirs)


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("own", [*OF_TORCH, {"optim": "muon", "weight_decay": 0.1}, *OF_BITSANDBYTES], ids=name_of)
def test_a_policy_restored_from_its_files_continues_bit_for_bit(
    model_folder: Path, tmp_path: Path, own: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    settings = settings_of(model_folder, lora=lora, bf16=lora is None, lr_scheduler_type="cosine", **own)
    policy = load_policy(settings, None)
    save_policy(policy, tmp_path / "0")
    for step in (1, 2):
        learn(policy, settings, step)
    save_policy(policy, tmp_path / "2")
    digest = digest_of(policy)
    begun = load_policy(settings, tmp_path / "0", digest=digest_of(load_policy(settings, None)))
    for step in (1, 2):
        learn(begun, settings, step)
    again = load_policy(settings, tmp_path / "2", weight_version=2, digest=digest)
    for step in (3, 4):
        for each in (policy, begun, again):
            learn(each, settings, step)
    expected = policy.state()
    for each in (begun, again):
        assert digest_of(each) == digest_of(policy) != digest
        assert all(torch.equal(weight, expected.weights[name]) for name, weight in each.state().weights.items())
        assert each.state().optimizer.keys() == expected.optimizer.keys()


def test_a_state_of_another_optimizer_is_refused_and_one_without_a_name_is_of_adamw(
    model_folder: Path, tmp_path: Path
) -> None:
    policy = load_policy(settings_of(model_folder), None)
    save_policy(policy, tmp_path)
    facts = json.loads((tmp_path / "optimizer.json").read_bytes())
    assert {facts.pop("optim"): facts.pop("optimizer")} == {"adamw_torch_fused": {}}
    (tmp_path / "optimizer.json").write_text(json.dumps(facts))  # as earlier releases wrote it
    restore_policy(policy, tmp_path, weight_version=0, digest=digest_of(policy))
    other = load_policy(settings_of(model_folder, optim="sgd"), None)
    with pytest.raises(ValueError, match="optim='adamw_torch_fused', but this policy has optim='sgd'"):
        restore_policy(other, tmp_path, weight_version=0, digest=digest_of(other))


def test_a_model_is_served_from_a_checkpoint_of_any_optimizer(model_folder: Path, tmp_path: Path) -> None:
    settings = settings_of(model_folder, optim="adafactor")
    policy = load_policy(settings, None)
    learn(policy, settings, 1)
    save_policy(policy, tmp_path)
    served = Policy.load(tmp_path)
    restore_policy(served, tmp_path, weight_version=1, digest=digest_of(policy), serves_only=True)
    assert digest_of(served) == digest_of(policy)


def test_each_policy_has_its_own_optimizer_and_schedule() -> None:
    own = {"a": {"optim": "sgd", "warmup_steps": 0.5, "lr_scheduler_type": "linear"}, "b": {"weight_decay": 0.1}}
    both = agl.GRPO(model="m", max_steps=4, learning_rate=0.4, policies=own).settings.by_policy()
    assert {name: (each.optim, each.weight_decay) for name, each in both.items()} == {
        "a": ("sgd", 0.0),
        "b": ("adamw_torch_fused", 0.1),
    }
    assert [both["a"].learning_rate_at(step) for step in (1, 2, 3, 4)] == pytest.approx([0, 0.2, 0.4, 0.2])
    assert both["b"].learning_rate_at(1) == 0.4


def test_a_step_that_would_not_fit_fails_before_a_weight_changes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(model_folder, optim="sgd", optim_args={"momentum": 0.9})
    policy, before = load_policy(settings, None), digest_of(load_policy(settings, None))
    [optimizer] = policy._optimizer.optimizers
    taken = optimizer.step

    def too_large() -> None:
        taken()
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(optimizer, "step", too_large)
    with pytest.raises(OutOfMemoryError, match="state of the optimizer"):
        learn(policy, settings, 1)
    assert digest_of(policy) == before
    assert policy.state().optimizer == {}
    monkeypatch.undo()
    learn(policy, settings, 1)
    other = load_policy(settings, None)
    learn(other, settings, 1)
    assert digest_of(policy) == digest_of(other) != before


@pytest.mark.parametrize(
    ("own", "bytes_per_weight"),
    [
        ({}, 8),
        ({"optim": "adamw_torch"}, 8),
        ({"optim": "sgd"}, 0),
        ({"optim": "sgd", "optim_args": {"momentum": 0.9}}, 4),
        ({"optim": "adafactor"}, 0),
        pytest.param({"optim": "adamw_8bit"}, 2, marks=needs_bitsandbytes),
        pytest.param({"optim": "lion_8bit"}, 1, marks=needs_bitsandbytes),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)
def test_the_estimate_of_the_memory_knows_the_state(
    model_folder: Path, own: dict[str, Any], bytes_per_weight: int
) -> None:
    settings = settings_of(model_folder, lora=LORA, **own)  # no embedding, which has 32 bits
    policy = load_policy(settings, None)
    count = sum(weight.numel() for weight in policy.state().weights.values())
    parts = [part.bytes for part in needed_memory(settings) if part.what.startswith("state of the optimizer")]
    assert sum(parts) == bytes_per_weight * count


def test_the_estimate_for_muon_is_the_state_that_there_is(model_folder: Path) -> None:
    settings = settings_of(model_folder, optim="muon")
    policy = load_policy(settings, None)
    learn(policy, settings, 1)
    state = policy.state().optimizer
    there = sum(value.nbytes for name, value in state.items() if not name.startswith("step/"))
    assert [part.bytes for part in needed_memory(settings) if "state of the optimizer" in part.what] == [there]


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a metric of the run"),
    ({"lr_scheduler_type": "greedy"}, "follows a metric of the run"),
    ({"warmup_steps": 3}, "it has no warmup; use 'constant_with_warmup'"),
    ({"lr_scheduler_type": "cosine", "warmup_steps": 1.5}, "a whole number of steps, or a share"),
    ({"warmup_steps": -1}, "warmup_steps must be a number of at least 0; got -1"),
    ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "it has no arguments"),
    ({"lr_scheduler_kwargs": "num_cycles=2"}, "lr_scheduler_kwargs must be a dict"),
    ({"optim": "adamw_torch_fussed"}, "Did you mean 'adamw_torch_fused'"),
    ({"optim": "lomo"}, "optim must be one of"),
    ({"optim": "sgd", "adam_beta1": 0.5}, "optim='sgd' and adam_beta1=0.5: this optimizer does not use it"),
    ({"optim": "lion_8bit", "adam_epsilon": 0.5}, "adam_epsilon=0.5: this optimizer does not use it"),
    ({"adam_beta2": 1.0}, "adam_beta2 must be a number of at least 0 and below 1"),
    ({"optim_args": "momentum=0.9"}, "optim_args must be a dict"),
    ({"optim_args": {"lr": 1}}, "optim_args must not contain 'lr'; use the setting learning_rate"),
]


@pytest.mark.parametrize(("settings", "text"), NONSENSE, ids=str)
@pytest.mark.parametrize("algorithm", [agl.GRPO, agl.PPO, agl.SFT])
def test_what_makes_no_sense_is_refused_with_the_reason(algorithm: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(agl.BadRequestError, match=text):
        algorithm(model="m", **settings)


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "warmup_stable_decay"},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 2}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": -1.0}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
    ],
    ids=name_of,
)
def test_arguments_that_the_schedule_refuses_end_the_run_before_the_model_is_loaded(schedule: dict[str, Any]) -> None:
    trainer = agl.Trainer(algorithm=agl.GRPO(model="no such folder", max_steps=3, **schedule))
    with pytest.raises(agl.BadRequestError, match="gives no learning rate for step"):
        trainer.fit(agent, ["task"])


@agl.rollout
def agent(task: str, llm: agl.LLM) -> float:
    return 0.0


@pytest.mark.parametrize("arguments", [{"momentun": 0.9}, {"nesterov": True}])
def test_arguments_that_the_optimizer_refuses_are_named(model_folder: Path, arguments: dict[str, Any]) -> None:
    settings = settings_of(model_folder, optim="sgd", optim_args=arguments)
    for use in (needed_memory, lambda own: load_policy(own, None)):
        with pytest.raises(agl.BadRequestError, match=rf"does not accept optim_args=.*{next(iter(arguments))}"):
            use(settings)


def test_a_step_that_runs_out_of_memory_is_not_repeated(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(model_folder, optim="sgd")
    policy = load_policy(settings, None)
    learn(policy, settings, 1)
    taken = policy.state().steps_taken

    def fails(self: object, closure: object = None) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.optim.SGD, "step", fails)
    with pytest.raises(OutOfMemoryError, match="some weights may have changed"):
        learn(policy, settings, 2)
    assert policy.state().steps_taken == taken + 1  # the weights of the version before may be gone


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_missing_package_is_named(model_folder: Path) -> None:
    with pytest.raises(agl.BadRequestError, match="optim='adamw_8bit' requires the package bitsandbytes"):
        needed_memory(settings_of(model_folder, optim="adamw_8bit"))


def test_the_rate_of_a_critic_follows_the_schedule(model_folder: Path) -> None:
    own: dict[str, Any] = {"learning_rate": 1e-3, "value_learning_rate": 5e-3, "max_steps": 5, "optim": "sgd"}
    settings = agl.PPO(model=str(model_folder), lr_scheduler_type="cosine", **own).settings
    policy, rate = load_policy(settings, None), settings.learning_rate_at(3)
    policy.update(make_rows(4, 80), make_advantages(4), UpdateSettings(critic=settings.critic, learning_rate=rate))
    rates = {group["initial"]: group["lr"] for each in policy._optimizer.optimizers for group in each.param_groups}
    share = (1 + math.cos(math.pi * 2 / 5)) / 2
    assert rates == pytest.approx({1e-3: 1e-3 * share, 5e-3: 5e-3 * share})
