"""Replies of the chat API: several choices, their tokens and seeds, and fields that change nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentlightning.engine.engine import InferenceEngine
from tests.engine.clients import ask, content, logprobs, stream, tokens


@pytest.mark.parametrize("send", [ask, stream])
def test_each_choice_is_a_sample_with_its_own_tokens(byte_engine: InferenceEngine, send: Any) -> None:
    reply, again = (send(byte_engine, n=4, seed=3, max_tokens=10) for _ in range(2))
    token_lists = [tokens(reply, index) for index in range(4)]
    assert token_lists == [tokens(again, index) for index in range(4)]
    assert len({tuple(one) for one in token_lists}) == 4
    assert token_lists[0] == tokens(ask(byte_engine, seed=3, max_tokens=10))  # the first as if it were alone
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [len(logprobs(reply, index)) for index in range(4)] == [len(one) for one in token_lists]
    if send is ask:
        assert reply["usage"]["completion_tokens"] == sum(map(len, token_lists))
        assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


def test_fields_without_effect_are_noted_once(byte_engine: InferenceEngine, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "reasoning_effort": "low"}
    function = {"name": "weather", "strict": True, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]  # which need not be called
    with caplog.at_level(logging.INFO):
        texts = [content(ask(byte_engine, seed=1, max_tokens=5, chat_template_kwargs={"x": 1}, **fields)) for _ in "ab"]
        for _ in "ab":
            ask(byte_engine, seed=1, max_tokens=5, tools=tools)
    assert texts[0] == texts[1] == content(ask(byte_engine, seed=1, max_tokens=5))
    for name in (*fields, "x", "strict"):
        assert caplog.text.count(f"the field {name!r} ") == 1
