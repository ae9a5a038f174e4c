"""Replies of the chat API: several choices, their tokens and seeds, and fields that change nothing."""

from __future__ import annotations

import logging

import openai
import pytest
import torch

from agentlightning.engine.engine import InferenceEngine
from tests.engine.clients import ask, content, logprobs, stream, tokens


@pytest.mark.parametrize("asked", [ask, stream])
def test_each_choice_is_a_sample_with_its_own_tokens(byte_engine: InferenceEngine, asked: object) -> None:
    reply = asked(byte_engine, n=4, seed=3, max_tokens=10)  # type: ignore[operator]  # one of two functions
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({tuple(tokens(reply, index)) for index in range(4)}) == 4
    assert tokens(reply) == tokens(ask(byte_engine, seed=3, max_tokens=10))  # the first as if it were alone
    for index in range(4):
        assert len(logprobs(reply, index)) == len(tokens(reply, index))


def test_choices_are_counted_and_repeatable(byte_engine: InferenceEngine) -> None:
    reply, again = (ask(byte_engine, n=3, seed=3, max_tokens=10) for _ in range(2))
    said = [tokens(reply, index) for index in range(3)]
    assert said == [tokens(again, index) for index in range(3)]
    assert reply["usage"]["completion_tokens"] == sum(map(len, said))
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_the_choices_have_the_log_probabilities_of_their_own_tokens(byte_engine: InferenceEngine) -> None:
    """Their prompt is read once; each row of the cache must hold all of it."""
    reply = ask(byte_engine, n=5, seed=3, max_tokens=12)
    prompt = reply["prompt_token_ids"]
    for index in range(5):
        said = tokens(reply, index)
        alone = byte_engine._policy.model(input_ids=torch.tensor([prompt + said])).logits[0].detach().log_softmax(-1)
        own = [float(alone[len(prompt) - 1 + n, token]) for n, token in enumerate(said)]
        assert logprobs(reply, index) == pytest.approx(own, abs=1e-4)


def test_more_choices_than_are_decoded_together_are_refused(byte_engine: InferenceEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="'n' must be at most 8"):
        ask(byte_engine, n=9)


def test_fields_without_effect_are_noted_once(byte_engine: InferenceEngine, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "reasoning_effort": "low"}
    function = {"name": "weather", "strict": True, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]  # which need not be called
    with caplog.at_level(logging.INFO):
        said = [content(ask(byte_engine, seed=1, max_tokens=5, chat_template_kwargs={"x": 1}, **fields)) for _ in "ab"]
        for _ in "ab":
            ask(byte_engine, seed=1, max_tokens=5, tools=tools)
    assert said[0] == said[1] == content(ask(byte_engine, seed=1, max_tokens=5))
    for name in (*fields, "x", "strict"):
        assert caplog.text.count(f"the field {name!r} ") == 1
