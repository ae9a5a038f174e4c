"""Texts that no store, wire or file could hold as they are: halves of surrogate pairs, and texts without end.

UTF-8 has no form for half a pair, which `json.loads('"\\ud800"')`, a cut emoji or a model's broken output gives. Such a
half becomes U+FFFD, two that belong together become the character that they mean, and the span says which of its texts
were changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from agentlightning.terminal import shortened

MOST_CHARACTERS = 8 * 1024 * 1024
"""Length of a text on a span; the rest is left out, and the text says how long it was."""


def mended(text: str) -> str:
    """Return a text that UTF-8 can hold; the same object if it was one."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def fitting(text: str) -> str:
    """Return a text that a span can hold: mended, and not longer than `MOST_CHARACTERS`."""
    if len(text) > MOST_CHARACTERS:
        text = shortened(text, MOST_CHARACTERS)
    return mended(text)


def fitting_attributes(attributes: Mapping[str, object]) -> tuple[dict[str, object], list[str]] | None:
    """Return attributes with fitting keys and texts, and the keys where something changed; None if nothing did."""
    changed: list[str] = []
    kept: dict[str, object] = {}
    for key, value in attributes.items():
        name, fit = fitting(key), with_texts(value, fitting)
        if fit is not value or name is not key:
            changed.append(name)
        kept[name] = fit
    return (kept, changed) if changed else None


def with_texts(value: object, change: Callable[[str], str]) -> Any:
    """Return the value of an attribute with its texts changed; the same object if `change` gave back each of them."""
    if isinstance(value, str):
        return change(value)
    items = cast("list[Any]", value) if isinstance(value, (list, tuple)) else []
    if items and isinstance(items[0], str):
        changed = [change(item) if isinstance(item, str) else item for item in items]
        if any(new is not old for new, old in zip(changed, items, strict=True)):
            return changed
    return cast(Any, value)
