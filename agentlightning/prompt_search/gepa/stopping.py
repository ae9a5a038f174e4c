"""When a search of the package ends, beside its own stop conditions, and which proposals it accepts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from gepa.core.state import GEPAState
from gepa.proposer.base import CandidateProposal
from gepa.strategies.acceptance import (
    AcceptanceCriterion,
    ImprovementOrEqualAcceptance,
    StrictImprovementAcceptance,
)

from agentlightning.chat.bill import LimitReached
from agentlightning.errors import BadRequestError
from agentlightning.prompt_search.gepa.reflection import Reflector

MOST_FAILURES = 3
"""Model calls in a row that were not answered, each after its retries."""
MOST_IDLE = 50
"""Iterations in a row that played no rollout."""

CRITERIA: dict[str, Callable[[], AcceptanceCriterion]] = {
    "strict_improvement": StrictImprovementAcceptance,
    "improvement_or_equal": ImprovementOrEqualAcceptance,
}


class Stopper:
    """Ends a search that cannot go on: a limit is reached, nobody answers, nothing new is proposed. Says why.

    Args:
        error: what the package has logged and not raised, if there is anything.
        check_limits: raises `LimitReached`.
        rollouts: how many were played so far.
        perfect: the mean that no candidate can exceed; None if there is none.
    """

    def __init__(
        self,
        reflector: Reflector,
        rollouts: Callable[[], int],
        perfect: float | None,
        *,
        error: Callable[[], Exception | None],
        check_limits: Callable[[], None],
    ) -> None:
        self._reflector, self._rollouts, self._perfect = reflector, rollouts, perfect
        self._error, self._check_limits = error, check_limits
        self._played, self._idle_since = -1, 0
        self.reason: str | None = None

    def __call__(self, gepa_state: GEPAState[Any, Any]) -> bool:
        failures, limit, error = self._reflector.failures, self._reflector.limit, self._error()
        try:
            self._check_limits()
        except LimitReached as reached:
            limit = reached
        if self._rollouts() != self._played:
            self._played, self._idle_since = self._rollouts(), gepa_state.i
        if error is not None:
            self.reason = str(error)
        elif limit is not None:
            self.reason = str(limit)
        elif len(failures) >= MOST_FAILURES:
            self.reason = f"the model did not answer {len(failures)} times in a row: {failures[-1]}"
        elif gepa_state.i - self._idle_since >= MOST_IDLE:
            self.reason = f"{MOST_IDLE} iterations brought no version that was not known"
        scores = gepa_state.program_full_scores_val_set
        perfect = self._perfect is not None and max(scores, default=-math.inf) >= self._perfect
        return perfect or self.reason is not None


class PairedAcceptance:
    """Judges a proposal by the tasks of the minibatch that both it and its parent were scored on."""

    def __init__(self, criterion: str | AcceptanceCriterion) -> None:
        self._criterion: Any
        if isinstance(criterion, str):
            if criterion not in CRITERIA:
                raise BadRequestError(
                    f"acceptance_criterion must be one of {', '.join(CRITERIA)}, or an object with "
                    f"should_accept(proposal, state); got {criterion!r}"
                )
            self._criterion = CRITERIA[criterion]()
        else:
            self._criterion = criterion

    def should_accept(self, proposal: CandidateProposal[Any], state: GEPAState[Any, Any]) -> bool:
        """Return whether the proposal goes on to the validation tasks."""
        before, after = proposal.eval_before, proposal.eval_after
        if before is None or after is None or len(before.outputs) != len(after.outputs):
            return self._criterion.should_accept(proposal, state)
        both = [
            place
            for place, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True))
            if old["final_reward"] is not None and new["final_reward"] is not None
        ]
        if not both:
            return False
        paired = dataclasses.replace(
            proposal,
            subsample_scores_before=[before.scores[place] for place in both],
            subsample_scores_after=[after.scores[place] for place in both],
        )
        return self._criterion.should_accept(paired, state)
