"""The page on Agent-OS: its programs run on the real package and print the output beside them."""

from __future__ import annotations

import pytest

from tests.contrib.kernels import needs_agent_os
from tests.pages import assert_prints_its_notes, notes, run_page

PAGE = "how-to/agent-os.md"


@needs_agent_os
def test_the_programs_of_the_page_print_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    _, printed = run_page(PAGE, monkeypatch)
    assert len(list(notes(PAGE))) == 4
    assert_prints_its_notes(PAGE, printed)
