"""The model calls of a search: a critique of rollouts, an edit by it, and a request to repair a text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.chat.bill import Bill
from agentlightning.chat.chat import Chat, ChatReply
from agentlightning.prompt_search.apo.prompt_files import messages_of
from agentlightning.prompt_search.candidates import gaps_shown
from agentlightning.prompt_search.cases import RolloutResult, choose_cases, hidden_secrets
from agentlightning.types import PromptTemplate


@dataclass
class Branch:
    """The state of the calls for one version."""

    rng: random.Random
    prefix: str = ""
    bill: Bill = field(default_factory=Bill)
    critique: str | None = None


present = ContextVar[Branch | None]("agentlightning_branch", default=None)
"""The branch whose version is being made in this task."""


@dataclass
class Critic:
    """Asks the models. Belongs to the algorithm's loop."""

    chat: Chat
    gradient_model: str | None
    apply_edit_model: str | None
    temperature: float | None
    gradient_files: Sequence[Path]
    edit_files: Sequence[Path]
    poml_trace: bool = False

    async def critique(
        self, template: PromptTemplate, results: Sequence[RolloutResult], most: int, branch: Branch
    ) -> tuple[Path, str]:
        """Return which file was drawn, and what the critic says of at most so many of the rollouts."""
        path = branch.rng.choice(list(self.gradient_files))
        shown = hidden_secrets(choose_cases(results, most, branch.rng))
        reply = await self._ask(
            path, {**_context(template), "experiments": shown}, self.gradient_model, "critique", branch
        )
        return path, reply.text.strip()

    async def edit(self, template: PromptTemplate, critique: str, branch: Branch) -> tuple[Path, str]:
        """Return which file was drawn, and the text of a new version."""
        path = branch.rng.choice(list(self.edit_files))
        context = {**_context(template), "critique": critique}
        reply = await self._ask(path, context, self.apply_edit_model, "edit", branch)
        return path, reply.text

    async def repair(self, text: str, problems: Sequence[str], seed: PromptTemplate, branch: Branch) -> str:
        """Return the text again, with its problems repaired if the editor can."""
        kept = ", ".join(gaps_shown(seed)) or "(there are none)"
        request = (
            "This text was to be a prompt template and cannot be used as one:\n\n"
            f"<template>\n{text}\n</template>\n\n" + "\n".join(f"- {problem}" for problem in problems) + "\n\n"
            f"Its placeholders must be exactly these, as they are written: {kept}\n"
            "Answer with the repaired template and nothing else."
        )
        asked = [{"role": "user", "content": request}]
        reply = await self.chat.ask(asked, model=self.apply_edit_model, purpose="repair", bill=branch.bill)
        return reply.text

    async def _ask(
        self, path: Path, context: Mapping[str, Any], model: str | None, purpose: str, branch: Branch
    ) -> ChatReply:
        messages = await asyncio.to_thread(messages_of, path, context, poml_trace=self.poml_trace)
        return await self.chat.ask(
            messages, model=model, temperature=self.temperature, purpose=purpose, bill=branch.bill
        )


def _context(template: PromptTemplate) -> dict[str, Any]:
    return {"prompt_template": template.template, "placeholders": gaps_shown(template)}
