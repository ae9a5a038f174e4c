"""Prompts with a common beginning: it is read once, and nothing that is drawn depends on it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.engine.forward import ModelForward


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """Return a model that is decoded through its own modules, as large ones are."""
    monkeypatch.setattr("agentlightning.engine.llama_forward.SMALL_MODEL_PARAMETERS", 0)
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] -- torch's stub
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


def prompts(*, beginnings: int, each: int, shared: int) -> list[list[int]]:
    rng = random.Random(1)
    found = list[list[int]]()
    for _ in range(beginnings):
        beginning = [rng.randrange(97) for _ in range(shared)]
        found += [[*beginning, *(rng.randrange(97) for _ in range(rng.randint(1, 9)))] for _ in range(each)]
    rng.shuffle(found)
    return found


def drawn(
    model: LlamaForCausalLM, batches: list[list[list[int]]]
) -> dict[tuple[int, ...], tuple[list[int], list[float]]]:
    found = dict[tuple[int, ...], tuple[list[int], list[float]]]()
    for batch in batches:
        completions = [Completion(ids, 6, 1.0, seed=sum(ids)) for ids in batch]
        generate(Decoder(model, []), completions)
        found |= {tuple(c.prompt_ids): (c.token_ids, c.logprobs) for c in completions}
    return found


def test_prompts_that_begin_alike_draw_what_each_draws_alone(model: LlamaForCausalLM) -> None:
    asked = [*prompts(beginnings=3, each=5, shared=60), *prompts(beginnings=7, each=1, shared=20)]
    together, alone = drawn(model, [asked]), drawn(model, [[each] for each in asked])
    assert {prompt: tokens for prompt, (tokens, _) in together.items()} == {p: t for p, (t, _) in alone.items()}
    for prompt, (_, logprobs) in together.items():
        assert logprobs == pytest.approx(alone[prompt][1], abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (prompts(beginnings=3, each=8, shared=60), 3 * 60 + 24 * 9),  # instead of 24 * 60 and more
        (prompts(beginnings=1, each=8, shared=60), 60 + 8 * 9),
    ],
)
def test_a_common_beginning_is_read_once(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, asked: list[list[int]], most: int
) -> None:
    read, forward = list[int](), model.forward

    def counted(*args: object, **kwargs: object) -> object:
        ids = kwargs["input_ids"]
        assert isinstance(ids, torch.Tensor)
        read.append(ids.numel())
        return forward(*args, **kwargs)  # pyright: ignore[reportArgumentType] -- handed on as they came

    monkeypatch.setattr(model, "forward", counted)
    decoder = Decoder(model, [])
    decoder.add([Completion(ids, 1) for ids in asked])
    assert sum(read) <= most


def test_prompts_without_a_common_beginning_are_read_together(model: LlamaForCausalLM) -> None:
    asked = prompts(beginnings=12, each=1, shared=20)
    forwards, prompts_of = list[int](), ModelForward.prompts

    def counted(self: ModelForward, tokens: torch.Tensor, last: torch.Tensor, first_row: int) -> torch.Tensor:
        forwards.append(len(tokens))
        return prompts_of(self, tokens, last, first_row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelForward, "prompts", counted)
        Decoder(model, []).add([Completion(ids, 1) for ids in asked])
    assert forwards == [12]
