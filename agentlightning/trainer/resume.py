"""Resuming a run: requests of the new start are answered with earlier rollouts.

A request is answered with a rollout that has the same input, mode, metadata and resources. If several rollouts match,
they are used in the order of their creation. So an algorithm that makes the same requests in the same order gets the
results of ended rollouts, waits for open ones, and runs only the others. `LightningStoreOfRun` is the store that the
algorithm of a run uses: it returns these rollouts, and adds the Trainer's `rollout_config` to every new one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, cast

from typing_extensions import override

from agentlightning.errors import ConflictError
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.store.wrappers import LightningStoreScoped
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, ResourcesUpdate, Rollout, RolloutConfig

logger = logging.getLogger(__name__)


class Past:
    """The rollouts of a run from before it was resumed: their ids by a digest of the request. `store` is the run's
    view; `opened` is the time at which this start opened the run, in Unix seconds."""

    def __init__(self, store: LightningStore, opened: float) -> None:
        self._store = store
        self._opened = opened
        self._waiting: dict[bytes, deque[tuple[str, str]]] = defaultdict(deque)
        self._published: dict[tuple[str | None, int | None], tuple[str, str]] = {}

    async def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts, each with the addresses in its resources."""
        for rollout in rollouts:
            resources_id, version = rollout.resources_id, rollout.resources_version
            if (resources_id, version) not in self._published:
                update = None if resources_id is None else await self._store.get_resources_by_id(resources_id, version)
                self._published[resources_id, version] = _described(update)
            contents, endpoints = self._published[resources_id, version]
            key = _key(rollout.input, rollout.mode, rollout.metadata, contents)
            self._waiting[key].append((rollout.rollout_id, endpoints))

    async def answers(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout | None]:
        """Return, for each request, the current state of the earlier rollout for it, or None."""
        offered: dict[str | None, tuple[str, str]] = {}
        for name in {request.resources_id for request in requests}:  # None is the latest of the run
            get = self._store.get_latest_resources() if name is None else self._store.get_resources_by_id(name)
            offered[name] = _described(await get)
        chosen: list[tuple[str, bool]] = []
        for request in requests:
            contents, endpoints = offered[request.resources_id]
            alike = self._waiting.get(_key(request.input, request.mode, request.metadata, contents))
            rollout_id, its_endpoints = alike.popleft() if alike else ("", "")
            chosen.append((rollout_id, its_endpoints == endpoints))
        ids = [rollout_id for rollout_id, _ in chosen if rollout_id]
        rollout_by_id: dict[str, Rollout] = {}
        if ids:
            rollout_by_id = {r.rollout_id: r for r in await self._store.query_rollouts(rollout_id_in=ids, limit=-1)}
        answers: list[Rollout | None] = []
        for rollout_id, is_reachable in chosen:
            rollout = rollout_by_id.get(rollout_id)
            if rollout is not None and not is_reachable:  # its model answered at an address that no longer exists
                if rollout.status not in FINISHED:
                    await cancel(self._store, rollout)
                    rollout = None
                elif _failed_after(rollout, self._opened):  # a runner claimed it before it was cancelled
                    rollout = None
            answers.append(rollout)
        return answers


async def past_of(
    store: LightningStore, name: str, seen: set[str], *, resumable: bool, opened: float | None = None
) -> Past | None:
    """Return the earlier rollouts of the run of the view `store`; None for a new run.

    `opened` is the time at which this start opened the run, in Unix seconds; None is the current time. A rollout that
    failed after it, and not because of its policy, may have called the gateway of the earlier start, which has ended.
    Rollouts in `seen` were enqueued by this program and are excluded: a second `fit` runs its own. Open rollouts of an
    algorithm that is not `resumable` are cancelled, so that no runner claims them.
    """
    past, ended, still_open = Past(store, time.time() if opened is None else opened), 0, 0
    async for page in pages_of(store.query_rollouts, sort_by="start_time"):
        before = [r for r in page if not _was_stopped(r) and r.rollout_id not in seen]
        unfinished = [rollout for rollout in before if rollout.status not in FINISHED]
        ended, still_open = ended + len(before) - len(unfinished), still_open + len(unfinished)
        if resumable:
            await past.add(before)
            continue
        for rollout in unfinished:
            await cancel(store, rollout)
    if not ended and not still_open:
        return None
    if not resumable:
        logger.info("Run %s starts from the beginning; earlier open rollouts cancelled: %d", name, still_open)
        return None
    logger.info("Run %s resumed: rollouts ended %d, open %d", name, ended, still_open)
    return past


