"""The resources of a rollout. A version never changes, so each is fetched once and remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine

from agentlightning.errors import BusyError
from agentlightning.runner.outcome import MissingResources, StoreAway
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, NamedResources, ResourcesUpdate
from agentlightning.utils.backoff import retry_for

KEPT_VERSIONS = 8


class ResourceCache:
    """Looks up resources in a store; used by one event loop."""

    def __init__(self, store: LightningStore, store_unreachable_timeout: float) -> None:
        self._store = store
        self._store_unreachable_timeout = store_unreachable_timeout
        self._kept: OrderedDict[tuple[str, int], NamedResources] = OrderedDict()

    async def resources_of(self, rollout: AttemptedRollout, *, required: bool) -> NamedResources:
        """Return the resources that the rollout was created with; those published last if it names none.

        Raises:
            MissingResources: it names unknown ones; or none were published and they are `required`.
            StoreAway: the store did not answer for `store_unreachable_timeout` seconds.
        """
        id, version = rollout.resources_id, rollout.resources_version
        key = None if id is None or version is None else (id, version)
        if key in self._kept:
            return self._kept[key]
        try:
            if id is None:
                update = await self._answer(lambda: self._store.get_latest_resources(run_id=rollout.run_id))
            else:
                update = await self._answer(lambda: self._store.get_resources_by_id(id, version))
        except (OSError, BusyError) as error:
            raise StoreAway(f"The store did not give the resources of rollout {rollout.rollout_id}: {error}") from error
        if update is not None:
            if key is not None:
                self._kept[key] = update.resources
                while len(self._kept) > KEPT_VERSIONS:
                    self._kept.popitem(last=False)
            return update.resources
        if id is not None:
            which = id if version is None else f"{id}, version {version},"
            raise MissingResources(
                f"Failed to fetch resources: {which} that rollout {rollout.rollout_id} names do not exist"
            )
        if required:
            raise MissingResources(
                f"Failed to fetch resources: rollout {rollout.rollout_id} names none and none were published. Give the "
                "Trainer initial_resources, call store.add_resources, or set needs_resources = False on the agent."
            )
        return {}

    async def _answer(
        self, ask: Callable[[], Coroutine[object, object, ResourcesUpdate | None]]
    ) -> ResourcesUpdate | None:
        return await retry_for(self._store_unreachable_timeout, ask, "resources")
