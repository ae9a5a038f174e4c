"""The store as the algorithm of a run sees it: the Trainer's limits in every rollout, and nothing done twice.

Whatever the algorithm is, it enqueues through this view. That is where `rollout_config` of the Trainer enters, and
where a run that is started again is answered with the rollouts that it made before.
"""

from __future__ import annotations

import inspect
from typing import Any

from typing_extensions import override

from agentlightning.store.base import LightningStore
from agentlightning.store.scoped import LightningStoreScoped
from agentlightning.trainer.replay import Past
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig

_SIGNATURES = {name: inspect.signature(getattr(LightningStore, name)) for name in ("enqueue_rollout", "start_rollout")}


def merged(config: RolloutConfig | None, own: RolloutConfig | None) -> RolloutConfig | None:
    """Return `config` with the fields that `own` sets in its place."""
    if config is None or own is None:
        return own or config
    return config.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


class LightningStoreOfRun(LightningStoreScoped):
    """Fills in the run, and the fields of `config` that a request leaves out. With `past`, a request that the run has
    made before is answered with the rollout of that time. The ids of what was enqueued go into `seen`."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str | None,
        config: RolloutConfig | None,
        past: Past | None = None,
        seen: set[str] | None = None,
    ) -> None:
        super().__init__(store, run_id)
        self.config = config
        self.past = past
        self.seen = seen

    @override
    async def _call(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation == "enqueue_many_rollouts":
            return await self._enqueue(args[0] if args else kwargs["rollouts"])
        if operation in _SIGNATURES:
            said = _SIGNATURES[operation].bind(None, *args, **kwargs).arguments
            del said["self"]
            if operation == "enqueue_rollout":
                return (await self._enqueue([EnqueueRolloutRequest(**said)]))[0]
            args, kwargs = (), {**said, "config": merged(self.config, said.get("config"))}
        return await super()._call(operation, args, kwargs)

    async def _enqueue(self, requests: list[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = [r.model_copy(update={"config": merged(self.config, r.config)}) for r in requests]
        known = await self.past.answers(requests) if self.past is not None else [None] * len(requests)
        fresh = [request for request, rollout in zip(requests, known, strict=True) if rollout is None]
        made = iter(await super()._call("enqueue_many_rollouts", (fresh,), {}) if fresh else ())
        rollouts = [next(made) if rollout is None else rollout for rollout in known]
        if self.seen is not None:
            self.seen.update(rollout.rollout_id for rollout in rollouts)
        return rollouts
