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
        try:
            return await self._resources_of(rollout, required)
        except (OSError, BusyError) as error:
            raise StoreAway(f"The store did not give the resources of rollout {rollout.rollout_id}: {error}") from error

    async def _resources_of(self, rollout: AttemptedRollout, required: bool) -> NamedResources:
        if rollout.resources_id is not None:
            return await self._by_id(rollout, rollout.resources_id, rollout.resources_version)
        latest = await self._answer(lambda: self._store.get_latest_resources(run_id=rollout.run_id))
        if latest is not None:
            return latest.resources
        if required:
            raise MissingResources(
                f"Failed to fetch resources: rollout {rollout.rollout_id} names none and none were published. Give the "
                "Trainer initial_resources, call store.add_resources, or set needs_resources = False on the agent."
            )
        return {}

    async def _by_id(self, rollout: AttemptedRollout, resources_id: str, version: int | None) -> NamedResources:
        key = None if version is None else (resources_id, version)
        if key in self._kept:
            return self._kept[key]
        update = await self._answer(lambda: self._store.get_resources_by_id(resources_id, version))
        if update is None:
            which = resources_id if version is None else f"{resources_id}, version {version},"
            raise MissingResources(
                f"Failed to fetch resources: {which} that rollout {rollout.rollout_id} names do not exist"
            )
        if key is not None:
            self._kept[key] = update.resources
            while len(self._kept) > KEPT_VERSIONS:
                self._kept.popitem(last=False)
        return update.resources

    async def _answer(
        self, ask: Callable[[], Coroutine[object, object, ResourcesUpdate | None]]
    ) -> ResourcesUpdate | None:
        return await retry_for(self._store_unreachable_timeout, ask, "resources")
