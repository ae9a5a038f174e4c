"""Messages become prompts and completions become messages."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.request import RequestError
from agentlightning.training.learner.policy import Policy


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "no role"}, "'role' is missing"),
        ({"role": "user", "content": {"text": "no list"}}, "a list of text parts"),
        *(
            (
                {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": kind}]},
                "images are not supported",
            )
            for kind in ("image_url", "image", "input_image")
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "a tool call needs"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "a JSON object"),
        ({"role": "assistant", "tool_calls": [{"id": "no function"}]}, "a tool call needs"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(policy: Policy, message: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].*{words}"):
        ChatFormat(policy.tokenizer).prompt_ids([{"role": "user", "content": "hello"}, message], None)


def test_text_parts_are_joined(policy: Policy) -> None:
    chat_format = ChatFormat(policy.tokenizer)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 plus 4?"}]
    whole = chat_format.prompt_ids([{"role": "user", "content": "What is 3 plus 4?"}], None)
    assert chat_format.prompt_ids([{"role": "user", "content": parts}], None) == whole


def test_tool_calls_are_not_read_when_no_tool_was_offered(policy: Policy) -> None:
    reply = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
    tokens = policy.tokenizer(reply)["input_ids"]
    chat_format = ChatFormat(policy.tokenizer)
    assert chat_format.reply(tokens, with_tools=False).content == reply
    assert chat_format.reply(tokens, with_tools=True).content is None


def test_template_fields_reach_the_template_and_cannot_replace_its_own(policy: Policy) -> None:
    policy.tokenizer.chat_template = "{% if shout %}12{% else %}34{% endif %}"
    chat_format = ChatFormat(policy.tokenizer)
    messages = [{"role": "user", "content": "hello"}]
    assert chat_format.prompt_ids(messages, None, {"shout": True}) != chat_format.prompt_ids(messages, None)
    for name in ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"remove {name}"):
            chat_format.prompt_ids(messages, None, {name: "x"})
