"""The best so far: which version leads, and what it is worth on the whole validation set.

Of many versions that were judged on a few tasks, the one that looks best mostly had luck ("On over-fitting in model
selection", Cawley and Talbot, JMLR 11, 2010). So the best is only chosen among versions that were evaluated on the
whole validation set: the leader of each round, and before the end the members of beams that come next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.evaluation.tasks import tasks_of
from agentlightning.prompt_search.apo.choosing import Chooser
from agentlightning.prompt_search.apo.steps import all_of, prefix_of, score_text
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.history import PromptVersion
from agentlightning.prompt_search.scores import NoCandidateError, sign_test
from agentlightning.training.runs.log import RunLog

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
    whole: dict[str, list[RolloutResult]] = field(default_factory=dict[str, list[RolloutResult]], init=False)
    """Results on the whole validation set, by version."""
    members: dict[str, PromptVersion] = field(default_factory=dict[str, PromptVersion], init=False)
    """Versions that were in a beam, by name."""

    def __post_init__(self) -> None:
        self.best = self.seed

    @property
    def p_value(self) -> float | None:
        """P-value of the best against the seed, times the versions that it was chosen among (Bonferroni), since each
        might have looked better by luck. None if the two were not compared."""
        before, after = (self.whole.get(version.version) for version in (self.seed, self.best))
        if before is None or after is None or self.best is self.seed:
            return None
        return min(1.0, sign_test(before, after) * (len(self.whole) - 1))

    async def lead(self, number: int, beam: Sequence[PromptVersion]) -> None:
        """Play a new leader on the whole validation set; it replaces the best if it is strictly better."""
        self.members |= {version.version: version for version in beam}
        leader = leader_of(beam)
        if leader.version in self.whole:
            logger.info("%s leads and was validated already", prefix_of(number, version=leader.version))
        else:
            await self._compare(number, [leader], "validation")

    async def choose_last(self, number: int) -> None:
        """Play further members of beams on the whole validation set, all at once, before the best is final."""
        left = [version for name, version in self.members.items() if name not in self.whole]
        left.sort(key=_lower_bound, reverse=True)
        before = self.best
        if chosen := left[: self.chooser.settings.final_candidates]:
            await self._compare(number, chosen, "validation of {version}")
        if self.best is not before:
            await self.log.best("validation", self.best_score, number)

    async def _compare(self, number: int, versions: Sequence[PromptVersion], name: str) -> None:
        for version, mean in zip(versions, await self._validate(number, versions, name), strict=True):
            if version is not self.best:
                logger.warning(
                    "%s best not updated: %s with %s stays before %s",
                    *(
                        prefix_of(number, version=version.version),
                        self.best.version,
                        score_text(self.best_score),
                        score_text(mean),
                    ),
                )

    async def validate_seed(self) -> None:
        seed = self.seed
        await self._validate(0, [seed], "validation")
        if seed.failures == seed.tasks:
            failures = (result["failure"] for result in self.whole[seed.version])
            raise NoCandidateError(
                f"The agent earned nothing on any of {seed.tasks} validation tasks with the seed; the first failure: "
                f"{next(filter(None, failures), 'no reward')}"
            )

    async def _validate(self, number: int, versions: Sequence[PromptVersion], name: str) -> list[float | None]:
        """Return the means of versions on the whole validation set; each becomes the best if it is strictly better.

        `name` is that of their records, of which a round has one of each name.
        """
        judged = await all_of([self.chooser.judge(number, version, self.val) for version in versions])
        for version, mean, results in judged:
            self.whole[version.version] = list(results)
            if mean is not None and mean > self.best_score:
                logger.info(
                    "%s best updated: %s -> %.3f",
                    *(prefix_of(number, version=version.version), score_text(self.best_score), mean),
                )
                self.best, self.best_score = version, mean
            data = {"rewards": [r["final_reward"] for r in results], "tasks": tasks_of(self.val)}
            data |= {"failures": [r["failure"] for r in results], "version": version.version}
            data["rollout_ids"] = [r["rollout_id"] for r in results]
            named = name.format(version=version.version)
            await self.log.evaluation(number, named, data, value=mean, counts_for_best=named == "validation")
        return [mean for _, mean, _ in judged]


def leader_of(beam: Sequence[PromptVersion]) -> PromptVersion:
    """Return the version of which it is surest that it is good: the greatest lower bound of the mean."""
    return max(beam, key=_lower_bound)


def _lower_bound(version: PromptVersion) -> float:
    return -math.inf if version.interval is None else version.interval[0]
