"""Prompt templates of the engine `f-string`: named placeholders, without access from a value to other objects.

`str.format` walks attributes (`{x.__init__.__globals__}`) and fills any width (`{x:300000000}`). Whoever can publish a
template could read the agent's process with the former and crash it with the latter, so the gaps are filled here:

| in a gap                       | allowed                                                                             |
| ------------------------------ | ----------------------------------------------------------------------------------- |
| `{question}`                   | a name that `format` was given and that does not begin with an underscore           |
| `{task[question]}`, `{xs[0]}`  | an entry of a dict, list or tuple; of nothing else                                  |
| `{price:.2f}`, `{name:>20}`    | a format specification without gaps; at most `LONGEST_SPECIFICATION` and `WIDEST`   |
| `{name!r}`                     | `!r`, `!s` and `!a`                                                                 |
| `{task.question}`              | refused: give the value itself, `format(question=task.question)`                    |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import cast

MOST_CHARACTERS = 16 * 1024 * 1024
"""Length of a filled prompt."""
WIDEST = 1000
"""Largest width or precision."""
LONGEST_SPECIFICATION = 256
"""Characters of a format specification: a date's repeats its output for each `%`."""
_NUMBER = re.compile(r"\d+")
_CONVERSIONS = {"r": repr, "s": str, "a": ascii}
_SHOWN = 80


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return the template with its gaps filled.

    Raises:
        KeyError: the value of a gap was not given.
        ValueError: a gap needs more than is allowed, or the result is longer than `MOST_CHARACTERS`; names the gap.
    """
    parts: list[str] = []
    length = 0
    for part in _parts(template, values):
        parts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            raise ValueError(f"The filled prompt is longer than {MOST_CHARACTERS} characters; shorten what is given")
    return "".join(parts)


def _parts(template: str, values: Mapping[str, object]) -> Iterator[str]:
    for text, gap, spec, conversion in Formatter().parse(template):
        yield text
        if gap is None:
            continue
        place, spec = f"Gap {_shown(gap)} of the template", spec or ""
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
            raise ValueError(f"{place} has a gap in its format specification; write the width out")
        check_widths(spec, place)
        try:
            value_text = format(value, spec)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{place}: {error}") from error
        yield value_text


def _value(gap: str, values: Mapping[str, object]) -> object:
    """Return the value of a gap: a given value, or an entry of one at any depth."""
    name, bracket, rest = gap.partition("[")
    if "." in name or name.startswith("_") or not name or name.isdecimal():
        raise ValueError(
            f"Gap {_shown(gap)} of the template is not allowed: a gap is a name, such as {{question}}, without dots "
            "and without an underscore at its beginning. Give format() the value itself under a plain name."
        )
    if name not in values:
        missing = KeyError(name)
        missing.add_note(
            f"The template has the gap {_shown(gap)}; format() was given: {', '.join(values) or 'nothing'}"
        )
        raise missing
    value = values[name]
    while bracket:
        key, closing, rest = rest.partition("]")
        bracket, after = rest[:1], rest[1:]
        if not closing or bracket not in ("", "["):
            raise ValueError(f"Gap {_shown(gap)} of the template is not allowed: expected name[key] or name[key][key]")
        value = _entry(gap, value, key)
        rest = after
    return value


def _entry(gap: str, value: object, key: str) -> object:
    if isinstance(value, (list, tuple)) and key.isdecimal() and len(key) < 10:
        items = cast("tuple[object, ...]", value)
        if int(key) < len(items):
            return items[int(key)]
        raise KeyError(f"{key} (gap {_shown(gap)} of the template: the list has {len(items)} entries)")
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        if key in entries:
            return entries[key]
        if key.isdecimal() and len(key) < 10 and int(key) in entries:
            return entries[int(key)]
        raise KeyError(f"{key} (gap {_shown(gap)} of the template)")
    raise ValueError(
        f"Gap {_shown(gap)} of the template is not allowed: brackets take an entry of a dict or list; "
        f"this is a {type(cast('object', value)).__name__}"
    )


def check_widths(spec: str, where: str) -> None:
    """Check that no number in a format specification is larger than `WIDEST`.

    Raises:
        ValueError: one is; its text begins with `where`.
    """
    for number in _NUMBER.finditer(spec):
        digits = number[0].lstrip("0")
        if len(digits) > len(str(WIDEST)) or int(digits or "0") > WIDEST:
            raise ValueError(f"{where}: the width or precision {_shown(number[0])} is larger than {WIDEST}")


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
