"""LightningStoreScoped: a store with the `run_id` of one run filled in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

from agentlightning.store.base import LightningStore
from agentlightning.store.wrappers.compat import complete
from agentlightning.store.wrappers.forward import StoreWrapper, forward_operations
from agentlightning.types import EnqueueRolloutRequest


@forward_operations
class LightningStoreScoped(StoreWrapper):
    """Fills in `run_id` wherever an operation takes one and the caller gives none."""

    def __init__(self, store: LightningStore, run_id: str | None) -> None:
        super().__init__(store)
        self.run_id = run_id
        self._whole = complete(store)

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        method = getattr(self._whole, operation)
        if operation == "enqueue_many_rollouts":
            rollouts = cast("Sequence[EnqueueRolloutRequest]", args[0] if args else kwargs["rollouts"])
            mine = {"run_id": self.run_id}
            return await method([r if r.run_id is not None else r.model_copy(update=mine) for r in rollouts])
        if self.run_id is not None and "run_id" in inspect.signature(method).parameters:
            kwargs.setdefault("run_id", self.run_id)
        return await method(*args, **kwargs)
