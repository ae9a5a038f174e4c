"""The pages on APO: each block of Python runs, the whole program with an agent and a critic on sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.prompt_search.apo.prompt_files import APPLY_EDIT_FILES, GRADIENT_FILES
from tests.prompt_search.apo.parts import is_edit, template_in
from tests.stubs.model_server import ModelServer

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "how-to/tune-a-prompt.md", DOCS / "algorithms/apo.md")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def a_weak_model(request: dict[str, Any]) -> str:
    """Adds, and answers with the number alone only where it is told to."""
    text = request["messages"][-1]["content"]
    numbers = re.search(r"(\d+) plus (\d+)", text)
    assert numbers is not None
    total = str(int(numbers[1]) + int(numbers[2]))
    return total if "only the number" in text else f"That makes {total}."


def a_critic(request: dict[str, Any]) -> str:
    return f"{template_in(request)} Say only the number." if is_edit(request) else "- Ask for the number alone."


@pytest.mark.heavy
def test_the_whole_program_tunes_the_prompt_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(blocks(PAGES[0])[0])
    with ModelServer(a_weak_model) as agents, ModelServer(a_critic) as critics:
        environment = {
            **os.environ,
            "OPENAI_API_KEY": "sk-none",
            "OPENAI_BASE_URL": critics.base_url,
            "AGENT_MODEL": agents.base_url,
        }
        for _ in range(2):
            command = [sys.executable, "program.py"]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
            assert done.returncode == 0, done.stderr
            assert "+{question} Say only the number." in done.stdout
            assert "v0 0.000 -> v1 1.000" in done.stdout
            calls = len(agents.calls), len(critics.calls)
        assert calls == (len(agents.calls), len(critics.calls)), "the second start asks nobody"
        shown = [call.request["messages"][-1]["content"] for call in critics.calls]
        assert any("That makes" in text for text in shown), "the critic sees what the agent's model said"
    saved = json.loads((tmp_path / "apo.json").read_text())
    assert (saved["best"], saved["versions"][0]["score"]) == ("v1", 0.0)


@pytest.mark.parametrize("block", [*blocks(PAGES[0])[1:], *blocks(PAGES[1])])
def test_every_other_block_runs(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "page", "exec"), {})


def test_the_page_counts_our_files_right() -> None:
    text = PAGES[1].read_text()
    assert (len(GRADIENT_FILES), len(APPLY_EDIT_FILES)) == (3, 2)
    assert "three for critiques, two for edits" in text
