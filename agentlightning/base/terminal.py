"""Make untrusted text safe for a terminal, such as names, errors and tracebacks.

A terminal interprets control characters: escape sequences can change titles and hide lines, direction overrides can
disguise a name, and a line break makes one entry look like two. This module replaces such characters by visible
escapes.
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
    """Return a text as one line, with control characters as visible escapes."""
    return text if text.isascii() and text.isprintable() else _IN_ONE_LINE.sub(_escape, text)


def some_lines(text: str) -> str:
    """Return a text of several lines, with other control characters as visible escapes."""
    return text if text.isascii() and text.isprintable() else _IN_LINES.sub(_escape, text)


def json_text(text: str) -> str:
    """Return an equivalent JSON document with control characters escaped."""
    return text if text.isascii() and text.isprintable() else _IN_LINES.sub(_json_escape, text)


def shortened(text: str, most: int) -> str:
    """Return the first `most` characters of a longer text, followed by its original length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters; a longer one ends in `...`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 task`, `2 tasks`, `2 retries`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
