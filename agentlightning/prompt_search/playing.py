"""`PromptPlayer`: plays sets of prompts on tasks, a whole round at once, and keeps what each earned on each task."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.evaluation.tasks import tasks_of
from agentlightning.prompt_search.cases import RolloutResult
from agentlightning.prompt_search.scores import MissingPolicy
from agentlightning.store.base import LightningStore
from agentlightning.training.collect import collect
from agentlightning.training.tasks import with_timeout
from agentlightning.types import (
    EnqueueRolloutRequest,
    NamedResources,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    RolloutMode,
)

logger = logging.getLogger(__name__)

Templates = Mapping[str, PromptTemplate]
"""Prompt templates by the names of their resources."""
ReadResults = Callable[[Sequence[Rollout]], Awaitable[Sequence[RolloutResult]]]
_Key = tuple[str, RolloutMode, str]
MOST_WHOLE = 1000
"""Results of training tasks that are kept with their messages; of older ones the score is kept."""


def digest_of(templates: Templates) -> str:
    """Return what equal sets of prompts have in common."""
    texts = {name: [template.engine, template.template] for name, template in sorted(templates.items())}
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


def resources_id_of(prefix: str, run: str, version: str) -> str:
    """Return the id under which a version of a run is published."""
    return f"{prefix}-{run}-{version}"


async def read_published(store: LightningStore, prefix: str, run: str, version: str) -> NamedResources | None:
    """Return the resources that were published for a version; None if there are none."""
    found = await store.get_resources_by_id(resources_id_of(prefix, run, version))
    return None if found is None else found.resources


@dataclass
class _Job:
    """One set of prompts on some tasks, and who waits for its results."""

    version: str
    templates: Templates
    tasks: list[Any]
    mode: RolloutMode
    done: asyncio.Future[list[RolloutResult]]
    keys: list[_Key] = field(default_factory=list[_Key])


class PromptPlayer:
    """Plays sets of prompts. Belongs to the event loop of the algorithm.

    What is asked for at the same time is enqueued at once, in one call to the store, and each caller is answered when
    its own tasks have ended. Each set of prompts is published
    with everything else of `resources`, under `<prefix>-<run>-<version>`. A score is kept per set, mode and task: the
    same is not played twice. Rollouts that are late are cancelled, and so are open ones when nobody waits any more.

    Args:
        read: returns the results of ended rollouts, in their order.
        timeout_seconds: of the rollouts of one set; those of several sets that are played at once have the sum.
        config: of each rollout; without a time limit of its own an attempt has `timeout_seconds`.
        missing: with `retry`, a task that earned nothing is played once more.
        seconds_left: what is late by then is cancelled too.
    """

    def __init__(
        self,
        store: LightningStore,
        read: ReadResults,
        *,
        prefix: str,
        run: str,
        resources: NamedResources,
        timeout_seconds: float,
        config: RolloutConfig | None = None,
        missing: MissingPolicy = "retry",
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._store, self._read = store, read
        self._prefix, self._run = prefix, run
        self._resources = resources
        self._timeout = timeout_seconds
        self._config = with_timeout(config, timeout_seconds)
        self._missing: MissingPolicy = missing
        self._seconds_left = seconds_left
        self._scores: dict[_Key, RolloutResult] = {}
        self._failed: dict[_Key, RolloutResult] = {}
        self._whole: dict[_Key, None] = {}
        """Results with messages, the oldest first."""
        self._published: dict[str, str] = {}
        self._waiting: list[_Job] = []
        self._next: asyncio.Task[None] | None = None
        self.rollouts = 0
        """How many were enqueued."""

    def resources_with(self, templates: Templates) -> NamedResources:
        """Return all resources, with these prompts in the place of those of their names."""
        return {**self._resources, **templates}

    async def play(
        self, version: str, templates: Templates, tasks: Sequence[Any], mode: RolloutMode
    ) -> list[RolloutResult]:
        """Return what a set of prompts earned on each task, in order. Calls made at the same time are one round."""
        if not tasks:
            return []
        job = _Job(version, templates, list(tasks), mode, asyncio.get_running_loop().create_future())
        digest = digest_of(templates)
        job.keys = [(digest, mode, task) for task in tasks_of(job.tasks)]
        if self._next is None:
            self._waiting = []
            self._next = asyncio.create_task(self._play_waiting(self._waiting), name="play-prompts")
        self._waiting.append(job)
        jobs, playing = self._waiting, self._next
        try:
            return await job.done
        finally:
            if all(other.done.done() for other in jobs) and not playing.done():
                if self._next is playing:  # it had not begun, and will not take in those who ask later
                    self._next = None
                playing.cancel()
                await asyncio.wait([playing])

    def known(self, templates: Templates, mode: RolloutMode) -> list[RolloutResult]:
        """Return the last result of each task that a set of prompts has played so far in a mode."""
        digest = digest_of(templates)
        played = {**self._failed, **self._scores}
        return [result for (of, in_mode, _), result in played.items() if (of, in_mode) == (digest, mode)]

    async def _play_waiting(self, jobs: list[_Job]) -> None:
        await asyncio.sleep(0)  # those who were started together have asked by then
        self._next = None
        try:
            results = await self._play_round(jobs)
        except BaseException as error:
            for job in jobs:
                if not job.done.done():
                    if isinstance(error, Exception):
                        job.done.set_exception(error)
                    else:
                        job.done.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for job in jobs:
            if not job.done.done():
                job.done.set_result([results[key] for key in job.keys])

    async def _play_round(self, jobs: list[_Job]) -> dict[_Key, RolloutResult]:
        found, wanted = dict[_Key, RolloutResult](), dict[_Key, tuple[_Job, Any]]()
        for job in jobs:
            for key, task in zip(job.keys, job.tasks, strict=True):
                if key in self._scores:
                    found[key] = self._scores[key]
                else:
                    wanted.setdefault(key, (job, task))
        if wanted:

            def tell(fresh: Mapping[_Key, RolloutResult]) -> None:
                self._keep(fresh)
                found.update(fresh)
                self._answer_early(jobs, found)

            fresh = await self._play_tasks(wanted, self._timeout * len(jobs), tell)
            missing = {key: wanted[key] for key, result in fresh.items() if result["final_reward"] is None}
            if missing and self._missing == "retry" and self._seconds_left() > 0:
                logger.info("%d of %d rollouts earned nothing and are played once more", len(missing), len(wanted))
                fresh |= await self._play_tasks(missing, self._timeout * len(jobs))
            found |= fresh
            self._keep(fresh)
            self._forget()
        return found

    def _keep(self, fresh: Mapping[_Key, RolloutResult]) -> None:
        for key, result in fresh.items():
            kept = _kept(result) if key[1] == "val" else result
            if key[1] != "val":
                self._whole[key] = None
            if result["final_reward"] is None:  # a fault may be none the next time
                self._failed[key] = kept
            else:
                self._scores[key] = kept

    def _answer_early(self, jobs: Sequence[_Job], found: Mapping[_Key, RolloutResult]) -> None:
        """Answer those whose tasks are played while others still run; the last ones are answered with the round."""
        again = self._missing == "retry"  # what earned nothing is played once more
        still_open = [job for job in jobs if not job.done.done()]
        ready = [
            job
            for job in still_open
            if all(key in found and not (again and found[key]["final_reward"] is None) for key in job.keys)
        ]
        if len(ready) < len(still_open):
            for job in ready:
                job.done.set_result([found[key] for key in job.keys])

    def _forget(self) -> None:
        """Keep what a critic reads of the last results for it only."""
        while len(self._whole) > MOST_WHOLE:
            key = next(iter(self._whole))
            del self._whole[key]
            for results in (self._scores, self._failed):
                if key in results:
                    results[key] = _kept(results[key])

    async def _play_tasks(
        self,
        wanted: Mapping[_Key, tuple[_Job, Any]],
        seconds: float,
        tell: Callable[[Mapping[_Key, RolloutResult]], None] | None = None,
    ) -> dict[_Key, RolloutResult]:
        """Play tasks, enqueued at once, and return their results; `tell` is given those that have ended meanwhile."""
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=job.mode,
                resources_id=await self._publish(job),
                config=self._config,
                metadata={"prompt_version": job.version, "task": key[2]},
            )
            for key, (job, task) in wanted.items()
        ]
        self.rollouts += len(requests)
        limit = max(0.0, min(seconds, self._seconds_left()))
        key_of = {(self._published[key[0]], *key[1:]): key for key in wanted}
        read: dict[_Key, RolloutResult] = {}

        async def read_ended(ended: Sequence[Rollout]) -> None:
            keys = [
                key_of[each.resources_id or "", each.mode or "train", str((each.metadata or {})["task"])]
                for each in ended
            ]
            fresh = dict(zip(keys, await self._read(ended), strict=True))
            read.update(fresh)
            if tell is not None:
                tell(fresh)

        rollouts = await collect(self._store, requests, timeout_seconds=limit, on_ended=read_ended)
        left = [(key, each) for key, each in zip(wanted, rollouts, strict=True) if key not in read]  # the late ones
        if left:
            read |= zip((key for key, _ in left), await self._read([each for _, each in left]), strict=True)
        return {key: read[key] for key in wanted}

    async def _publish(self, job: _Job) -> str:
        """Return the id of the resources with these prompts, published once."""
        digest = digest_of(job.templates)
        if digest not in self._published:
            resources_id = resources_id_of(self._prefix, self._run, job.version)
            await self._store.update_resources(resources_id, self.resources_with(job.templates))
            self._published[digest] = resources_id
        return self._published[digest]


def _kept(result: RolloutResult) -> RolloutResult:
    """Return a result without what a critic would read, of which there is much."""
    return {**result, "messages": [], "spans": []}
