"""Prompts of critic and editor out of files: plain text, jinja, or POML, by the file's ending.

| ending | how it is read |
| --- | --- |
| `.jinja`, `.j2` | a bounded jinja sandbox; a line `=== system ===` or `=== user ===` begins a message of that role |
| `.poml` | by the package `poml`, which is loaded for it |
| any other | plain text: the instruction; template, rollouts and critique are put below it |

What is filled in: `prompt_template` (text), `placeholders` (list of texts), and `experiments` (list of `RolloutResult`)
for a critique, `critique` (text) for an edit. Roles are read before anything is filled in, so that no text of an agent
can begin a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from agentlightning.errors import BadRequestError
from agentlightning.types.templates.jinja import render

_OWN = Path(__file__).parent / "prompts"
GRADIENT_FILES = tuple(_OWN / f"critique_{name}.jinja" for name in ("short", "diagnostic", "checklist"))
APPLY_EDIT_FILES = tuple(_OWN / f"edit_{name}.jinja" for name in ("free", "conservative"))
_ROLE = re.compile(r"^=== (system|user|assistant) ===[ \t]*\n", re.MULTILINE)
_JINJA = (".jinja", ".j2", ".jinja2")
_TRACES = "pomltrace"

Message = dict[str, Any]


def check_files(setting: str, files: Sequence[str | Path] | None, own: tuple[Path, ...]) -> list[Path]:
    """Return the files of a setting; ours for None.

    Raises:
        BadRequestError: there is none, one cannot be read, or is POML without the package `poml`; names it.
    """
    if files is None:
        return list(own)
    if isinstance(files, (str, Path)) or not files:
        raise BadRequestError(f"{setting} must be a list of paths, or None for the files of ours; got {files!r}")
    for path in map(Path, files):
        try:
            path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise BadRequestError(f"{setting}: {str(path)!r} cannot be read as text: {error}") from error
        if path.suffix == ".poml":
            _poml()
    return list(map(Path, files))


def messages_of(path: Path, context: Mapping[str, Any], *, poml_trace: bool = False) -> list[Message]:
    """Return the messages that a file asks with.

    Raises:
        BadRequestError: the file cannot be filled in; names it and what is wrong.
    """
    try:
        if path.suffix == ".poml":
            return _from_poml(path, context, poml_trace)
        text = path.read_text(encoding="utf-8")
        if path.suffix not in _JINJA:
            return [{"role": "user", "content": _below(text, context)}]
        before, *parts = _ROLE.split(text)
        if not parts:
            return [{"role": "user", "content": render(text, context)}]
        shared = re.sub(r"\{#.*?#\}", "", before, flags=re.DOTALL).strip()
        if shared:
            raise ValueError("there is text above the first line that names a role")
        roles = zip(parts[::2], parts[1::2], strict=True)
        return [{"role": role, "content": render(content, context).strip()} for role, content in roles]
    except Exception as error:  # boundary: files of the user's, in two languages with errors of their own
        raise BadRequestError(f"The prompt file {str(path)!r} cannot be filled in: {error}") from error


def _below(text: str, context: Mapping[str, Any]) -> str:
    """Return a plain instruction with everything that it is about below it."""
    parts = [text.strip(), f"<template>\n{context['prompt_template']}\n</template>"]
    for number, experiment in enumerate(context.get("experiments", ()), 1):
        shown = {key: experiment[key] for key in ("task", "status", "final_reward", "failure", "messages")}
        parts.append(f'<rollout number="{number}">\n{json.dumps(shown, indent=1, ensure_ascii=False)}\n</rollout>')
    if "critique" in context:
        parts.append(f"<critique>\n{context['critique']}\n</critique>")
        kept = ", ".join(context["placeholders"]) or "(there are none)"
        parts.append(f"Keep these placeholders: {kept}\nAnswer with the new template and nothing else.")
    return "\n\n".join(parts)


@cache
def _poml() -> Any:
    try:
        import poml  # pyright: ignore[reportMissingImports] -- not needed for our own files
    except ImportError as error:
        text = "A prompt file of the kind .poml needs the package 'poml', which is not installed: pip install poml"
        raise BadRequestError(text) from error
    return cast(Any, poml)


def _from_poml(path: Path, context: Mapping[str, Any], trace: bool) -> list[Message]:
    poml = _poml()
    if trace:
        poml.set_trace(True, trace_dir=_TRACES)
    made = cast("dict[str, list[Message]]", poml.poml(path, context=dict(context), format="openai_chat"))
    return made["messages"]
