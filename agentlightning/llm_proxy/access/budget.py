"""Budgets of tokens and money per rollout: what its calls have used, and the refusal of calls beyond the bound."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from agentlightning.llm_proxy.access.limits import count_of
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.json_values import fields_of
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.semconv import BUDGET_EXHAUSTED

_REMEMBERED: Final = 100_000


@dataclass(slots=True)
class Used:
    """What a rollout has used, all attempts together."""

    tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices that the models were given."""


class Budgets:
    """Counts what rollouts use. Owned by the serving loop; gone with the gateway's process.

    A call that begins within the budget is made, so calls at the same time may go beyond it together.
    """

    def __init__(self, tokens: int | None, cost: float | None) -> None:
        self._tokens, self._cost = tokens, cost
        self._used: OrderedDict[str, Used] = OrderedDict()

    def check(self, rollout_id: str) -> None:
        """Let the rollout make another call or raise.

        Raises:
            CallFailed: 429, its budget is used up; says how much it used and what the bound is.
        """
        used = self._used.get(rollout_id)
        if used is None:
            return
        for what, spent, bound in (("tokens", used.tokens, self._tokens), ("cost", used.cost, self._cost)):
            if bound is not None and spent >= bound:
                text = (
                    f"The budget of rollout {rollout_id} is used up: {spent:g} of {bound:g} ({what}). No further call "
                    f"of it is made ({BUDGET_EXHAUSTED}); GatewayLimits.{what}_per_rollout is the bound"
                )
                raise CallFailed(429, text, code=BUDGET_EXHAUSTED)

    def add(self, call: GatewayCall, endpoint: ModelEndpoint | None) -> None:
        """Count what a call has used: by its token ids, else by what the model server says."""
        if self._tokens is None and self._cost is None:
            return
        prompt, completion = tokens_used(call)
        used = self._used.setdefault(call.rollout_id, Used())
        used.tokens += prompt + completion
        if endpoint is not None:
            used.cost += prompt * endpoint.input_cost + completion * endpoint.output_cost
        self._used.move_to_end(call.rollout_id)
        if len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)


def tokens_used(call: GatewayCall) -> tuple[int, int]:
    """Return the tokens of prompt and completion; 0 where they are not known."""
    if call.tokens is not None and call.tokens.prompt_token_ids:
        return len(call.tokens.prompt_token_ids), len(call.tokens.completion_token_ids)
    counts = fields_of((call.reply or {}).get("usage"))
    return count_of(counts.get("prompt_tokens")), count_of(counts.get("completion_tokens"))
