"""The model calls of APO: critique of rollouts, edit based on it, and repair of a text, with prompts from files.

| File extension | Format |
| --- | --- |
| `.jinja`, `.j2` | a limited jinja sandbox; a line `=== system ===` or `=== user ===` starts a message of that role |
| `.poml` | rendered by the package `poml` |
| any other | plain text with the instruction; template, rollouts and critique are appended |

A rollout is shown with its messages, or with its spans if no model call was recorded.

The variables are `prompt_template` (text), `placeholders` (list of texts), and `experiments` (list of `RolloutResult`)
for a critique, `critique` (text) for an edit. Roles are read before the variables are filled in, so text of an agent
cannot start a message.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from agentlightning.chat.bill import Bill
from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.prompt_search.candidates import placeholder_list, written_placeholders
from agentlightning.prompt_search.results import RolloutResult
from agentlightning.types import PromptTemplate
from agentlightning.types.templates.jinja import render
from agentlightning.utils.masking import masked

_OWN = Path(__file__).parent / "prompts"
GRADIENT_FILES = tuple(_OWN / f"critique_{name}.jinja" for name in ("short", "diagnostic", "checklist"))
APPLY_EDIT_FILES = tuple(_OWN / f"edit_{name}.jinja" for name in ("free", "conservative"))
_ROLE = re.compile(r"^=== (system|user|assistant) ===[ \t]*\n", re.MULTILINE)

Message = dict[str, Any]


@dataclass
class Branch:
    """The state of the model calls for one version."""

    rng: random.Random
    prefix: str = ""
    bill: Bill = field(default_factory=Bill)
    critique: str | None = None


current_branch = ContextVar[Branch | None]("agentlightning_branch", default=None)
"""Branch of the version that the current asyncio task creates."""


@dataclass
class Critic:
    """Caller of the models, used only in the algorithm's event loop."""

    chat: Chat
    gradient_model: str
    apply_edit_model: str
    temperature: float | None
    gradient_files: Sequence[Path]
    edit_files: Sequence[Path]

    async def critique(
        self, template: PromptTemplate, results: Sequence[RolloutResult], most: int, branch: Branch
    ) -> tuple[Path, str]:
        """Return the selected prompt file, and the critique of at most `most` rollouts. Secrets are hidden."""
        path = branch.rng.choice(list(self.gradient_files))
        shown = masked(choose_cases(results, most, branch.rng))
        text = await self._ask(path, template, {"experiments": shown}, self.gradient_model, "critique", branch)
        return path, text.strip()

    async def edit(self, template: PromptTemplate, critique: str, branch: Branch) -> tuple[Path, str]:
        """Return the selected prompt file, and the text of a new version."""
        path = branch.rng.choice(list(self.edit_files))
        return path, await self._ask(path, template, {"critique": critique}, self.apply_edit_model, "edit", branch)

    async def repair(self, text: str, problems: Sequence[str], seed: PromptTemplate, branch: Branch) -> str:
        """Return the text after one attempt of the editor to repair its problems."""
        request = (
            "This text was to be a prompt template and cannot be used as one:\n\n"
            f"<template>\n{text}\n</template>\n\n" + "\n".join(f"- {problem}" for problem in problems) + "\n\n"
            f"Its placeholders must be exactly these, as they are written: {placeholder_list(seed)}\n"
            "Answer with the repaired template and nothing else."
        )
        reply = await self.chat.ask(request, model=self.apply_edit_model, purpose="repair", bill=branch.bill)
        return reply.text

    async def _ask(
        self, path: Path, template: PromptTemplate, more: Mapping[str, Any], model: str, purpose: str, branch: Branch
    ) -> str:
        context = {"prompt_template": template.template, "placeholders": written_placeholders(template), **more}
        messages = await asyncio.to_thread(messages_of, path, context)
        reply = await self.chat.ask(
            messages, model=model, temperature=self.temperature, purpose=purpose, bill=branch.bill
        )
        return reply.text


def choose_cases(results: Sequence[RolloutResult], count: int, rng: random.Random) -> list[RolloutResult]:
    """Return at most `count` results for a critic, worst first: half of them the worst, the others the best.

    Ties are broken at random. Rollouts without a reward are included if too few have one. One of them is always
    included if `count` is at least three, because the prompt may have caused the failure.
    """
    drawn = list(results)
    rng.shuffle(drawn)
    failed = [result for result in drawn if result["final_reward"] is None]
    scored = sorted((r for r in drawn if r["final_reward"] is not None), key=lambda r: r["final_reward"] or 0.0)
    places = min(len(failed), max(count - len(scored), int(count >= 3)))
    remaining = min(count - places, len(scored))
    return [*failed[:places], *scored[: (remaining + 1) // 2], *scored[len(scored) - remaining // 2 :]]


def check_files(setting: str, files: Sequence[str | Path] | None, own: Sequence[Path]) -> list[Path]:
    """Return the files of a setting, or the built-in files for None.

    Raises:
        BadRequestError: A file is missing, cannot be read, or is POML and the package `poml` is not installed.
    """
    if files is None:
        return list(own)
    if isinstance(files, (str, Path)) or not files:
        raise BadRequestError(f"{setting} must be a list of paths, or None for the built-in files; got {files!r}")
    for path in map(Path, files):
        try:
            path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise BadRequestError(f"{setting}: {str(path)!r} cannot be read as text: {error}") from error
        if path.suffix == ".poml":
            _poml()
    return list(map(Path, files))


def messages_of(path: Path, context: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a prompt file.

    Raises:
        BadRequestError: The file cannot be rendered. The message has its name and the error.
    """
    try:
        if path.suffix == ".poml":
            return cast("list[Message]", _poml().poml(path, context=dict(context), format="openai_chat")["messages"])
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".jinja", ".j2", ".jinja2"):
            return [{"role": "user", "content": _below(text, context)}]
        before, *parts = _ROLE.split(text)
        if not parts:
            return [{"role": "user", "content": render(text, context)}]
        if re.sub(r"\{#.*?#\}", "", before, flags=re.DOTALL).strip():
            raise ValueError("the file has text above the first line with a role")
        roles = zip(parts[::2], parts[1::2], strict=True)
        return [{"role": role, "content": render(content, context).strip()} for role, content in roles]
    except Exception as error:  # boundary: files of the user, in two languages with their own errors
        raise BadRequestError(f"The prompt file {str(path)!r} cannot be rendered: {error}") from error


def _below(text: str, context: Mapping[str, Any]) -> str:
    """Return a plain instruction with template, rollouts and critique appended."""
    parts = [text.strip(), f"<template>\n{context['prompt_template']}\n</template>"]
    for number, experiment in enumerate(context.get("experiments", ()), 1):
        trace = "messages" if experiment["messages"] else "spans"
        shown = {key: experiment[key] for key in ("task", "status", "final_reward", "failure", trace)}
        parts.append(f'<rollout number="{number}">\n{json.dumps(shown, indent=1, ensure_ascii=False)}\n</rollout>')
    if "critique" in context:
        parts.append(f"<critique>\n{context['critique']}\n</critique>")
        placeholders = ", ".join(context["placeholders"]) or "(there are none)"
        parts.append(f"Keep these placeholders: {placeholders}\nAnswer with the new template and nothing else.")
    return "\n\n".join(parts)


@cache
def _poml() -> Any:
    try:
        import poml  # pyright: ignore[reportMissingImports] -- not needed for our own files
    except ImportError as error:
        text = "A .poml prompt file requires the package 'poml'. Install it with: pip install poml"
        raise BadRequestError(text) from error
    return cast(Any, poml)
