"""Check a prompt template written by a model against the seed: placeholders, code fences, braces.

A version must have the placeholders of the seed, in the seed's engine. A code fence around the text is removed, and
braces of the engine `f-string` that are not placeholders are escaped. One repair request lists all other problems.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import NamedTuple
from xml.etree import ElementTree

from agentlightning.types import PromptTemplate

_MOST_CHARACTERS = 32_000
"""Maximum length of a version in characters, or four times the seed's length if that is larger."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""Opening line of a code fence. The closing line has only its fence characters."""
_INTRODUCTION = 200
"""Maximum number of characters outside a fenced text that count as an introduction."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_POML_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w*)")


class CheckedText(NamedTuple):
    """The version that a text defines, or its problems."""

    template: PromptTemplate | None
    """The version; None if there are problems."""
    problems: tuple[str, ...] = ()
    """The problems, one sentence each."""


def check_version(text: str, seed: PromptTemplate) -> CheckedText:
    """Return the version of the seed in a model's text, or its problems."""
    text = _without_fence(text, seed.template)
    if not text.strip():
        return CheckedText(None, ("The text is empty.",))
    most = max(_MOST_CHARACTERS, 4 * len(seed.template))
    if len(text) > most:
        return CheckedText(None, (f"The text has {len(text)} characters; at most {most} are allowed.",))
    try:
        of_seed = placeholders(seed)
    except ValueError:  # a seed that its own engine cannot read is an error when the agent fills it
        return CheckedText(seed.model_copy(update={"template": text}))
    if seed.engine == "f-string":
        text = _with_escaped_braces(text, of_seed)
    version = seed.model_copy(update={"template": text})
    try:
        of_text = placeholders(version)
        if seed.engine == "poml" and _is_xml(seed.template) and not _is_xml(text):
            raise ValueError("it is not well-formed markup")
    except ValueError as error:
        return CheckedText(None, (f"The template cannot be read: {error}.",))

    def written(name: str) -> str:
        return _written(name, seed.engine)

    problems = [f"The placeholder {written(name)} is missing." for name in sorted(of_seed.keys() - of_text.keys())]
    problems += [f"There is no placeholder {written(name)}." for name in sorted(of_text.keys() - of_seed.keys())]
    for name in sorted(of_text.keys() & of_seed.keys()):
        if odd := sorted(of_text[name] - of_seed[name] - {name}):
            problems.append(f"The placeholder {written(name)} must not be written as {', '.join(map(written, odd))}.")
    return CheckedText(None, tuple(problems)) if problems else CheckedText(version)


def placeholders(template: PromptTemplate) -> dict[str, set[str]]:
    """Return the variables of a template, each with its expressions: `task` may have `task[question]`.

    Raises:
        ValueError: The template is malformed.
    """
    if template.engine == "f-string":
        names = dict[str, set[str]]()
        for _, expression, _, _ in Formatter().parse(template.template):
            if expression is not None:
                names.setdefault(re.split(r"[.\[]", expression, maxsplit=1)[0], set()).add(expression)
        return names
    if template.engine == "jinja":
        from jinja2 import Environment, TemplateSyntaxError, meta

        try:
            return {name: {name} for name in meta.find_undeclared_variables(Environment().parse(template.template))}
        except (TemplateSyntaxError, RecursionError) as error:
            raise ValueError(str(error)) from error
    return {name: {name} for name in _POML_NAME.findall(template.template)}


def written_placeholders(template: PromptTemplate) -> list[str]:
    """Return the placeholders of a template as they are written; none if it is malformed."""
    try:
        names = placeholders(template)
    except ValueError:
        return []
    return sorted(_written(each, template.engine) for expressions in names.values() for each in expressions)


def placeholder_list(template: PromptTemplate) -> str:
    """Return the placeholders of a template as text for a request."""
    return ", ".join(written_placeholders(template)) or "(there are none)"


def same_text(template: PromptTemplate) -> str:
    """Return a normalized text, the same for versions that differ only in white space."""
    return " ".join(template.template.split())


def _written(expression: str, engine: str) -> str:
    return f"{{{expression}}}" if engine == "f-string" else f"{{{{ {expression} }}}}"


def _without_fence(text: str, seed: str) -> str:
    """Return a text without an introduction and a code fence around it."""
    if next(_fences(seed.split("\n")), None):  # the seed has fences: only one around the whole text is removed
        lines = text.strip().split("\n")
        is_whole = len(lines) > 1 and (opening := _FENCE.fullmatch(lines[0])) and lines[-1].strip(" \t") == opening[1]
        return "\n".join(lines[1:-1]) if is_whole else text
    lines = text.split("\n")
    fences = list(itertools.islice(_fences(lines), 2))
    if len(fences) == 1:
        opens, closes = fences[0]
        if len(text) - len("\n".join(lines[opens : closes + 1])) <= _INTRODUCTION:
            return "\n".join(lines[opens + 1 : closes])
    return text


def _fences(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each closed code fence, in linear time."""
    last = {line.strip(" \t"): number for number, line in enumerate(lines)}
    opening: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        if opening is not None:
            if line.strip(" \t") == opening[1]:
                yield opening[0], number
                opening = None
        elif (match := _FENCE.fullmatch(line)) and last.get(match[1], -1) > number:
            opening = number, match[1]


def _with_escaped_braces(text: str, of_seed: Mapping[str, set[str]]) -> str:
    """Return an f-string template with doubled braces except in placeholders, such as for JSON and code.

    If a text already has doubled braces, they remain, and single ones are doubled. Otherwise every brace outside a
    placeholder is doubled. `{name}` with a name that is not in the seed remains, as it may be meant as a placeholder.
    """
    expressions = {*of_seed, *(each for own in of_seed.values() for each in own)}
    try:
        fields = [expression for _, expression, _, _ in Formatter().parse(text) if expression is not None]
    except ValueError:
        pass
    else:
        if all(_NAME.fullmatch(each) or each in expressions for each in fields):
            return text
    doubled = r"\{\{|\}\}|" if "{{" in text else ""
    with_format = rf"|(?:{'|'.join(map(re.escape, expressions))})(?:[:!][^{{}}\n]*)?" if expressions else ""
    unchanged = rf"{doubled}\{{(?:{_NAME.pattern}{with_format})\}}"
    return re.sub(rf"({unchanged})|[{{}}]", lambda brace: brace[1] or brace[0] * 2, text)


def _is_xml(text: str) -> bool:
    try:
        ElementTree.fromstring(f"<all>{text}</all>")
    except ElementTree.ParseError:
        return False
    return True
