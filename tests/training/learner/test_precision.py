"""Settings that save memory change the update by rounding alone: bfloat16, four bits, checkpointing, adapters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.engine.served import dtype_of
from agentlightning.errors import BadRequestError
from agentlightning.training.learner.memory import needed_memory
from agentlightning.training.learner.parameters import Offloading
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.policy_files import digest_of, load_policy, restore_policy, save_policy
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.settings import GRPOSettings, TrainingSettings
from tests.algorithm.parts import needs_bfloat16
from tests.training.learner.rows import make_advantages, make_rows

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
]


def half_policy(folder: Path, device: str, **settings: Any) -> Policy:
    """A policy that computes in bfloat16, also on a processor without instructions for it, where `bf16` is refused."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    return Policy.load(folder, model=model, learning_rate=1e-5, device=device, **settings)


def learned(policy: Policy) -> torch.Tensor:
    return torch.cat([weight.flatten().cpu() for weight in policy.state().weights.values()])


def learn(policy: Policy, times: int = 1) -> list[Any]:
    rows, advantages = make_rows(8, 80), make_advantages(8)
    return [policy.update(rows, advantages, UpdateSettings(temperature=0.9)) for _ in range(times)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lora", [None, LORA])
def test_bfloat16_learns_steps_that_it_could_not_hold(model_folder: Path, device: str, lora: Any) -> None:
    half = half_policy(model_folder, device, lora=lora)
    whole = Policy.load(model_folder, learning_rate=1e-5, lora=lora, device=device)
    before = learned(half)
    of_half, of_whole = learn(half, 3), learn(whole, 3)
    assert half.model.dtype == torch.bfloat16
    assert before.dtype == learned(half).dtype == torch.float32
    moved = (learned(half) - before).abs()
    assert float((moved > 0).float().mean()) > 0.3  # in bfloat16 a step of 1e-5 on most of these weights would be none
    assert float(moved.max()) < 1e-4
    assert of_half[0].figures["grad_norm"] == pytest.approx(of_whole[0].figures["grad_norm"], rel=0.1)
    for one, other in zip(of_half[0].rows, of_whole[0].rows, strict=True):
        assert one["trainer_logprobs"].dtype == "float32"
        assert one["trainer_logprobs"] == pytest.approx(other["trainer_logprobs"], abs=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_of_a_policy_in_bfloat16_keeps_its_float32_weights(
    model_folder: Path, tmp_path: Path, device: str
) -> None:
    policy = half_policy(model_folder, device)
    learn(policy)
    save_policy(policy, tmp_path)
    digest = digest_of(policy)
    learn(policy)
    again = half_policy(tmp_path, device)
    restore_policy(again, tmp_path, weight_version=1, digest=digest)
    learn(again)
    assert torch.equal(learned(again), learned(policy))


def test_bfloat16_is_refused_where_it_would_only_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(BadRequestError, match=r"bf16=True requires bfloat16 instructions.*AVX-512"):
        dtype_of("cpu", bf16=True)
    assert dtype_of("cpu", bf16=False) == torch.float32


@pytest.mark.parametrize("lora", [None, LORA])
def test_checkpointed_activations_give_the_same_update_and_leave_generation_alone(
    model_folder: Path, lora: Any
) -> None:
    call_counts: dict[bool, int] = {}
    replies: dict[bool, list[int]] = {}
    weights: dict[bool, torch.Tensor] = {}
    for checkpointing in (False, True):
        policy = Policy.load(model_folder, learning_rate=1e-3, lora=lora, gradient_checkpointing=checkpointing)
        calls: list[int] = []
        model: Any = policy.model if lora is None else policy.model.get_base_model()
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        learn(policy)
        calls.clear()
        learn(policy)
        call_counts[checkpointing] = len(calls)
        completion = Completion([5, 6, 7], 5, 0.0, 1.0, 0)
        generate(Decoder(policy.model, ()), [completion])
        replies[checkpointing] = completion.token_ids
        weights[checkpointing] = learned(policy)
    # once more in the backward pass, and once after the step without a gradient, to see how far it went
    assert call_counts == {False: 2, True: 3}
    assert replies[True] == replies[False]
    assert torch.allclose(weights[True], weights[False], atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LORA])
def test_offloaded_activations_give_the_same_update_bit_for_bit(
    model_folder: Path, lora: Any, checkpointing: bool
) -> None:
    weights: list[torch.Tensor] = []
    for offloading in (False, True):
        options = {"gradient_checkpointing": checkpointing, "activation_offloading": offloading}
        policy = Policy.load(model_folder, learning_rate=1e-3, lora=lora, **options)
        learn(policy)
        weights.append(learned(policy))
    assert torch.equal(*weights)


def test_all_that_a_pass_keeps_is_offloaded_except_the_weights(model_folder: Path) -> None:
    policy = Policy.load(model_folder)
    tokens = torch.arange(5, 69)[None]
    offloading = Offloading(policy.model)
    pack, kept, moved = offloading.pack_hook, list[torch.Tensor](), list[torch.Tensor]()

    def count(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        (kept if isinstance(packed, torch.Tensor) else moved).append(tensor)
        return packed

    offloading.pack_hook = count
    with offloading:
        loss = policy.model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum()
    own = {weight.untyped_storage().data_ptr() for weight in policy.model.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} <= own
    assert not {tensor.untyped_storage().data_ptr() for tensor in moved} & own
    hidden = 4 * tokens.numel() * policy.model.config.hidden_size * policy.model.config.num_hidden_layers
    assert sum(tensor.nbytes for tensor in moved) > 8 * hidden  # several tensors of this size per layer
    loss.backward()


@needs_bfloat16
def test_bf16_makes_a_policy_that_computes_in_bfloat16(model_folder: Path) -> None:
    policy = Policy.load(model_folder, learning_rate=1e-5, bf16=True)
    asked_for, made = learn(policy), learn(half_policy(model_folder, "cpu"))
    assert policy.model.dtype == torch.bfloat16
    assert asked_for[0].figures == made[0].figures


FOUR_BITS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "load_in_4bit": True,
    "lora": {"r": 4, "target_modules": "all-linear"},
}
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@needs_bfloat16
def test_a_reference_in_bfloat16_moves_by_the_float32_weights_of_the_policy(model_folder: Path) -> None:
    policy = half_policy(model_folder, "cpu", keeps_reference=True, moves_reference=True)
    before = {name: weight.clone() for name, weight in policy.state().reference.items()}
    loss = LossSettings(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.1, ref_model_sync_steps=1)
    policy.update(make_rows(8, 80), make_advantages(8), UpdateSettings(loss=loss, temperature=0.9))
    state = policy.state()
    for name, weight in state.reference.items():
        assert weight.dtype == torch.float32
        assert torch.allclose(weight, before[name] + 0.1 * (state.weights[name] - before[name]), rtol=0, atol=1e-8)
    assert any(not torch.equal(before[name], weight) for name, weight in state.reference.items())


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_adapters_learn_on_weights_of_four_bits_and_resume_bit_for_bit(
    model_folder: Path, tmp_path: Path, kind: Any
) -> None:
    settings = GRPOSettings(model=str(model_folder), bnb_4bit_quant_type=kind, **FOUR_BITS)
    policy, other = load_policy(settings, None), Policy.load(model_folder, lora=FOUR_BITS["lora"])
    linear = policy.model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    whole = other.model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
    assert (linear.dtype, linear.numel()) == (torch.uint8, whole.numel() // 2)
    before = digest_of(policy)
    learn(policy, 2)
    save_policy(policy, tmp_path)
    again = load_policy(settings, tmp_path, weight_version=2, digest=digest_of(policy))
    assert digest_of(again) == digest_of(policy) != before
    assert learn(policy)[0].figures == learn(again)[0].figures
    assert digest_of(again) == digest_of(policy)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", [GRPOSettings, PPOSettings])
def test_the_written_model_has_the_adapters_and_the_weights_before_they_had_four_bits(
    model_folder: Path, tmp_path: Path, kind: type[TrainingSettings]
) -> None:
    policy = load_policy(kind(model=str(model_folder), **FOUR_BITS), None)
    learn(policy, 2)
    policy.save(tmp_path)
    whole, written = (AutoModelForCausalLM.from_pretrained(place) for place in (model_folder, tmp_path))
    name = "model.layers.0.mlp.up_proj"
    state = policy.state().weights
    low, high = (state[f"base_model.model.{name}.lora_{part}.default.weight"] for part in "AB")
    expected = whole.get_parameter(f"{name}.weight") + 2 * high @ low  # peft's lora_alpha is 8, twice r
    assert torch.allclose(written.get_parameter(f"{name}.weight"), expected, atol=1e-6)
    assert float((high @ low).abs().max()) > 1e-5


@needs_bitsandbytes
def test_the_estimate_of_weights_in_four_bits_is_what_they_take(model_folder: Path) -> None:
    settings = GRPOSettings(model=str(model_folder), **FOUR_BITS)
    policy = load_policy(settings, None)
    frozen = [weight for weight in policy.model.parameters() if not weight.requires_grad]
    states = [weight.quant_state for weight in frozen if hasattr(weight, "quant_state")]
    taken = sum(weight.nbytes for weight in frozen) + sum(state.absmax.nbytes for state in states)
    assert [part.bytes for part in needed_memory(settings) if part.what.startswith("weights,")] == [taken]


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_four_bits_without_their_package_are_refused_with_its_name(model_folder: Path) -> None:
    for attempt in (needed_memory, lambda settings: load_policy(settings, None)):
        with pytest.raises(BadRequestError, match="load_in_4bit=True requires the package bitsandbytes"):
            attempt(GRPOSettings(model=str(model_folder), **FOUR_BITS))
