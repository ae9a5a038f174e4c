"""The programs of the guides run as they are printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.frameworks.engine import call
from tests.frameworks.harness import run_agent

GUIDES = Path(__file__).parents[2] / "docs/how-to/frameworks"
PACKAGES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "langchain": "langchain.agents",
    "langgraph": "langgraph.graph",
    "openai-agents": "agents",
    "autogen": "autogen_agentchat.agents",
    "bash": "agentlightning",
    "crewai": "crewai",
    "dspy": "dspy",
    "instructor": "instructor",
    "llama-index": "llama_index",
    "haystack": "haystack",
    "pydantic-ai": "pydantic_ai",
    "smolagents": "smolagents",
    "litellm": "litellm",
}

ANSWERS = {
    "dspy": "[[ ## answer ## ]]\nIt is 42.\n\n[[ ## completed ## ]]",
    "instructor": call("Answer", value=42),
    "smolagents": call("final_answer", answer="42"),
}
"""What the model says where a framework expects a form."""


def blocks(guide: str, language: str) -> list[str]:
    text = (GUIDES / f"{guide}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("guide", PACKAGES)
def test_the_program_of_a_guide_is_captured(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[guide]
    pytest.importorskip(package, reason=f"{package} is not installed: make test-frameworks")
    if guide == "bash" and None in map(shutil.which, ("bash", "curl", "jq")):
        pytest.skip("bash, curl and jq are not all here")
    for script in blocks(guide, "bash"):
        (tmp_path / "agent.sh").write_text(script)
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(guide, "python")
    names: dict[str, object] = {}
    exec(compile(program, f"{guide}.md", "exec"), names)
    for result in run_agent(names["agent"], lambda _: ANSWERS.get(guide, "It is 42."), direct=False):
        assert result.output == 1.0
        assert len(result.exchanges) == 1


def test_every_guide_is_run_and_listed() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} == {*PACKAGES, "index"}
    index = (GUIDES / "index.md").read_text()
    assert [guide for guide in PACKAGES if f"]({guide}.md)" not in index] == []
