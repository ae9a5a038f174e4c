"""Who answers a search over prompts: the program's own choice, else the environment's server, else the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection
from typing import TYPE_CHECKING

from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.types import RolloutConfig

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

_NO_LIMITS = RolloutConfig(timeout_seconds=None, unresponsive_seconds=None, max_attempts=1, retry_condition=[])
"""Of the rollout of critic and editor: the Trainer's limits are those of agents."""


@contextlib.asynccontextmanager
async def asking(
    make: Callable[[object], Chat],
    store: LightningStore,
    llm_proxy: LLMProxy | None,
    *,
    models: Collection[str],
    purpose: str,
    say: str,
) -> AsyncGenerator[Chat]:
    """Give the chat of a run. Through the gateway its calls belong to a rollout of their own.

    Args:
        make: returns a chat with this source; with None the one that the program gave or the environment names.
        models: those that the program names, beside the one of a `Chat` that it gives.
        purpose: the input of the rollout says whose calls it holds.
        say: which argument names a model, for the error.

    Raises:
        BadRequestError: there is nobody to ask, or the gateway serves several models and none is named.
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
        raise BadRequestError(f"The gateway serves {', '.join(served)}: say which is asked, {say}")
    calls = {"calls_of": purpose}
    for left in await store.query_rollouts(status_in=["preparing", "running"], limit=-1):
        if left.input == calls:  # of an earlier start that was killed
            await store.update_rollout(left.rollout_id, status="cancelled")
    own = await store.start_rollout(calls, config=_NO_LIMITS)
    ids = own.rollout_id, own.attempt.attempt_id
    try:
        yield make(llm_proxy.as_resource(*ids, model=sorted(models or served)[0]))
    finally:
        await store.update_attempt(*ids, status="succeeded")
