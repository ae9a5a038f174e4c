"""Prompt templates of the engine `f-string`: named placeholders, without access from a value to other objects.

`str.format` reads attributes (`{x.__init__.__globals__}`) and pads to any width (`{x:300000000}`). The author of a
template could use the first to read the agent's process and the second to crash it, so this module fills templates:

| Placeholder                    | Allowed                                                                            |
| ------------------------------ | ----------------------------------------------------------------------------------- |
| `{question}`                   | a name that was passed to `format` and does not begin with an underscore            |
| `{task[question]}`, `{xs[0]}`  | an entry of a dict, list or tuple                                                   |
| `{price:.2f}`, `{name:>20}`    | a format without placeholders; limits: `LONGEST_SPECIFICATION` characters, `WIDEST` |
| `{name!r}`                     | `!r`, `!s` and `!a`                                                                 |
| `{task.question}`              | not allowed; pass the value itself: `format(question=task.question)`                |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import cast

MOST_CHARACTERS = 16 * 1024 * 1024
"""Largest length of a filled prompt."""
WIDEST = 1000
"""Largest width or precision."""
LONGEST_SPECIFICATION = 256
"""Largest length of a format specification. For a date, each `%` in it adds to the output."""
_NUMBER = re.compile(r"\d+")
_CONVERSIONS = {"r": repr, "s": str, "a": ascii}
_SHOWN = 80


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return the template with its placeholders filled.

    Raises:
        KeyError: the value of a placeholder is missing.
        ValueError: a placeholder is not allowed, or the result is longer than `MOST_CHARACTERS`.
    """
    parts: list[str] = []
    length = 0
    for part in _parts(template, values):
        parts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            raise ValueError(f"The filled prompt is longer than {MOST_CHARACTERS} characters; pass shorter values")
    return "".join(parts)


def _parts(template: str, values: Mapping[str, object]) -> Iterator[str]:
    for text, gap, spec, conversion in Formatter().parse(template):
        yield text
        if gap is None:
            continue
        place, spec = f"Placeholder {_shown(gap)} of the template", spec or ""
        value = _value(gap, values)
        if conversion is not None:
            if conversion not in _CONVERSIONS:
                raise ValueError(f"{place}: unknown conversion {_shown('!' + conversion)}")
            value = _CONVERSIONS[conversion](value)
        if len(spec) > LONGEST_SPECIFICATION:
            raise ValueError(
                f"{place} has a format specification of {len(spec)} characters; "
                f"at most {LONGEST_SPECIFICATION} are allowed"
            )
        if "{" in spec or "}" in spec:
            raise ValueError(f"{place} has a placeholder in its format specification; write the width as a number")
        check_widths(spec, place)
        try:
            value_text = format(value, spec)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{place}: {error}") from error
        yield value_text


def _value(gap: str, values: Mapping[str, object]) -> object:
    """Return the value of a placeholder: a given value, or an entry of it at any depth."""
    name, bracket, rest = gap.partition("[")
    if "." in name or name.startswith("_") or not name or name.isdecimal():
        raise ValueError(
            f"Placeholder {_shown(gap)} of the template is not allowed. A placeholder is a name such as {{question}}, "
            "without dots and without a leading underscore. Pass the value itself to format() under a plain name."
        )
    if name not in values:
        missing = KeyError(name)
        missing.add_note(
            f"The template has the placeholder {_shown(gap)}; format() got: {', '.join(values) or 'no values'}"
        )
        raise missing
    value = values[name]
    while bracket:
        key, closing, rest = rest.partition("]")
        bracket, after = rest[:1], rest[1:]
        if not closing or bracket not in ("", "["):
            place = f"Placeholder {_shown(gap)} of the template"
            raise ValueError(f"{place} is not allowed: expected name[key] or name[key][key]")
        value = _entry(gap, value, key)
        rest = after
    return value


def _entry(gap: str, value: object, key: str) -> object:
    if isinstance(value, (list, tuple)) and key.isdecimal() and len(key) < 10:
        items = cast("tuple[object, ...]", value)
        if int(key) < len(items):
            return items[int(key)]
        raise KeyError(f"{key} (placeholder {_shown(gap)} of the template: the list has {len(items)} entries)")
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        if key in entries:
            return entries[key]
        if key.isdecimal() and len(key) < 10 and int(key) in entries:
            return entries[int(key)]
        raise KeyError(f"{key} (placeholder {_shown(gap)} of the template)")
    raise ValueError(
        f"Placeholder {_shown(gap)} of the template is not allowed: brackets select an entry of a dict or list, "
        f"but this value is a {type(cast('object', value)).__name__}"
    )


def check_widths(spec: str, where: str) -> None:
    """Check that no number in a format specification is larger than `WIDEST`.

    Raises:
        ValueError: a number is too large; the message begins with `where`.
    """
    for number in _NUMBER.finditer(spec):
        digits = number[0].lstrip("0")
        if len(digits) > len(str(WIDEST)) or int(digits or "0") > WIDEST:
            raise ValueError(f"{where}: the width or precision {_shown(number[0])} is larger than {WIDEST}")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
