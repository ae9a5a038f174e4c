"""The memory that a run needs is summed up before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import OutOfMemoryError
from agentlightning.training.learner.memory import GIB, check_memory, free_memory, needed_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import GRPOSettings, make_settings


def settings(model: Path, **others: Any) -> GRPOSettings:
    return GRPOSettings(model=str(model), **{"max_completion_length": 100, **others})


def part(settings: GRPOSettings, start: str) -> int:
    return sum(one.bytes for one in needed_memory(settings) if one.what.startswith(start))


def test_the_sum_counts_the_weights_that_there_are(model_folder: Path, policy: Policy) -> None:
    weights = sum(weight.numel() for weight in policy.model.parameters())
    plain, half = settings(model_folder), settings(model_folder, bf16=True)
    sizes = {"weights": 4, "gradients": 4, "state": 8}
    assert {name: part(plain, name) for name in sizes} == {name: size * weights for name, size in sizes.items()}
    sizes = {"weights": 2, "float32 copies": 4, "state": 8}
    assert {name: part(half, name) for name in sizes} == {name: size * weights for name, size in sizes.items()}
    assert (part(plain, "reference"), part(settings(model_folder, beta=0.1), "reference")) == (0, 4 * weights)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    adapted = settings(model_folder, lora=lora)
    learned = sum(w.numel() for w in Policy.load(model_folder, lora=lora).state().weights.values())
    assert part(adapted, "weights") == 4 * weights
    sizes = {"adapters": 4, "gradients": 4, "state": 8}
    assert {name: part(adapted, name) for name in sizes} == {name: size * learned for name, size in sizes.items()}
    assert part(settings(model_folder, lora=lora, beta=0.1), "reference") == 0
    assert part(settings(model_folder, lora=lora, beta=0.1, sync_ref_model=True), "reference") == 4 * learned


def test_what_the_settings_save_is_in_the_sum(model_folder: Path) -> None:
    plain = settings(model_folder, max_model_length=128)
    small = settings(model_folder, max_model_length=128, max_tokens_per_forward=1024)
    assert part(plain, "activations") == 4 * part(small, "activations")
    trained = ("logits of 3,200 trained tokens", "logits of 800 trained tokens")  # 100 of the 128 of a row
    assert part(plain, trained[0]) == 4 * part(small, trained[1]) > 0
    checkpointed = settings(model_folder, max_model_length=128, gradient_checkpointing=True)
    assert part(checkpointed, "activations") < 0.7 * part(plain, "activations")
    offloaded = settings(model_folder, max_model_length=128, device="cuda", activation_offloading=True)
    assert part(offloaded, "activations") < part(checkpointed, "activations")
    half = settings(model_folder, max_model_length=64)
    assert part(plain, "keys") == 2 * part(half, "keys")
    few = settings(model_folder, max_model_length=128, batch_size=1, num_generations=2)  # calls: at most its rollouts
    assert part(plain, "keys and values of 64 calls") == 32 * part(few, "keys and values of 2 calls")
    assert part(plain, "value head") == 0
    assert part(make_settings(PPOSettings, model_folder, {"max_completion_length": 100}), "value head") > 4 * 4 * 32


def test_what_engine_and_update_hold_in_turn_is_not_added(model_folder: Path) -> None:
    def parts(**others: Any) -> dict[str, int]:
        return {one.what: one.bytes for one in needed_memory(settings(model_folder, max_model_length=8, **others))}

    small = parts(max_tokens_per_forward=8, engine_batch=8, batch_size=4, num_generations=2)
    assert "gradients" in small
    assert "logits of 8 calls" not in small
    many = parts(max_tokens_per_forward=8, engine_batch=8192, batch_size=4096, num_generations=2)
    assert "logits of 8192 calls" in many
    assert not {"gradients", "logits of 8 trained tokens"} & many.keys()
    constants = ("weights, float32", "state of the optimizer, adamw_torch_fused")
    assert [many[name] for name in constants] == [small[name] for name in constants]


def test_a_run_that_cannot_fit_is_refused_with_the_sum_and_what_to_change(model_folder: Path) -> None:
    check_memory(settings(model_folder))
    tokens = 2**40
    with pytest.raises(OutOfMemoryError) as refused:
        check_memory(settings(model_folder, max_tokens_per_forward=tokens))
    text = str(refused.value)
    assert f"{free_memory('cpu') / GIB:.0f}"[:1] in text.splitlines()[0]
    assert f"activations of {tokens:,} tokens in one forward" in text
    advice = "gradient_checkpointing=True, or a smaller max_tokens_per_forward"
    assert f"To reduce it, most effective first: {advice}" in text
