"""The common parts, state and records of searches over prompts, and the chat for their model calls."""

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
"""Configuration of the rollout of the model calls: the Trainer's limits are for agents."""


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
    """Yield the chat of a run: from the program or the environment, else through the gateway.

    Calls through the gateway belong to their own rollout.

    Args:
        make: returns a chat with this source; with None the chat of the program or the environment.
        models: models that the program names, in addition to the one of its own `Chat`.
        purpose: input of the rollout.
        setting: the argument that names a model, for the error.

    Raises:
        BadRequestError: no model is available, or the gateway serves several models and none is named.
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
        raise BadRequestError(f"The gateway serves {', '.join(served)}: say which is asked, {setting}")
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
    """The parts of a search, and the rewards on the whole validation set. Belongs to the algorithm's loop."""

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
    """The best version so far; at first the seed."""
    stop_reason: str = "interrupted"
    """Reason for the end of the search; `interrupted` until it ends by itself."""
    validated: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Rewards on the whole validation set, by the digests of the versions."""
    began: float = field(default_factory=time.monotonic)

    def score(self, results: Sequence[RolloutResult]) -> Score:
        """Return the score of results."""
        return score_of(rewards_of(results), self.missing)

    def is_enough(self, score: Score) -> bool:
        """True if enough tasks have a reward to judge a version."""
        return score.scored > 0 and score.coverage >= self.minimum_coverage

    def p_value(self) -> float | None:
        """Return the p-value of the best against the seed, times the number of versions to choose from (Bonferroni).

        Each of these might have looked better by chance. None if the two were not compared.
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
        """Store and record the results of a version on the whole validation set."""
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
        """Record the figures of a round, with the number of its versions in each state, and the usage so far."""
        present, bill = [version.state for version in versions], self.chat.bill
        counts = {state: present.count(state) for state in states}
        used = {"calls": bill.calls, "tokens": bill.tokens, "cost": bill.cost}
        await self.log.step(number, {**figures, **counts, "rollouts": self.evaluator.rollouts, **used, **more})

    def write_history(self, **more: object) -> None:
        """Write `history.json`, if there is a folder for it."""
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
