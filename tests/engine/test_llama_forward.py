"""The own forward of small Llama models computes the logits of their modules, on the weights as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig

from agentlightning.engine.forward import ModelForward, forward_of
from agentlightning.engine.llama_forward import LlamaForward
from tests.engine.test_forward import logits_of, make_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_key_value_heads": 2},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
        {"head_dim": 6},
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}},
        {"max_position_embeddings": 7},
    ],
)
def test_logits_are_those_of_the_modules_and_follow_the_weights(settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    for _ in range(2):
        own = forward_of(model)
        assert isinstance(own, LlamaForward)
        for one, other in zip(logits_of(ModelForward(model)), logits_of(own), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"hidden_size": 1024, "vocab_size": 8000}])
def test_other_layouts_and_larger_models_keep_their_own_forward(settings: dict[str, Any]) -> None:
    assert isinstance(forward_of(make_model(**settings)), ModelForward)


def test_adapters_within_the_layers_keep_their_own_forward_while_they_do_nothing_yet() -> None:
    model = make_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert isinstance(forward_of(model.eval()), ModelForward)


def test_a_model_that_computes_something_else_keeps_its_own_forward() -> None:
    model = make_model()
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, hidden: hidden * 2)
    assert isinstance(forward_of(model), ModelForward)
