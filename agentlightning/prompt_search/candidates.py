"""Check of the text that a model wrote for a prompt template: its gaps, fences and braces, against the seed's.

A version fills the same gaps as the seed, in the seed's engine. Repaired without guessing are a code fence around the
text, and braces of the engine `f-string` that are no gap. The rest is a problem, in words that an editor understands,
for one request to repair it.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import NamedTuple
from xml.etree import ElementTree

from agentlightning.types import PromptTemplate

_MOST_CHARACTERS = 32_000
"""Length of a version, or four times the seed's if that is more."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`]*")
"""The line that opens a code fence; the one that closes it has its marks and nothing else."""
_AROUND = 200
"""Characters beside a fenced text that are taken for an introduction to it."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_POML_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w*)")
_SHOWN: Mapping[str, Callable[[str], str]] = {
    "f-string": lambda name: f"{{{name}}}",
    "jinja": lambda name: f"{{{{ {name} }}}}",
    "poml": lambda name: f"{{{{ {name} }}}}",
}


class CheckedText(NamedTuple):
    """A text that was to become a version."""

    template: PromptTemplate | None
    """None if there are problems."""
    problems: tuple[str, ...] = ()
    """One sentence each."""


def check_version(text: str, seed: PromptTemplate) -> CheckedText:
    """Return the version of the seed that a model's text is, or its problems."""
    text = _without_fence(text, seed.template)
    if not text.strip():
        return CheckedText(None, ("The text is empty.",))
    most = max(_MOST_CHARACTERS, 4 * len(seed.template))
    if len(text) > most:
        return CheckedText(None, (f"The text has {len(text)} characters; at most {most} are allowed.",))
    try:
        wanted = placeholders(seed)
    except ValueError:  # a seed that its own engine cannot read is the user's to see, when the agent fills it
        return CheckedText(seed.model_copy(update={"template": text}))
    if seed.engine == "f-string":
        text = _with_escaped_braces(text, wanted)
    version = seed.model_copy(update={"template": text})
    try:
        gaps = placeholders(version)
        if seed.engine == "poml" and _is_xml(seed.template) and not _is_xml(text):
            raise ValueError("it is no well-formed markup")
    except ValueError as error:
        return CheckedText(None, (f"The template cannot be read: {error}.",))
    shown = _SHOWN[seed.engine]
    problems = [f"The placeholder {shown(name)} is missing." for name in sorted(wanted.keys() - gaps.keys())]
    problems += [f"There is no placeholder {shown(name)}." for name in sorted(gaps.keys() - wanted.keys())]
    for name in sorted(gaps.keys() & wanted.keys()):
        if odd := sorted(gaps[name] - wanted[name] - {name}):
            problems.append(f"The placeholder {shown(name)} must not be written as {', '.join(map(shown, odd))}.")
    return CheckedText(None, tuple(problems)) if problems else CheckedText(version)


def gaps_shown(template: PromptTemplate) -> list[str]:
    """Return the gaps of a template as they are written in it; none if it is malformed."""
    try:
        gaps = placeholders(template)
    except ValueError:
        return []
    return sorted(_SHOWN[template.engine](gap) for same in gaps.values() for gap in same)


def gaps_text(gaps: Sequence[str]) -> str:
    """Return gaps for a sentence of a request."""
    return ", ".join(gaps) or "(there are none)"


def same_text(template: PromptTemplate) -> str:
    """Return what two versions have in common that differ in white space alone."""
    return " ".join(template.template.split())


def placeholders(template: PromptTemplate) -> dict[str, set[str]]:
    """Return the names that a template is filled with, each with the gaps of it: `task` may be `task[question]`.

    Raises:
        ValueError: the template is malformed.
    """
    if template.engine == "f-string":
        gaps = dict[str, set[str]]()
        for _, gap, _, _ in Formatter().parse(template.template):
            if gap is not None:
                gaps.setdefault(re.split(r"[.\[]", gap, maxsplit=1)[0], set()).add(gap)
        return gaps
    if template.engine == "jinja":
        from jinja2 import Environment, TemplateSyntaxError, meta

        try:
            names = meta.find_undeclared_variables(Environment().parse(template.template))
        except (TemplateSyntaxError, RecursionError) as error:
            raise ValueError(str(error)) from error
    else:
        names = _POML_NAME.findall(template.template)
    return {name: {name} for name in names}


def _without_fence(text: str, seed: str) -> str:
    """Return a text without the code fence in which a model gave it, and without the introduction before that."""
    if next(_fences(seed.split("\n")), None):  # it has fences of its own: only one around all of it is none of them
        lines = text.strip().split("\n")
        is_whole = len(lines) > 1 and (opening := _FENCE.fullmatch(lines[0])) and lines[-1].strip(" \t") == opening[1]
        return "\n".join(lines[1:-1]) if is_whole else text
    lines = text.split("\n")
    fences = list(itertools.islice(_fences(lines), 2))
    if len(fences) == 1:
        opens, closes = fences[0]
        if len(text) - len("\n".join(lines[opens : closes + 1])) <= _AROUND:
            return "\n".join(lines[opens + 1 : closes])
    return text


def _fences(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each code fence, in time that grows with the text and no faster."""
    closing: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        closing.setdefault(line.strip(" \t"), []).append(number)
    after = 0
    for number, line in enumerate(lines):
        if number < after or (opening := _FENCE.fullmatch(line)) is None:
            continue
        ends = closing.get(opening[1], [])
        if (place := bisect.bisect_right(ends, number)) < len(ends):
            yield number, ends[place]
            after = ends[place] + 1


def _with_escaped_braces(text: str, wanted: Mapping[str, set[str]]) -> str:
    """Return an f-string template whose braces are gaps or doubled: those of JSON and code are doubled.

    Where a text has doubled ones already, those stay, and single ones are doubled; else every brace that is no gap is.
    `{name}` of a name that the seed does not have stays as it is: it may be meant as a gap.
    """
    own = {*wanted, *(gap for gaps in wanted.values() for gap in gaps)}
    try:
        gaps = [gap for _, gap, _, _ in Formatter().parse(text) if gap is not None]
    except ValueError:
        pass
    else:
        if all(_NAME.fullmatch(gap) or gap in own for gap in gaps):
            return text
    doubled = r"\{\{|\}\}|" if "{{" in text else ""
    of_seed = rf"|(?:{'|'.join(map(re.escape, own))})(?:[:!][^{{}}\n]*)?" if own else ""
    kept = rf"{doubled}\{{(?:{_NAME.pattern}{of_seed})\}}"
    return re.sub(rf"({kept})|[{{}}]", lambda brace: brace[1] or brace[0] * 2, text)


def _is_xml(text: str) -> bool:
    try:
        ElementTree.fromstring(f"<all>{text}</all>")
    except ElementTree.ParseError:
        return False
    return True
