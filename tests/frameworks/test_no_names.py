"""The code that runs agents and records their calls knows no framework by its name, and imports none."""

from __future__ import annotations

import re
from pathlib import Path

import agentlightning

PACKAGE = Path(agentlightning.__file__).parent
ROOMS = ("llm_proxy", "runner", "litagent", "trainer", "execution", "store", "algorithm")
NAMED = re.compile(r"langchain|langgraph|autogen|crewai|haystack|llama_?index|smolagents|pydantic_ai", re.IGNORECASE)
IMPORTED = re.compile(r"^\s*(?:from|import) (?:openai|anthropic|agents)\b", re.MULTILINE)


def test_no_room_between_the_agent_and_its_record_names_a_framework() -> None:
    sources = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    assert len(sources) > len(ROOMS)
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sources}
    assert [name for name, text in texts.items() if NAMED.search(text) or IMPORTED.search(text)] == []
