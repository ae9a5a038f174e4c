"""The best so far: which version leads, and what it is worth on the whole validation set."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithm.apo.choosing import Chooser
from agentlightning.algorithm.apo.steps import prefix_of, score_text
from agentlightning.algorithm.prompts.cases import RolloutResult
from agentlightning.algorithm.prompts.history import PromptVersion
from agentlightning.algorithm.prompts.scores import NoCandidateError, sign_test
from agentlightning.algorithm.runs.compare import tasks_of
from agentlightning.algorithm.runs.log import RunLog

logger = logging.getLogger("agentlightning.algorithm.apo")


@dataclass
class Leaders:
    """Plays leaders on the whole validation set and keeps the best. Belongs to the algorithm's loop."""

    chooser: Chooser
    log: RunLog
    seed: PromptVersion
    val: Sequence[Any]
    best: PromptVersion = field(init=False)
    best_score: float = field(default=-math.inf, init=False)
    p_value: float | None = field(default=None, init=False)
    """Of the best against the seed; None if they were not compared."""
    whole: dict[str, list[RolloutResult]] = field(default_factory=dict[str, list[RolloutResult]], init=False)
    """Results on the whole validation set, by version."""

    def __post_init__(self) -> None:
        self.best = self.seed

    async def lead(self, number: int, beam: Sequence[PromptVersion]) -> None:
        """Play a new leader on the whole validation set; it replaces the best if it is strictly better."""
        leader = leader_of(beam)
        leaders = (
            [leader, beam[0]] if number == self.chooser.settings.beam_rounds and leader is not beam[0] else [leader]
        )
        for version in leaders:
            if version.version in self.whole:
                logger.info("%s leads and was validated already", prefix_of(number, version=version.version))
                continue
            before = self.best
            mean = await self._validate(version, number)
            if version is not self.best:
                logger.warning(
                    "%s best not updated: %s with %s stays before %s",
                    *(
                        prefix_of(number, version=version.version),
                        before.version,
                        score_text(self.best_score),
                        score_text(mean),
                    ),
                )

    async def validate_seed(self) -> None:
        seed = self.seed
        await self._validate(seed, 0)
        if seed.failures == seed.tasks:
            failures = (result["failure"] for result in self.whole[seed.version])
            raise NoCandidateError(
                f"The agent earned nothing on any of {seed.tasks} validation tasks with the seed; the first failure: "
                f"{next(filter(None, failures), 'no reward')}"
            )

    async def _validate(self, version: PromptVersion, number: int) -> float | None:
        """Return the mean of a version on the whole validation set; it becomes the best if it is strictly better."""
        _, mean, results = await self.chooser.judge(number, version, self.val)
        self.whole[version.version] = list(results)
        if mean is not None and mean > self.best_score:
            logger.info(
                "%s best updated: %s -> %.3f",
                *(prefix_of(number, version=version.version), score_text(self.best_score), mean),
            )
            self.best, self.best_score = version, mean
            seeds = self.whole.get(self.seed.version)
            self.p_value = None if seeds is None or version is self.seed else sign_test(seeds, results)
        data = {"rewards": [r["final_reward"] for r in results], "tasks": tasks_of(self.val)}
        data |= {"failures": [r["failure"] for r in results], "version": version.version}
        data["rollout_ids"] = [r["rollout_id"] for r in results]
        await self.log.evaluation(number, "validation", data, value=mean)
        return mean


def leader_of(beam: Sequence[PromptVersion]) -> PromptVersion:
    """Return the version of which it is surest that it is good: the greatest lower bound of the mean."""
    return max(beam, key=lambda each: -math.inf if each.interval is None else each.interval[0])
