"""Words of a call in other conventions; each of them beside the gateway: `tests/adapter/calls/test_matching.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter.spans.conventions import chat_messages
from agentlightning.types import Event

KEYS = (
    "content",
    "message",
    "tool_calls",
    "finish_reason",
    "role",
    "id",
    "gen_ai.event.content",
    "gen_ai.input.messages",
)
FIELDS = ("text", "toolUse", "toolResult", "content", "parts", "type", "role", "message", "name", "input", "json")
NAMES = [
    *(f"gen_ai.{role}.message" for role in ("system", "user", "assistant", "tool")),
    "gen_ai.choice",
    "gen_ai.client.inference.operation.details",
]
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["text", "tool_call"])
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner)
)
attributes = st.dictionaries(st.sampled_from(KEYS), values.map(json.dumps) | st.text(max_size=6) | st.integers())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), attributes), max_size=4))
def test_whatever_events_hold_nothing_raises_and_messages_are_messages(
    contents: list[tuple[str, dict[str, Any]]],
) -> None:
    events = [Event(name=name, attributes=held) for name, held in contents]
    prompt, completion = chat_messages({}, events)
    assert all(isinstance(message, dict) for message in [*prompt, *completion])


@pytest.mark.parametrize("text", ["[1, 2]", "[not a list", '["a"]', "{}", '{"a": 1}'])
def test_words_that_only_look_like_blocks_are_the_words(text: str) -> None:
    prompt, _ = chat_messages({}, [Event(name="gen_ai.user.message", attributes={"content": text})])
    assert prompt == [{"role": "user", "content": text}]


def test_several_results_of_tools_are_messages_of_their_own() -> None:
    results = [{"toolResult": {"toolUseId": id, "content": [{"json": {"x": 1}}]}} for id in ("a", "b")]
    event = Event(name="gen_ai.tool.message", attributes={"content": json.dumps(results)})
    assert chat_messages({}, [event])[0] == [
        {"role": "tool", "tool_call_id": id, "content": '{"x": 1}'} for id in ("a", "b")
    ]
