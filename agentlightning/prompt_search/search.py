"""Common components, state and records of prompt searches, and the chat for their model calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.prompt_search.evaluator import CandidateEvaluator
from agentlightning.prompt_search.history import History, PromptResult, PromptVersion, VersionState
from agentlightning.prompt_search.results import MissingPolicy, RolloutResult, Score, rewards_of, score_of, sign_test
from agentlightning.store.base import LightningStore
from agentlightning.training.records import RunLog
from agentlightning.types import RolloutConfig

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

_NO_LIMITS = RolloutConfig(timeout_seconds=None, unresponsive_seconds=None, max_attempts=1, retry_condition=[])
"""Configuration of the rollout for the model calls. The Trainer's limits apply only to agents."""


@contextlib.asynccontextmanager
async def open_chat(
    make: Callable[[object], Chat],
    store: LightningStore,
    llm_proxy: LLMProxy | None,
    *,
    models: Sequence[str],
    purpose: str,
    setting: str,
) -> AsyncGenerator[Chat]:
    """Yield the chat of a run: from the program or the environment, otherwise through the gateway.

    Calls through the gateway belong to a separate rollout.

    Args:
        make: Returns a chat with this source, or for None the chat of the program or the environment.
        models: Models named by the program, in addition to the model of its `Chat`.
        purpose: Input of the rollout.
        setting: Argument that names a model, for the error message.

    Raises:
        BadRequestError: No model is available, or the gateway serves several models and none is named.
    """
    chat = make(None)
    try:
        chat.check_source()
    except BadRequestError:
        if llm_proxy is None or not llm_proxy.model_list:
            raise
    else:
        yield chat
        return
    models = models or ([chat.model] if chat.model else [])
    served = [entry["model_name"] for entry in llm_proxy.model_list]
    if not models and len(served) > 1:
        raise BadRequestError(f"The gateway serves several models ({', '.join(served)}). Choose one: {setting}")
    calls = {"calls_of": purpose}
    for rollout in await store.query_rollouts(status_in=["preparing", "running"], limit=-1):
        if rollout.input == calls:  # of an earlier start that was killed
            await store.update_rollout(rollout.rollout_id, status="cancelled")
    rollout = await store.start_rollout(calls, config=_NO_LIMITS)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    try:
        yield make(llm_proxy.as_resource(*ids, model=sorted(models or served)[0]))
    finally:
        await store.update_attempt(*ids, status="succeeded")


@dataclass
class SearchState:
    """The components and the state of a search. Used only in the algorithm's event loop."""

    chat: Chat
    history: History
    evaluator: CandidateEvaluator
    log: RunLog
    seed: PromptVersion
    train: Sequence[Any]
    val: Sequence[Any]
    missing: MissingPolicy
    minimum_coverage: float
    best: PromptVersion
    """Best version so far; initially the seed."""
    stop_reason: str = "interrupted"
    """Reason for the end of the search; `interrupted` until the search completes."""
    validated: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Rewards on the full validation set, by version digest."""
    began: float = field(default_factory=time.monotonic)

    def score(self, results: Sequence[RolloutResult]) -> Score:
        """Return the score of results."""
        return score_of(rewards_of(results), self.missing)

    def is_enough(self, score: Score) -> bool:
        """Return True if enough tasks have a reward to judge a version."""
        return score.scored > 0 and score.coverage >= self.minimum_coverage

    def p_value(self) -> float | None:
        """Return the p-value of the best version against the seed, or None if they were not compared.

        It is multiplied by the number of versions to choose from (Bonferroni), as each may look better by chance.
        """
        before, after = self.validated.get(self.seed.digest), self.validated.get(self.best.digest)
        if self.best is self.seed or before is None or after is None:
            return None
        return min(1.0, sign_test(before, after) * (len(self.validated) - 1))

    async def record_validation(
        self,
        round: int,
        name: str,
        version: PromptVersion,
        results: Sequence[RolloutResult],
        value: float | None,
        *,
        counts_for_best: bool = False,
        **more: object,
    ) -> None:
        """Store and record the results of a version on the full validation set."""
        self.validated[version.digest] = rewards = rewards_of(results)
        failures = [result["failure"] for result in results]
        data: dict[str, object] = {"rewards": rewards, "tasks": tasks_of(self.val), "failures": failures}
        data |= {"version": version.version, **more}
        await self.log.evaluation(round, name, data, value=value, counts_for_best=counts_for_best)

    async def record_step(
        self,
        number: int,
        figures: Mapping[str, object],
        versions: Sequence[PromptVersion],
        states: Sequence[VersionState],
        **more: object,
    ) -> None:
        """Record the metrics of a round, the number of versions in each state, and the usage so far."""
        present, bill = [version.state for version in versions], self.chat.bill
        counts = {state: present.count(state) for state in states}
        used = {"calls": bill.calls, "tokens": bill.tokens, "cost": bill.cost}
        await self.log.step(number, {**figures, **counts, "rollouts": self.evaluator.rollouts, **used, **more})

    def write_history(self, **more: object) -> None:
        """Write `history.json`, if a folder is set."""
        self.history.write(best=self.best.version, bill=self.chat.bill.as_json(), **more)

    def result(self) -> PromptResult:
        """Return the current result of the search."""
        return PromptResult(
            best=self.best,
            history=list(self.history.versions),
            best_resources=self.evaluator.resources_with(self.best.templates),
            bill=self.chat.bill,
            rollouts=self.evaluator.rollouts,
            stop_reason=self.stop_reason,
            p_value=self.p_value(),
            seconds=time.monotonic() - self.began,
        )
