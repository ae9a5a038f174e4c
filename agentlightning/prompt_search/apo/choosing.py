"""Choice: the candidates of a round on validation tasks, by successive halving (arXiv:1502.07943, figure 1)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.prompt_search.apo.steps import SearchSettings, Steps, all_of, prefix_of, score_text
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.playing import PromptPlayer
from agentlightning.prompt_search.scores import NoCandidateError, score_of

logger = logging.getLogger("agentlightning.algorithm.apo")

_RUNGS: Final = (0.25, 0.5, 1.0)
"""Parts of a validation batch after which the worse half of the candidates is left out."""
_FEWEST: Final = 4
"""Tasks of the first part."""


@dataclass(frozen=True)
class Chooser:
    """Judges versions and chooses among them. Belongs to the algorithm's loop."""

    steps: Steps
    settings: SearchSettings
    player: PromptPlayer

    async def choose(
        self, number: int, candidates: Sequence[PromptVersion], tasks: Sequence[Any]
    ) -> list[PromptVersion]:
        """Return the new beam, the best first: each candidate on parts of the batch, the worse half left out each time.

        Raises:
            NoCandidateError: no version has enough scored rollouts, and none ever had.
        """
        settings, left = self.settings, list(candidates)
        ends = sorted({max(min(_FEWEST, len(tasks)), math.ceil(len(tasks) * part)) for part in _RUNGS})
        ends = ends if settings.halving and len(left) > settings.beam_width else [len(tasks)]
        ranked, failures = list[tuple[float, PromptVersion]](), list[str]()
        for end in ends:
            judged = await all_of([self.judge(number, version, tasks[:end]) for version in left])
            failures += [why for _, _, results in judged for r in results if (why := r["failure"])]
            ranked = [(mean, version) for version, mean, _ in judged if mean is not None]
            ranked.sort(key=lambda each: (-each[0], each[1].failures / max(1, each[1].tasks), each[1].number))
            if end < len(tasks):
                ranked = self._better_half(ranked)
                left = [version for _, version in ranked]
        beam = [version for _, version in ranked[: settings.beam_width]]
        for version in candidates:
            version.state = "kept" if version in beam else "dropped"
        logger.info(
            "%s candidates: %s", prefix_of(number), ", ".join(f"{v.version}:{score_text(v.score)}" for v in candidates)
        )
        logger.info("%s top: %s", prefix_of(number), ", ".join(f"{v.version}:{mean:.3f}" for mean, v in ranked))
        if not beam:
            first = f"; the first failure: {failures[0]}" if failures else ""
            raise NoCandidateError(
                f"No beam candidates any more: of {len(candidates)} versions none earned something on at least "
                f"{settings.minimum_coverage:.0%} of {len(tasks)} validation tasks{first}"
            )
        return beam

    def _better_half(self, ranked: list[tuple[float, PromptVersion]]) -> list[tuple[float, PromptVersion]]:
        """Return the better half, at least as many as the beam holds, and those that equal the last of them."""
        count = max(self.settings.beam_width, math.ceil(len(ranked) / 2))
        return [each for place, each in enumerate(ranked) if place < count or each[0] == ranked[count - 1][0]]

    async def judge(
        self, number: int, version: PromptVersion, tasks: Sequence[Any]
    ) -> tuple[PromptVersion, float | None, Sequence[RolloutResult]]:
        """Return a version with its mean on tasks, None where too few of them earned anything."""
        settings, prefix = self.settings, prefix_of(number, version=version.version)
        results, mean = await self.steps.evaluate_prompt_on_batch(version, version.target, tasks, "val", prefix=prefix)
        here = score_of(results, settings.missing)
        version.judged(score_of(self.player.known(version.templates, "val") or results, settings.missing))
        enough = here.scored > 0 and here.coverage >= settings.minimum_coverage
        if not enough:
            logger.warning("%s only %d of %d tasks earned something", prefix, here.scored, here.tasks)
        return version, mean if enough else None, results
