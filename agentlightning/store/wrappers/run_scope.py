"""LightningStoreScoped: a store with the `run_id` of one run filled in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

from typing_extensions import override

from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.wrappers.compat import complete
from agentlightning.store.wrappers.forward import forward_operations
from agentlightning.types import EnqueueRolloutRequest


@forward_operations
class LightningStoreScoped(LightningStore):
    """Fills in `run_id` wherever an operation takes one and the caller gives none."""

    def __init__(self, store: LightningStore, run_id: str | None) -> None:
        self.store = store
        self.run_id = run_id
        self._whole = complete(store)

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return self.store.capabilities

    @override
    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    @override
    async def close(self) -> None:
        """Close the store behind it; for whoever received this view in another process or thread."""
        await self.store.close()

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        method = getattr(self._whole, operation)
        if operation == "enqueue_many_rollouts":
            rollouts = cast("Sequence[EnqueueRolloutRequest]", args[0] if args else kwargs["rollouts"])
            mine = {"run_id": self.run_id}
            return await method([r if r.run_id is not None else r.model_copy(update=mine) for r in rollouts])
        if self.run_id is not None and "run_id" in inspect.signature(method).parameters:
            kwargs.setdefault("run_id", self.run_id)
        return await method(*args, **kwargs)
