"""Preparation of texts for storage: some texts cannot be stored or sent unchanged, and some contain keys.

UTF-8 cannot encode half of a surrogate pair, which results from `json.loads('"\\ud800"')`, a truncated emoji or invalid
output of a model. Such a half is replaced with U+FFFD, two matching halves with their character, and the span lists its
changed texts. Overlong texts are truncated.

Keys are recognised by their shape, anywhere in a text: keys of providers and of this package, signed tokens, private
keys. A match is replaced with `[hidden 1a2b3c4d]`, with the beginning of its SHA-256: equal keys stay equal, so that
the messages of one conversation still match. This is best effort: a password has no fixed shape. Each shape begins with
a literal text, and no pattern looks back: a text costs one search per shape.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from agentlightning.base.terminal import shortened

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (begin, re.compile(pattern))
    for begin, pattern in (
        ("sk-", r"sk-[A-Za-z0-9_-]{20,}+"),
        ("ghp_", r"ghp_[A-Za-z0-9]{30,}+"),
        ("gho_", r"gho_[A-Za-z0-9]{30,}+"),
        ("ghu_", r"ghu_[A-Za-z0-9]{30,}+"),
        ("ghs_", r"ghs_[A-Za-z0-9]{30,}+"),
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{30,}+"),
        ("glpat-", r"glpat-[A-Za-z0-9_-]{20,}+"),
        ("AKIA", r"AKIA[0-9A-Z]{16}+(?![0-9A-Za-z])"),
        ("ASIA", r"ASIA[0-9A-Z]{16}+(?![0-9A-Za-z])"),
        ("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,}+"),
        ("hf_", r"hf_[A-Za-z0-9]{30,}+"),
        ("AIza", r"AIza[0-9A-Za-z_-]{35}+"),
        ("eyJ", r"eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+"),
        ("agl-", r"agl-[A-Za-z0-9_-]{1,128}+\.[A-Za-z0-9_-]{1,128}+\.[0-9a-f]{32}+"),
    )
)
_SHORTEST = 15
"""Number of characters of the shortest key, which begins with `xox`."""
_RUN = re.compile(r"[A-Za-z0-9_-]++")
_BEGIN, _END = "-----BEGIN ", "-----END "
_BEGINNINGS = (_BEGIN, *(begin for begin, _ in _SHAPES))
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY")
_LINE_END, _READ = 64, 200
_FILE_ENDINGS = (".py", ".db", ".sqlite", ".sqlite3")
MOST_CHARACTERS = 8 * 1024 * 1024
"""Maximum length of a text on a span; a longer text is truncated, with a note of its original length."""


def mended(text: str) -> str:
    """Return a text that UTF-8 can encode; the same object if nothing changed."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def fitting(text: str) -> str:
    """Return a text that a span can hold: valid, and not longer than `MOST_CHARACTERS`."""
    if len(text) > MOST_CHARACTERS:
        text = shortened(text, MOST_CHARACTERS)
    return mended(text)


def fitting_attributes(attributes: Mapping[str, object]) -> tuple[dict[str, object], list[str]] | None:
    """Return attributes with fitting keys and texts, and the keys of changed ones; None if nothing changed."""
    changed: list[str] = []
    fitting_values: dict[str, object] = {}
    for key, value in attributes.items():
        name, fit = fitting(key), with_texts(value, fitting)
        if fit is not value or name is not key:
            changed.append(name)
        fitting_values[name] = fit
    return (fitting_values, changed) if changed else None


def with_texts(value: object, change: Callable[[str], str]) -> Any:
    """Return the value of an attribute with its texts changed; the same object if `change` returned each of them."""
    if isinstance(value, str):
        return change(value)
    items = cast("list[Any]", value) if isinstance(value, (list, tuple)) else []
    if items and isinstance(items[0], str):
        changed = [change(item) if isinstance(item, str) else item for item in items]
        if any(new is not old for new, old in zip(changed, items, strict=True)):
            return changed
    return cast(Any, value)


# --- keys that are known by their shape -------------------------------------------------------------------------------


def without_keys(text: str) -> str:
    """Return the text with all key-shaped parts masked; the same object if it has none."""
    if len(text) < _SHORTEST:
        return text
    places: list[tuple[int, int]] = []
    for begin, shape in _SHAPES:
        at = text.find(begin)
        while at >= 0:
            end = at + len(begin)
            if at == 0 or not text[at - 1].isalnum():
                key = shape.match(text, at)
                if key is not None:
                    end = key.end()
                    if any(character.isdigit() for character in key[0][:_READ]):  # words joined by hyphens have none
                        places.append(key.span())
                elif begin == "eyJ" and (run := _RUN.match(text, at)) is not None:
                    end = run.end()  # not looked at again from within
            at = text.find(begin, end)
    if _BEGIN in text:
        _find_private_keys(text, places)
    if not places:
        return text
    parts: list[str] = []
    done = 0
    for at, end in sorted(places):
        if at >= done:
            digest = hashlib.sha256(text[at:end].encode("utf-8", "replace")).hexdigest()[:8]
            parts += (text[done:at], f"[hidden {digest}]")
            done = end
    return "".join((*parts, text[done:]))


def attributes_without_keys(attributes: Mapping[str, object]) -> tuple[dict[str, object], list[str]] | None:
    """Return attributes without key-shaped parts, and the names of the changed attributes; None if nothing changed."""
    together = "\n".join(_texts_in(attributes.values()))
    for begin in _BEGINNINGS:
        if begin in together:
            break
    else:
        return None  # as nearly always: one search in all texts is a fifth of the time of one in each
    cleaned = {name: with_texts(value, without_keys) for name, value in attributes.items()}
    changed = {name: value for name, value in cleaned.items() if value is not attributes[name]}
    return ({**attributes, **changed}, list(changed)) if changed else None


def _texts_in(values: Iterable[object]) -> Iterator[str]:
    """Yield the texts that `with_texts` would change."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            yield from (item for item in cast("list[object]", value) if isinstance(item, str))


def _find_private_keys(text: str, places: list[tuple[int, int]]) -> None:
    at = text.find(_BEGIN)
    while at >= 0:
        after = at + len(_BEGIN)
        if _PRIVATE.match(text, at):
            closing = text.find(_END, after)
            if closing < 0:
                places.append((at, len(text)))
                return
            line = text.find("-----", closing + len(_END), closing + _LINE_END)
            after = line + len("-----") if line >= 0 else closing + len(_END)
            places.append((at, after))
        at = text.find(_BEGIN, after)


def is_file_name(text: str) -> bool:
    """Return whether a string names a file, not an importable object such as `package.module.Name`."""
    return "/" in text or "\\" in text or text.lower().endswith(_FILE_ENDINGS) or os.path.isfile(text)


def without_password(address: str) -> str:
    """Return an address for display, without its password. A web address also loses its user, which may be a token."""
    address = re.sub(r"(https?://)[^:/@]+:?@", r"\1***@", address, flags=re.IGNORECASE)
    return re.sub(r"://([^:/@]*):.*@", r"://\1:***@", address)
