"""Rows that join, share a beginning, go on and leave, through the modules of a model."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.engine.forward import ModelForward

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13]]


def make_model(**settings: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "max_position_embeddings": 256, **settings})
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.inference_mode()
def logits_of(forward: Any) -> list[torch.Tensor]:
    """Return the logits of prompts that join, are continued and leave."""
    padded = torch.tensor([[*prompt, *([0] * (5 - len(prompt)))] for prompt in PROMPTS])
    lengths = [len(prompt) for prompt in PROMPTS]
    logits = [forward.prompts(padded, torch.tensor(lengths) - 1, 0)]
    logits.append(forward.tokens(torch.tensor([1, 2, 3]), torch.tensor(lengths), 6))
    logits.append(forward.prompts(padded[:1].repeat(2, 1), torch.tensor([4, 4]), 3))
    forward.rows.move_row(4, 1)
    logits.append(forward.tokens(torch.tensor([1, 2, 3, 7]), torch.tensor([6, 5, 4, 5]), 7))
    return logits


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


def test_prompts_of_many_lengths_are_read_with_one_row_of_logits_each() -> None:
    model, rows = make_model(), list[int]()
    model.lm_head.register_forward_hook(lambda head, inputs, logits: rows.append(logits.shape[:-1].numel()))
    padded = torch.tensor([[*prompt, *([0] * (5 - len(prompt)))] for prompt in PROMPTS])
    with torch.inference_mode():
        read = ModelForward(model).prompts(padded, torch.tensor([4, 1, 2]), 0)
        assert rows == [3]
        for prompt, logits in zip(PROMPTS, read, strict=True):
            assert torch.allclose(model(torch.tensor([prompt])).logits[0, -1], logits, atol=1e-4)


def test_a_model_under_autocast_keeps_keys_and_values_of_the_types_that_it_gives() -> None:
    """The keys are float32 and the values bfloat16, as when accelerate wraps a model for `bf16=True` of TRL."""
    model = make_model(num_key_value_heads=2)
    expected = logits_of(ModelForward(model))
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    for one, other in zip(logits_of(ModelForward(model)), expected, strict=True):
        assert torch.allclose(one.float(), other, atol=0.1 * float(other.abs().max()))


# --- prompts with a common beginning --------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """Return a model that is decoded through its own modules, as large ones are."""
    monkeypatch.setattr("agentlightning.engine.llama_forward.SMALL_MODEL_PARAMETERS", 0)
    return make_model(num_key_value_heads=2)


def prompts(*, beginnings: int, each: int, shared: int) -> list[list[int]]:
    rng = random.Random(1)
    made = list[list[int]]()
    for _ in range(beginnings):
        beginning = [rng.randrange(97) for _ in range(shared)]
        made += [[*beginning, *(rng.randrange(97) for _ in range(rng.randint(1, 9)))] for _ in range(each)]
    rng.shuffle(made)
    return made


def drawn(model: LlamaForCausalLM, *batches: list[list[int]]) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    made = [[Completion(ids, 6, 1.0, seed=sum(ids)) for ids in batch] for batch in batches]
    for batch in made:
        generate(Decoder(model, []), batch)
    return {tuple(c.prompt_ids): (c.token_ids, c.logprobs) for batch in made for c in batch}


def test_prompts_that_begin_alike_draw_what_each_draws_alone(model: LlamaForCausalLM) -> None:
    prompt_ids = [*prompts(beginnings=3, each=5, shared=60), *prompts(beginnings=7, each=1, shared=20)]
    together, alone = drawn(model, prompt_ids), drawn(model, *([each] for each in prompt_ids))
    for prompt, (tokens, logprobs) in together.items():
        assert tokens == alone[prompt][0]
        assert logprobs == pytest.approx(alone[prompt][1], abs=1e-4)


@pytest.mark.parametrize(
    ("prompt_ids", "most", "forwards"),
    [
        (prompts(beginnings=3, each=8, shared=60), 3 * 60 + 24 * 9, 6),  # instead of 24 * 60 and more
        (prompts(beginnings=1, each=8, shared=60), 60 + 8 * 9, 2),
        (prompts(beginnings=12, each=1, shared=20), 12 * 29, 1),  # without a common beginning: read together
    ],
)
def test_a_common_beginning_is_read_once(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, prompt_ids: list[list[int]], most: int, forwards: int
) -> None:
    read, forward = list[int](), model.forward

    def counted(*args: object, **kwargs: object) -> object:
        ids = kwargs["input_ids"]
        assert isinstance(ids, torch.Tensor)
        read.append(ids.numel())
        return forward(*args, **kwargs)  # pyright: ignore[reportArgumentType] -- handed on as they came

    monkeypatch.setattr(model, "forward", counted)
    generate(Decoder(model, []), [Completion(ids, 1) for ids in prompt_ids])
    assert sum(read) <= most
    assert len(read) == forwards
