"""The pages on APO and GEPA: each block of Python runs, the whole programs with models on sockets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.prompt_search.critic import APPLY_EDIT_FILES, GRADIENT_FILES
from tests.prompt_search.parts import is_edit, template_in
from tests.prompt_search.test_gepa_search import shown
from tests.prompt_search.test_gepa_search import template_in as template_of_gepa
from tests.stubs.model_server import ModelServer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "how-to/tune-a-prompt.md", DOCS / "algorithms/apo.md", DOCS / "algorithms/gepa.md")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def run(program: str, folder: Path, server: ModelServer, *expected: str, **environment: str) -> None:
    """Run a program and check that it prints the expected output."""
    (folder / "program.py").write_text(program)
    variables = {**os.environ, "OPENAI_API_KEY": "sk-none", "OPENAI_BASE_URL": server.base_url, **environment}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    for text in expected:
        assert text in done.stdout


def a_weak_model(request: dict[str, Any]) -> str:
    """Adds, and answers with the number alone only where it is told to."""
    text = request["messages"][-1]["content"]
    numbers = re.search(r"(\d+) plus (\d+)", text)
    assert numbers is not None
    total = str(int(numbers[1]) + int(numbers[2]))
    return total if "only the number" in text else f"That makes {total}."


def a_critic(request: dict[str, Any]) -> str:
    return f"{template_in(request)} Say only the number." if is_edit(request) else "- Ask for the number alone."


def names_the_unit(request: dict[str, Any]) -> str:
    assert "wanted: the unit of the answer" in shown(request)
    return f"```\n{template_of_gepa(request)} Name the unit.\n```"


@pytest.mark.heavy
def test_the_program_of_apo_tunes_the_prompt_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    with ModelServer(a_weak_model) as agents, ModelServer(a_critic) as critics:
        for _ in range(2):
            expected = "+{question} Say only the number.", "v0 0.000 -> v1 1.000"
            run(blocks(PAGES[0])[0], tmp_path, critics, *expected, AGENT_MODEL=agents.base_url)
            calls = len(agents.calls), len(critics.calls)
        assert calls == (len(agents.calls), len(critics.calls)), "the second start asks nobody"
        requests = [call.request["messages"][-1]["content"] for call in critics.calls]
        assert any("That makes" in text for text in requests), "the critic sees what the agent's model said"
    saved = json.loads((tmp_path / "apo.json").read_text())
    assert (saved["best"], saved["versions"][0]["score"]) == ("v1", 0.0)


@pytest.mark.heavy
def test_the_program_of_gepa_finds_the_prompt_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    [program] = blocks(PAGES[2])
    with ModelServer(names_the_unit) as server:
        for _ in range(2):
            expected = "+Answer: {question} Name the unit."
            run(program, tmp_path, server, expected)
        assert len(server.calls) == 1, "the second start asks nobody"


@pytest.mark.parametrize("block", [*blocks(PAGES[0])[1:], *blocks(PAGES[1])])
def test_every_other_block_runs(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "page", "exec"), {})


def test_the_page_counts_our_files_right() -> None:
    assert (len(GRADIENT_FILES), len(APPLY_EDIT_FILES)) == (3, 2)
    assert "three for critiques and two for edits" in " ".join(PAGES[1].read_text().split())