def _was_stopped(rollout: Rollout) -> bool:
    """Return whether a rollout ended only because its run did: it was cancelled, or its runner was stopped."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    stopped = attempt is not None and (attempt.outcome, attempt.outcome_reason) == ("cancelled", "stopped")
    return rollout.status == "cancelled" or (stopped and rollout.status in FINISHED)


def _failed_after(rollout: Rollout, moment: float) -> bool:
    """Return whether a rollout failed after this time, and not because of its policy."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if rollout.status != "failed" or attempt is None or attempt.outcome != "infrastructure_fault":
        return False
    return attempt.end_time is not None and attempt.end_time > moment


async def cancel(store: LightningStore, rollout: Rollout) -> None:
    """Cancel a rollout, unless it has ended in the meantime."""
    try:
        await store.update_rollout(rollout.rollout_id, status="cancelled")
    except ConflictError:
        logger.debug("rollout %s ended before it was cancelled", rollout.rollout_id)


def _key(task: object, mode: str | None, metadata: dict[str, object] | None, resources: str) -> bytes:
    parts = [to_json(task), mode, to_json(metadata or {}, "metadata"), resources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _described(update: ResourcesUpdate | None) -> tuple[str, str]:
    """Return the contents of resources, without keys, and the addresses in them, which may differ between starts."""
    contents: dict[str, object] = {}
    endpoints: dict[str, object] = {}
    for name, resource in ({} if update is None else update.resources).items():
        contents[name] = resource.model_dump(mode="json", exclude={"api_key", "endpoint"})
        endpoints[name] = resource.model_dump(mode="json", include={"endpoint"})
    return json.dumps(contents, sort_keys=True), json.dumps(endpoints, sort_keys=True)


_SIGNATURES = {name: inspect.signature(getattr(LightningStore, name)) for name in ("enqueue_rollout", "start_rollout")}


def merged(config: RolloutConfig | None, own: RolloutConfig | None) -> RolloutConfig | None:
    """Return `config` with the fields that `own` sets replaced."""
    if config is None or own is None:
        return own or config
    return config.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


class LightningStoreOfRun(LightningStoreScoped):
    """Adds the run to each request, and the fields of `config` that the request does not set. With `past`, a repeated
    request of the run is answered with its earlier rollout. The ids of enqueued rollouts are added to `seen`."""

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
            arguments = _SIGNATURES[operation].bind(None, *args, **kwargs).arguments
            del arguments["self"]
            if operation == "enqueue_rollout":
                return (await self._enqueue([EnqueueRolloutRequest(**arguments)]))[0]
            args, kwargs = (), {**arguments, "config": merged(self.config, arguments.get("config"))}
        return await super()._call(operation, args, kwargs)

    async def _enqueue(self, requests: list[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = [r.model_copy(update={"config": merged(self.config, r.config)}) for r in requests]
        earlier = await self.past.answers(requests) if self.past is not None else [None] * len(requests)
        fresh = [request for request, rollout in zip(requests, earlier, strict=True) if rollout is None]
        made = iter(cast(list[Rollout], await super()._call("enqueue_many_rollouts", (fresh,), {}) if fresh else []))
        rollouts = [next(made) if rollout is None else rollout for rollout in earlier]
        if self.seen is not None:
            self.seen.update(rollout.rollout_id for rollout in rollouts)
        return rollouts
