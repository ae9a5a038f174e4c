"""Text that comes from data, made fit for a terminal: names, errors and tracebacks that others wrote.

A terminal obeys what it is sent: escape sequences write files, change titles and hide lines, overrides of direction
make a name read as another one, a line break makes one entry two. Everything of that kind is shown as its
escape instead.
"""

from __future__ import annotations

import re

_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # not seen, or turning text round
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_IN_LINES = re.compile(f"[{_UNSAFE}]")
_IN_ONE_LINE = re.compile(f"[\t\n{_UNSAFE}]")


def one_line(text: str) -> str:
    """Return a text as one line without anything that a terminal obeys."""
    return text if text.isascii() and text.isprintable() else _IN_ONE_LINE.sub(_escape, text)


def some_lines(text: str) -> str:
    """Return a text of several lines, which stay, without anything else that a terminal obeys."""
    return text if text.isascii() and text.isprintable() else _IN_LINES.sub(_escape, text)


def json_text(text: str) -> str:
    """Return a JSON document in which such characters stand as JSON writes them; it means the same."""
    return text if text.isascii() and text.isprintable() else _IN_LINES.sub(_json_escape, text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most about so many characters, which says how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters; a longer one ends in `...`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
