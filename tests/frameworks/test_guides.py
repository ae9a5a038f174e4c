"""The programs of the guides run as they are printed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.frameworks.engine import call
from tests.frameworks.harness import COMMANDS, GUIDES, agent_of_guide, run_agent
from tests.pages import DOCS, ROOT, blocks

MODULES = Path(os.environ.get("AGL_TEST_NODE_MODULES", "not set"))
NAMES = sorted(path.stem for path in GUIDES.glob("*.md") if path.stem != "index")

ANSWERS = {
    "dspy": "[[ ## answer ## ]]\nIt is 42.\n\n[[ ## completed ## ]]",
    "instructor": call("Answer", value=42),
    "smolagents": call("final_answer", answer="42"),
    "mini-swe-agent": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"),
}
"""Replies of the model where a framework expects a form."""


@pytest.mark.parametrize("guide", NAMES)
def test_the_program_of_a_guide_is_captured(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if guide == "bash" and None in map(shutil.which, ("bash", "curl", "jq")):
        pytest.skip("bash, curl and jq are not all here")
    page = GUIDES / f"{guide}.md"
    in_node = blocks(page, "javascript")
    if in_node and not (MODULES.is_dir() and shutil.which("node")):
        pytest.skip("node or its packages are not installed here: make test-frameworks")
    if in_node:
        (tmp_path / "node_modules").symlink_to(MODULES)
    monkeypatch.chdir(tmp_path)
    scripts = [("agent.sh", text) for text in blocks(page, "bash")] + [("agent.mjs", text) for text in in_node]
    for name, script in scripts or [("none", "")]:
        (tmp_path / name).write_text(script)
        try:
            agent = agent_of_guide(guide)
        except ModuleNotFoundError as missing:
            pytest.skip(f"{missing.name} is not installed: make test-frameworks")
        answer, exact = ANSWERS.get(guide, "It is 42."), guide not in COMMANDS
        for result in run_agent(agent, lambda _, answer=answer: answer, direct=False, exact=exact):
            assert result.output == 1.0
            assert set(result.record.exclusions.values()) <= {"helper"}
            assert len(result.exchanges) == 1 + len(result.record.exclusions)


def test_every_client_gets_a_placeholder_if_the_model_has_no_key() -> None:
    files = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    bare = re.compile(r'[=: (]llm\.api_key(?! or "unused")')
    assert [str(file) for file in files if bare.search(file.read_text())] == []


def test_every_guide_is_listed() -> None:
    index = (GUIDES / "index.md").read_text()
    assert [guide for guide in NAMES if f"]({guide}.md)" not in index] == []


def test_the_page_on_coding_agents_has_the_tested_versions() -> None:
    here = Path(__file__).parent
    versions: dict[str, str] = json.loads((here / "coding/package.json").read_text())["dependencies"]
    for file in ("commands-aider.in", "constraints.txt"):
        pins = (here / "coding_python" / file).read_text()
        versions.update(re.findall(r"^(aider-chat|mini-swe-agent)==([^;\s]+)", pins, re.MULTILINE))
    del versions["@google/gemini-cli"]
    page = (GUIDES.parent / "use-a-coding-agent.md").read_text()
    assert sorted(re.findall(r"\| (\d+\.[\d.]+) \|", page)) == sorted(versions.values())
