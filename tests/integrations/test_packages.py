"""A helper of a framework that is not installed says what to install, and one that is broken says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.integrations.packages import package_of

LLM = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")


@pytest.mark.parametrize(
    ("function", "package", "install"),
    [
        ("claude_agent_options", "claude_agent_sdk", "claude-agent-sdk"),
        ("dspy_lm", "dspy", "dspy"),
        ("llama_index_llm", "llama_index", "llama-index-llms-openai-like"),
    ],
)
def test_a_missing_package_is_named_with_its_installation(
    function: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what must not be found
    with pytest.raises(ImportError, match=rf"agl\.integrations\.{function} requires .*pip install {install}"):
        getattr(agl.integrations, function)(LLM)


def test_a_package_that_misses_something_of_its_own_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_framework.py").write_text("import something_else_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_else_that_is_not_there"):
        package_of("broken", "broken_framework", "broken-framework")


def test_the_helpers_are_a_name_of_the_package_and_load_nothing() -> None:
    assert {"claude_agent_options", "dspy_lm"} <= set(agl.integrations.__all__)
    with pytest.raises(AttributeError, match="did you mean 'dspy_lm'"):
        _ = agl.integrations.dspylm
