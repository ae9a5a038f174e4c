"""The page on Agent-OS: its programs run on the real package and print the output beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.contrib.kernels import needs_agent_os

PAGE = Path(__file__).parents[2] / "docs/how-to/agent-os.md"


@needs_agent_os
def test_the_programs_of_the_page_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    matches = [text for block in blocks for text in re.findall(r"print\(.*\)  # (.+)$", block, re.MULTILINE)]
    lines = capsys.readouterr().out.splitlines()
    assert len(matches) == 4
    for expected in matches:
        pattern = re.escape(expected).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line) for line in lines), f"{expected!r} in {lines}"
