"""`PromptSearch`: what algorithms that search over prompts have in common, as the Trainer sees them."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.algorithm.base import Algorithm
from agentlightning.prompt_search.cases import RolloutResult, read_results
from agentlightning.prompt_search.result import PromptResult
from agentlightning.types import PromptTemplate, Rollout


class PromptSearch(Algorithm[PromptResult]):
    """A search over prompts. Its result is kept when it is interrupted, too."""

    result: PromptResult | None = None
    """What the last run found, also of one that was interrupted; None before the first."""

    def get_best_prompt(self) -> PromptTemplate:
        """Return the best prompt so far: of several templates the one that the best version has changed last.

        Raises:
            ValueError: nothing has run.
        """
        if self.result is None:
            raise ValueError(
                "No best prompt found: call Trainer.fit first. Where the search ran in a process of its own, the best "
                "prompt is trainer.result.best_prompt"
            )
        return self.result.best_prompt

    @override
    def get_adapter(self) -> TraceToMessages:
        """Return the adapter that makes messages: the Trainer's if it does, else one of ours."""
        return self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages()

    async def get_rollout_results(self, rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        """Return of each ended rollout its status, reward, failure, task, messages and spans, of the latest attempt."""
        return await read_results(self.get_store(), rollouts, self.get_adapter())
