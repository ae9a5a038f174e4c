"""Shared by the parts of a search: its settings, the override points of the algorithm, and how its log lines begin."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.scores import MissingPolicy
from agentlightning.types import RolloutMode


def prefix_of(
    round: int | None = None, beam: int | None = None, branch: int | None = None, version: str | None = None
) -> str:
    """Return the beginning of a log line, such as `[Round 01 | Beam 02 | Branch 01 | Prompt v3]`."""
    numbers = (("Round", round), ("Beam", beam), ("Branch", branch))
    parts = [f"{name} {number:02d}" for name, number in numbers if number is not None]
    return f"[{' | '.join([*parts, *([f'Prompt {version}'] if version else [])])}]"


class Steps(Protocol):
    """The override points of the algorithm, as the search calls them."""

    async def evaluate_prompt_on_batch(
        self,
        prompt: PromptVersion,
        resource_name: str,
        dataset: Sequence[Any],
        mode: RolloutMode,
        *,
        prefix: str | None = None,
    ) -> tuple[Sequence[RolloutResult], float | None]: ...

    async def textual_gradient_and_apply_edit(
        self, prompt: PromptVersion, results: Sequence[RolloutResult], *, prefix: str | None = None
    ) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The settings of a search; see `APO`."""

    gradient_batch_size: int
    val_batch_size: int
    beam_width: int
    branch_factor: int
    beam_rounds: int
    run_initial_validation: bool
    missing: MissingPolicy
    minimum_coverage: float
    halving: bool
    final_candidates: int
    seed: int


async def all_of(works: Sequence[Any]) -> list[Any]:
    """Return what the works give, in order; the first error cancels the others and waits for them."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        raise


def score_text(score: float | None) -> str:
    """Return a score for a log line."""
    return "-" if score is None or score == -math.inf else f"{score:.3f}"
