"""Decoding by rows that come and go gives the tokens of one sequence at a time."""

from __future__ import annotations

import math

import pytest
import torch

from agentlightning.engine import decoder as decode
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.training.learner.policy import Policy


def completions(count: int, **settings: float) -> list[Completion]:
    """Prompts of different lengths, with limits that end them at different times."""
    return [
        Completion([10 + (n * 7 + k) % 60 for k in range(1 + n % 9)], 1 + (n * 5) % 13, seed=n, **settings)
        for n in range(count)
    ]


def slowly(policy: Policy, completion: Completion) -> list[int]:
    """The greedy tokens by a whole forward pass per token, without any cache."""
    tokens = list(completion.prompt_ids)
    for _ in range(completion.max_new_tokens):
        with torch.no_grad():
            tokens.append(int(policy.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in policy.eos_ids:
            break
    return tokens[len(completion.prompt_ids) :]


@pytest.mark.parametrize("prefill_tokens", [16_384, 10])  # prompts are read at once, or in parts
def test_greedy_tokens_equal_those_of_whole_forward_passes(
    policy: Policy, prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PREFILL_TOKENS", prefill_tokens)
    made = completions(20, temperature=0.0)
    generate(Decoder(policy.model, policy.eos_ids, max_batch=6), made)
    assert [completion.token_ids for completion in made] == [slowly(policy, completion) for completion in made]


def test_a_completion_does_not_depend_on_how_many_share_the_batch(policy: Policy) -> None:
    token_lists: list[list[list[int]]] = []
    for max_batch in (1, 5, 64):
        made = completions(20)
        generate(Decoder(policy.model, policy.eos_ids, max_batch=max_batch), made)
        token_lists.append([completion.token_ids for completion in made])
        assert all(len(c.token_ids) == len(c.logprobs) for c in made)
        assert {c.finish_reason for c in made} <= {"stop", "length"}
    assert token_lists[0] == token_lists[1] == token_lists[2]


def test_the_token_that_ends_the_sequence_is_kept(policy: Policy) -> None:
    [probe] = completions(1, temperature=0.0)
    generate(Decoder(policy.model, ()), [probe])
    made = Completion(probe.prompt_ids, 10, 0.0)
    generate(Decoder(policy.model, {probe.token_ids[0]}), [made])
    assert (made.token_ids, made.finish_reason) == (probe.token_ids[:1], "stop")


def test_weights_that_give_no_number_are_an_error(policy: Policy) -> None:
    with torch.no_grad():
        next(policy.model.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="no finite probabilities"):
        generate(Decoder(policy.model, ()), [Completion([20], 3)])


def test_a_model_without_plain_attention_is_refused(policy: Policy) -> None:
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        Decoder(policy.model, ())


# --- each completion alone ------------------------------------------------------------------------------------------


def separately(policy: Policy, numbers: range, max_batch: int = 128) -> dict[int, object]:
    made = {n: Completion(list(range(10, 14 + n % 7)), 12, 0.7 + n / 50, seed=n, top_logprobs=3) for n in numbers}
    generate(Decoder(policy.model, policy.eos_ids, max_batch=max_batch, separate=True), list(made.values()))
    return {n: (one.token_ids, one.logprobs, one.likeliest, one.finish_reason) for n, one in made.items()}


@pytest.mark.heavy
def test_company_changes_no_bit(policy: Policy) -> None:
    alone: dict[int, object] = {}
    for number in range(24):
        alone |= separately(policy, range(number, number + 1))
    assert separately(policy, range(24)) == alone
    assert separately(policy, range(23, -1, -1), max_batch=5) == alone


@pytest.mark.parametrize("separate", [False, True])
def test_completions_that_nobody_waits_for_leave(policy: Policy, separate: bool) -> None:
    decoder = Decoder(policy.model, (), max_batch=2, separate=separate)
    first, second, third = (Completion([10, 11], 12, seed=n) for n in range(3))
    decoder.add([first, second, third])
    decoder.step()
    first.left = True
    assert first in decoder.step()
    assert (decoder.running, len(decoder)) == (2, 2)
    assert [len(one.token_ids) for one in (first, second, third)] == [1, 2, 1]
