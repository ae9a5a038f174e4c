"""The page on GEPA: its program runs, with a model on a socket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.prompt_search.gepa.test_gepa import shown, template_in
from tests.stubs.model_server import ModelServer

PAGE = Path(__file__).parents[3] / "docs/algorithms/gepa.md"


def names_the_unit(request: dict[str, Any]) -> str:
    assert "wanted: the unit of the answer" in shown(request)
    return f"```\n{template_in(request)} Name the unit.\n```"


@pytest.mark.heavy
def test_the_program_finds_the_prompt_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program.replace("agl.GEPA(", 'agl.GEPA("some-model", '))
    with ModelServer(names_the_unit) as server:
        environment = {**os.environ, "OPENAI_API_KEY": "sk-none", "OPENAI_BASE_URL": server.base_url}
        for _ in range(2):
            command = [sys.executable, "program.py"]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
            assert done.returncode == 0, done.stderr
            assert "+Answer: {question} Name the unit." in done.stdout
        assert len(server.calls) == 1, "the second start asks nobody"
