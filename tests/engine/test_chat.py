"""Messages become prompts and completions become messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.engine.chat import ChatFormat, message_body, parse_reply
from agentlightning.engine.request import RequestError
from agentlightning.training.learner.policy import Policy


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": {"text": "no list"}},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "no function"}]},
    ],
)
def test_a_malformed_message_is_refused_with_its_place(policy: Policy, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        ChatFormat(policy.tokenizer).prompt_ids([{"role": "user", "content": "hello"}, message], None)


@pytest.mark.parametrize("kind", ["image_url", "image", "input_image"])
def test_an_image_is_refused_with_the_reason(policy: Policy, kind: str) -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA"}}]
    with pytest.raises(RequestError, match=r"messages\[0\].*images are refused: the rows.*tokens of text alone"):
        ChatFormat(policy.tokenizer).prompt_ids([{"role": "user", "content": parts}], None)


def test_text_parts_are_joined(policy: Policy) -> None:
    chat_format = ChatFormat(policy.tokenizer)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 plus 4?"}]
    whole = chat_format.prompt_ids([{"role": "user", "content": "What is 3 plus 4?"}], None)
    assert chat_format.prompt_ids([{"role": "user", "content": parts}], None) == whole


def test_several_calls_are_read_in_order_and_get_ids_of_their_own() -> None:
    text = "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{"n": {n}}}}}</tool_call>\n' for n in range(3))
    calls = message_body(parse_reply(text))["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        (f"f{n}", {"n": n}) for n in range(3)
    ]
    assert len({call["id"] for call in calls}) == 3


def test_tool_calls_are_not_read_when_no_tool_was_offered(policy: Policy) -> None:
    said = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
    tokens = policy.tokenizer(said)["input_ids"]
    chat_format = ChatFormat(policy.tokenizer)
    assert chat_format.reply(tokens, with_tools=False).content == said
    assert chat_format.reply(tokens, with_tools=True).content is None


def test_template_fields_reach_the_template_and_cannot_replace_its_own(policy: Policy) -> None:
    policy.tokenizer.chat_template = "{% if shout %}12{% else %}34{% endif %}"
    chat_format = ChatFormat(policy.tokenizer)
    said = [{"role": "user", "content": "hello"}]
    assert chat_format.prompt_ids(said, None, {"shout": True}) != chat_format.prompt_ids(said, None)
    for name in ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"cannot set '{name}'"):
            chat_format.prompt_ids(said, None, {name: "x"})
