"""Rows in one sequence do not see each other: loss and gradient are those of rows one by one, in models of families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, SmolLM3Config

from agentlightning.training.batch import make_batch
from agentlightning.training.learner.forward import can_pack, score
from agentlightning.training.learner.policy import Policy
from tests.engine.byte_policy import byte_tokenizer
from tests.training.learner.rows import make_advantages, make_rows

SHAPE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "smollm2": LlamaConfig(
        **SHAPE, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "smollm3": SmolLM3Config(**SHAPE),
}


def make_model(family: str, attention: str = "sdpa") -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), attn_implementation=attention).eval()


def gradient(model: PreTrainedModel) -> torch.Tensor:
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_probabilities_and_the_gradient_of_single_rows(family: str) -> None:
    model, rows = make_model(family), make_rows(7, 120)
    assert can_pack(model)
    batch = make_batch(rows, [1.0] * 7)
    scale = torch.linspace(-1, 1, 7)[:, None]  # so that no row's gradient can stand for another's
    packed, entropy, _ = score(model, batch, 0.7, packed=True)
    (packed * scale).sum().backward()
    of_packed = gradient(model)
    for number, row in enumerate(rows):
        single = make_batch([row], [1.0])
        alone, entropy_alone, _ = score(model, single, 0.7, packed=False)
        (alone * scale[number]).sum().backward()
        length = len(row.token_ids)
        assert torch.allclose(packed[number, :length], alone[0], rtol=1e-6, atol=1e-6)
        assert torch.allclose(entropy[number, :length], entropy_alone[0], rtol=1e-6, atol=1e-6)
    of_singles = gradient(model)
    assert float((of_packed - of_singles).norm() / of_singles.norm()) < 1e-6


def test_logits_are_made_for_trained_tokens_alone(policy: Policy) -> None:
    shapes: list[tuple[int, ...]] = []
    policy.model.get_output_embeddings().register_forward_hook(lambda *args: shapes.append(tuple(args[2].shape)))
    rows = make_rows(4, 80)
    trained = sum(sum(row.mask) for row in rows)
    for packed in (False, True):
        score(policy.model, make_batch(rows, [1.0] * 4), 1.0, packed=packed)
    assert shapes == [(1, trained, policy.model.config.vocab_size)] * 2


def test_a_model_that_cannot_keep_rows_apart_is_padded_and_this_is_said_once() -> None:
    policy = Policy(make_model("llama", "eager"), byte_tokenizer(), learning_rate=1e-3)
    other = Policy(make_model("llama"), byte_tokenizer(), learning_rate=1e-3)
    rows, advantages = make_rows(6, 120), make_advantages(6)
    [note] = policy.update(rows, advantages).notes
    assert "attention of llama cannot separate packed rows" in note
    assert policy.update(rows, advantages).notes == []
    for _ in range(2):
        assert other.update(rows, advantages).notes == []
    for one, same in zip(policy.state().weights.values(), other.state().weights.values(), strict=True):
        assert torch.allclose(one, same, atol=1e-4)


def test_one_that_lets_rows_see_each_other_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    whole = model.forward
    monkeypatch.setattr(model, "forward", lambda row_lengths=None, **inputs: whole(**inputs))
    assert not can_pack(model)
    assert model.config._attn_implementation == "sdpa"


def test_adapters_learn_from_packed_rows_too(model_folder: Any) -> None:
    rows, advantages = make_rows(6, 80), make_advantages(6)
    weights = []
    for padding_free in (True, False):
        lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
        policy = Policy.load(model_folder, learning_rate=1e-2, lora=lora, padding_free=padding_free)
        for _ in range(2):
            assert policy.update(rows, advantages).notes == []
        weights.append(torch.cat([weight.flatten() for weight in policy.state().weights.values()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-4)
    assert float(weights[0].abs().max()) > 0


def test_the_figures_have_the_share_of_padding_in_the_passes(model_folder: Any) -> None:
    rows, advantages = make_rows(6, 80), make_advantages(6)
    lengths = [len(row.token_ids) for row in rows]
    shares = [
        Policy.load(model_folder, padding_free=padding_free).update(rows, advantages).figures["padding_share"]
        for padding_free in (True, False)
    ]
    assert shares == pytest.approx([0.0, 1 - sum(lengths) / (6 * max(lengths))])
    assert shares[1] > 0.1
