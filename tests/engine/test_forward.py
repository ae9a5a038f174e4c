"""The direct forward of small Llama models computes what their modules compute, on the weights as they are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.engine.forward import Forward, ModelForward, forward_of
from agentlightning.engine.llama_forward import LlamaForward

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13]]


def make_model(**settings: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "max_position_embeddings": 64, **settings})
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.inference_mode()
def logits_of(forward: Forward) -> list[torch.Tensor]:
    """Return the logits of prompts that join, are shared, are continued and leave."""
    padded = torch.tensor([[*prompt, *([0] * (5 - len(prompt)))] for prompt in PROMPTS])
    lengths = [len(prompt) for prompt in PROMPTS]
    found = [forward.prompts(padded, torch.tensor(lengths) - 1, 0)]
    found.append(forward.tokens(torch.tensor([1, 2, 3]), torch.tensor(lengths), 6))
    found.append(forward.prompts(padded[:1], torch.tensor([4]), 3))
    forward.rows.spread_rows(3, [0, 0])
    forward.rows.move_row(4, 1)
    found.append(forward.tokens(torch.tensor([1, 2, 3, 7]), torch.tensor([6, 5, 4, 5]), 7))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_key_value_heads": 2},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
        {"head_dim": 6},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {"max_position_embeddings": 7},
    ],
)
def test_logits_are_those_of_the_modules(settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    direct = forward_of(model)
    assert isinstance(direct, LlamaForward)
    for own, other in zip(logits_of(ModelForward(model)), logits_of(direct), strict=True):
        torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-5)


def test_a_model_whose_forward_takes_the_rows_as_cache_is_given_them_so() -> None:
    name = {"cache", "past_key_values"} & inspect.signature(LlamaForCausalLM.forward).parameters.keys()

    class Renamed(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, cache: Any = None, **rest: Any) -> Any:
            assert cache is not None
            return super().forward(input_ids=input_ids, **{min(name): cache}, **rest)

    model = make_model()
    renamed = Renamed(model.config).eval()
    renamed.load_state_dict(model.state_dict())
    for own, other in zip(logits_of(ModelForward(model)), logits_of(ModelForward(renamed)), strict=True):
        torch.testing.assert_close(other, own)


def test_changed_weights_are_used_at_once() -> None:
    model = make_model()
    direct = forward_of(model)
    before = logits_of(direct)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    after = logits_of(direct.with_new_rows() if isinstance(direct, LlamaForward) else direct)[0]
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(after, logits_of(ModelForward(model))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"hidden_size": 1024, "vocab_size": 8000}])
def test_other_layouts_and_larger_models_keep_their_own_forward(settings: dict[str, Any]) -> None:
    assert isinstance(forward_of(make_model(**settings)), ModelForward)


def test_adapters_within_the_layers_keep_their_own_forward_while_they_do_nothing_yet() -> None:
    model = make_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert isinstance(forward_of(model.eval()), ModelForward)


def test_a_model_that_computes_something_else_keeps_its_own_forward() -> None:
    model = make_model()
    model.model.layers[0].register_forward_hook(lambda _module, _given, hidden: hidden * 2)
    assert isinstance(forward_of(model), ModelForward)


def test_prompts_of_many_lengths_are_read_with_one_row_of_logits_each() -> None:
    model, rows = make_model(), list[int]()
    model.lm_head.register_forward_hook(lambda head, inputs, logits: rows.append(logits.shape[:-1].numel()))
    lengths = [5, 2, 3]
    padded = torch.tensor([[*prompt, *([0] * (5 - len(prompt)))] for prompt in PROMPTS])
    with torch.inference_mode():
        found = ModelForward(model).prompts(padded, torch.tensor(lengths) - 1, 0)
        assert rows == [3]
        for prompt, logits in zip(PROMPTS, found, strict=True):
            assert torch.allclose(model(torch.tensor([prompt])).logits[0, -1], logits, atol=1e-4)


def test_a_model_under_autocast_keeps_keys_and_values_of_the_types_that_it_gives() -> None:
    """As accelerate wraps a model for `bf16=True` of TRL: the keys are float32, the values bfloat16."""
    model = make_model(num_key_value_heads=2)
    expected = logits_of(ModelForward(model))
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    for one, other in zip(logits_of(ModelForward(model)), expected, strict=True):
        assert torch.allclose(one.float(), other, atol=0.1 * float(other.abs().max()))
