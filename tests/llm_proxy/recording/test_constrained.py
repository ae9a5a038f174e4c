"""Which settings of a request are noted as changing what is drawn, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.llm_proxy.recording.constrained import constrained_by


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({}, []),
        ({"temperature": 0.3, "n": 2, "stop": ["a"], "max_tokens": 4, "seed": 1}, []),
        ({"temperature": 0}, ["temperature"]),
        ({"temperature": 0.0, "top_p": 0.5}, ["temperature", "top_p"]),
        ({"temperature": None}, []),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "logit_bias": {}, "repetition_penalty": 1.0, "min_tokens": 0}, []),
        ({"top_p": 0.9, "top_k": 5, "presence_penalty": -1}, ["presence_penalty", "top_k", "top_p"]),
        ({"tool_choice": "auto"}, []),
        ({"tool_choice": "none"}, []),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["tool_choice"]),
        ({"tool_choice": {"type": "auto"}}, []),  # Anthropic's forms
        ({"tool_choice": {"type": "any"}}, ["tool_choice"]),
        ({"tool_choice": {"type": "tool", "name": "f"}}, ["tool_choice"]),
        ({"response_format": {"type": "text"}}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, ["text.format"]),  # the Responses API
        ({"structured_outputs": {"regex": "a"}}, ["structured_outputs"]),  # vLLM's form
        ({"logit_bias": {"5": 1}, "response_format": "nonsense", "text": 3}, ["logit_bias"]),
    ],
)
def test_what_changes_the_distribution_is_named(request_fields: dict[str, Any], named: list[str]) -> None:
    assert constrained_by(request_fields) == named
