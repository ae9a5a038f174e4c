"""The score of a prompt on tasks: its mean with an interval, its failures, and how much of the tasks it covers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, get_args

from agentlightning.errors import BadRequestError, NoScoredRolloutError
from agentlightning.evaluation.statistics import mcnemar_exact, t_interval
from agentlightning.field_help import explain_fields
from agentlightning.prompt_search.cases import RolloutResult

MissingPolicy = Literal["retry", "skip", "zero"]
"""What becomes of a task whose rollout earned nothing, through a fault or because it was late. `retry` plays it once
more and then leaves it out of the mean, `skip` leaves it out at once, `zero` counts it as 0."""

_Z = NormalDist().inv_cdf(0.975)


class NoCandidateError(NoScoredRolloutError, ValueError):
    """No version could be judged: none of their rollouts earned anything."""


@explain_fields
@dataclass(frozen=True, slots=True)
class Score:
    """What a prompt earned on tasks."""

    mean: float | None
    """Over the tasks that count; None if none does."""
    low: float
    """Lower bound of the 95 % interval of the mean, see `interval`."""
    high: float
    """Upper bound."""
    tasks: int
    """Tasks that were asked for."""
    scored: int
    """Those that earned something."""
    failures: int
    """Those that did not."""

    @property
    def coverage(self) -> float:
        """Share of the tasks that earned something."""
        return self.scored / self.tasks if self.tasks else 0.0

    @property
    def failure_rate(self) -> float:
        """Share of the tasks that did not."""
        return self.failures / self.tasks if self.tasks else 0.0


def score_of(results: Sequence[RolloutResult], missing: MissingPolicy = "retry") -> Score:
    """Return the score of results, one per task."""
    return score_of_rewards([result["final_reward"] for result in results], missing)


def score_of_rewards(rewards: Sequence[float | None], missing: MissingPolicy = "retry") -> Score:
    """Return the score of rewards, one per task; None where it earned nothing."""
    earned = [reward for reward in rewards if reward is not None]
    counted = earned + [0.0] * (len(rewards) - len(earned) if missing == "zero" else 0)
    mean, low, high = interval(counted)
    return Score(mean, low, high, len(rewards), len(earned), len(rewards) - len(earned))


def interval(rewards: Sequence[float]) -> tuple[float | None, float, float]:
    """Return mean and 95 % interval; None and infinite bounds for no rewards.

    Within 0 and 1 it is Wilson's with the mean as the share of successes: no rewards of that mean vary more than those
    of 0 and 1, so it is never too narrow, also where a few are equal by chance. Else it is Student's t.
    """
    if not rewards:
        return None, -math.inf, math.inf
    if not all(0.0 <= reward <= 1.0 for reward in rewards):
        return t_interval(rewards)
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    shrink = 1.0 + _Z * _Z / count
    centre = (mean + _Z * _Z / (2 * count)) / shrink
    half = _Z / shrink * math.sqrt(mean * (1.0 - mean) / count + _Z * _Z / (4 * count * count))
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def sign_test(before: Sequence[RolloutResult], after: Sequence[RolloutResult]) -> float:
    """Return the two-sided p-value of the exact sign test on the tasks of both, which are in the same order."""
    return sign_test_of([r["final_reward"] for r in before], [r["final_reward"] for r in after])


def sign_test_of(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Return the same of rewards, None where a task earned nothing."""
    known = [(was, now) for was, now in zip(before, after, strict=True) if was is not None and now is not None]
    return mcnemar_exact(sum(now > was for was, now in known), sum(now < was for was, now in known))


def check_missing(policy: object, minimum_coverage: object) -> None:
    """Check the two settings of what is missing.

    Raises:
        BadRequestError: one is out of its range.
    """
    if policy not in get_args(MissingPolicy):
        raise BadRequestError(f"missing must be one of {', '.join(get_args(MissingPolicy))}; got {policy!r}")
    if isinstance(minimum_coverage, bool) or not isinstance(minimum_coverage, (int, float)):
        raise BadRequestError(f"minimum_coverage must be a number from 0 to 1; got {minimum_coverage!r}")
    if not 0 <= minimum_coverage <= 1:
        raise BadRequestError(f"minimum_coverage must be a number from 0 to 1; got {minimum_coverage!r}")
