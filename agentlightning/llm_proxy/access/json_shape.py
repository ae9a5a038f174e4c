"""Bounds on what a JSON text holds, checked before it is decoded: seven megabytes of `{}` are 700 MB of objects.

The count is exact for JSON and is taken from slices of the text, so that a thread that counts lets others run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from agentlightning.llm_proxy.access.limits import DEEPEST_JSON, JsonBounds

_SLICE = 1 << 18
_VALUE, _CONTAINER, _TEXT = 40, 100, 60
"""Bytes of a value: of a number in a list, and what an object or list, or a text, takes more."""
_SMALL = 4096
"""A text of fewer bytes is within every bound."""


class TooMuchJsonError(ValueError):
    """A JSON text holds more than its bounds allow."""


def check_size(raw: bytes, bounds: JsonBounds) -> None:
    """Let a JSON text pass that holds no more than its bounds allow.

    Raises:
        TooMuchJsonError: it holds more; says what and how many are allowed.
    """
    if len(raw) < _SMALL or _surely_small(raw, bounds):
        return
    counted = _Count()
    for _ in counted.slices(raw):
        for holds, bound, what in (
            (counted.containers, bounds.containers, "objects and lists"),
            (counted.keys, bounds.keys, "keys"),
            (counted.values, bounds.values, "values"),
            (counted.texts, bounds.texts, "keys and texts"),
        ):
            if holds > bound:
                raise TooMuchJsonError(f"it holds more than {bound} {what}")


def expanded_bytes(raw: bytes) -> int:
    """Return about how many bytes the value of a JSON text takes beside its texts' own letters."""
    counted = _Count()
    for _ in counted.slices(raw):
        pass
    return counted.values * _VALUE + counted.containers * _CONTAINER + counted.texts * _TEXT


class _Count:
    """Counts what stands outside of strings."""

    def __init__(self) -> None:
        self.values = self.containers = self.keys = self.texts = 0

    def slices(self, raw: bytes) -> Iterator[None]:
        """Count slice by slice; yields after each."""
        begin = quotes = 0
        while begin < len(raw):
            part = raw[begin : begin + _SLICE]
            backslashes = len(part) - len(part.rstrip(b"\\"))
            part = raw[begin : begin + len(part) + backslashes % 2]  # none ends between a backslash and what it escapes
            begin += len(part)
            pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            outside = b" ".join(pieces[quotes % 2 :: 2])
            quotes += len(pieces) - 1
            opened = outside.count(b"{") + outside.count(b"[")
            self.containers += opened
            self.values += opened + outside.count(b",")
            self.keys += outside.count(b":")
            self.texts = quotes // 2
            yield


def check_depth(value: object) -> None:
    """Let a value pass whose containers do not lie deeper in each other than is allowed.

    Raises:
        TooMuchJsonError: they do.
    """
    level = [value]
    for _ in range(DEEPEST_JSON + 2):
        level = [inner for outer in level for inner in _containers(outer)]
        if not level:
            return
    raise TooMuchJsonError(f"its objects and lists lie more than {DEEPEST_JSON} deep in each other")


def _surely_small(raw: bytes, bounds: JsonBounds) -> bool:
    """True if even with what stands in its strings the text is within the bounds, as most are."""
    opened = raw.count(b"{") + raw.count(b"[")
    return (
        opened <= bounds.containers
        and opened + raw.count(b",") <= bounds.values
        and raw.count(b":") <= bounds.keys
        and raw.count(b'"') <= 2 * bounds.texts
    )


def _containers(value: Any) -> list[Any]:
    entries = (
        (cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value))
        if isinstance(value, (dict, list))
        else ()
    )
    return [entry for entry in entries if isinstance(entry, (dict, list))]
