"""Text of others reaches a terminal, a log and a JSON line without anything that a terminal obeys."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from agentlightning.base.terminal import json_text, one_line, some_lines
from agentlightning.logging import JsonLines, PlainLines, setup

HOSTILE = "a\x1b[31m\x1b]0;title\x07\x1b]8;;http://x\x1b\\b\x9b2J\x00\x7f\r\u202e\u200b\u2066\ufeff\u2028\ud800\U000e0041\x85z"
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


@pytest.mark.parametrize("shown", [one_line, some_lines])
def test_nothing_that_a_terminal_obeys_is_left(shown: Any) -> None:
    text = shown(HOSTILE)
    assert OBEYED.search(text) is None
    assert "\\x1b[31m" in text
    assert "\\u202e" in text
    assert shown("Grüße, 日本 \N{GRINNING FACE}") == "Grüße, 日本 \N{GRINNING FACE}"


def test_a_cell_is_one_line_and_a_text_keeps_its_lines() -> None:
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert some_lines("a\nb\tc") == "a\nb\tc"


def test_json_means_the_same_after_it_is_made_safe() -> None:
    document = json_text(json.dumps({HOSTILE: [HOSTILE]}, ensure_ascii=False))
    assert OBEYED.search(document) is None
    assert json.loads(document) == {HOSTILE: [HOSTILE]}


def _record(message: str, *args: Any, error: Exception | None = None) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, None)
    return logging.LogRecord("agentlightning.x", logging.ERROR, "f.py", 1, message, args, raised)


@pytest.mark.parametrize("form", [PlainLines("%(message)s"), JsonLines()])
def test_a_line_of_the_log_is_safe_and_says_the_same(form: logging.Formatter) -> None:
    line = form.format(_record("[Rollout %s] %s after %.2f s, %d", HOSTILE, "a\n[ERROR] forged", 1.5, 3))
    assert OBEYED.search(line) is None
    assert "\n" not in line
    assert "after 1.50 s, 3" in line


def test_a_traceback_in_the_log_keeps_its_lines_and_nothing_else() -> None:
    line = PlainLines("%(message)s").format(_record("failed", error=ValueError(HOSTILE)))
    assert OBEYED.search(line) is None
    assert line.startswith("failed\nValueError: a\\x1b[31m")


@pytest.mark.parametrize("args", [("x" * 100_000_000,), (["x" * 1_000_000] * 3,)])
@pytest.mark.parametrize("form", [PlainLines("%(message)s"), JsonLines()])
def test_a_line_of_the_log_has_a_bound(form: logging.Formatter, args: tuple[Any, ...]) -> None:
    assert len(form.format(_record("said %s", *args))) < 70_000
    assert len(form.format(_record("failed", error=ValueError(*args)))) < 70_000


def test_the_coloured_log_has_a_bound_and_colours_no_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    setup("INFO", color=True)
    logger = logging.getLogger("agentlightning")
    try:
        (handler,) = logger.handlers
        looked_at: list[int] = []
        handler.highlighter = lambda text: looked_at.append(len(text)) or text  # type: ignore[attr-defined] -- rich's
        handler.console.file = io.StringIO()  # type: ignore[attr-defined] -- rich's
        for message in ("a" * 40_000, "a" * 10_000_000, "[red]plain[/red] [link=http://x]y[/link]", HOSTILE):
            logger.error("%s", message)
        written = handler.console.file.getvalue()  # type: ignore[attr-defined] -- rich's
    finally:
        setup("INFO", color=False)
    assert max(looked_at) <= 500
    assert len(written) < 60_000
    assert "[red]plain[/red] [link=http://x]y[/link]" in written
    assert OBEYED.search(written) is None


def test_the_log_file_is_safe_too(tmp_path: Path) -> None:
    setup("INFO", console=False, files=tmp_path / "a.log")
    logger = logging.getLogger("agentlightning")
    try:
        logger.error("[Rollout %s] %r", HOSTILE, HOSTILE)
    finally:
        setup("INFO", color=False)
    assert OBEYED.search((tmp_path / "a.log").read_text()) is None
