"""Run candidate prompts on tasks. Concurrent evaluations form one round of rollouts."""

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
from agentlightning.prompt_search.results import MissingPolicy, RolloutResult
from agentlightning.store.base import LightningStore
from agentlightning.training.rollouts import Watcher, collect
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
"""Prompt templates by resource name."""
MOST_WITH_MESSAGES = 1000
"""Number of training results that are stored with their messages. Older ones keep only the score."""
_Key = tuple[str, RolloutMode, str]
"""Digest of the prompts, mode, digest of the task."""


def digest_of(templates: Templates) -> str:
    """Return a digest of a set of prompts. Equal sets have the same digest."""
    texts = {name: [template.engine, template.template] for name, template in sorted(templates.items())}
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Pending:
    """A candidate and a task, with the future of the result."""

    version: str
    templates: Templates
    task: Any
    result: asyncio.Future[RolloutResult]


@dataclass(slots=True)
class _Round:
    """Evaluations that started at the same time."""

    pending: dict[_Key, _Pending] = field(default_factory=dict[_Key, _Pending])
    evaluations: int = 0
    waiting: int = 0
    """Number of evaluations with a waiting caller."""


class CandidateEvaluator:
    """Runner of candidates on tasks, used only in the algorithm's event loop.

    Concurrent calls form one round: they are enqueued in one call to the store, and each returns when its own tasks
    have ended. Each candidate is published with all other `resources`, under `<name>-<run>-<version>`. Scores are
    stored per candidate, mode and task, so that nothing runs twice. Rollouts that are late or have no waiting caller
    are cancelled.

    Args:
        read: Returns the results of ended rollouts, in their order.
        name: Name of the algorithm in the ids of the resources.
        timeout_seconds: Time limit for the rollouts of one candidate. A round of several candidates has the sum.
        config: Configuration of each rollout. Without its own time limit an attempt has `timeout_seconds`.
        missing: With `retry`, a task without a reward runs once more.
        seconds_left: Returns the remaining seconds of the search. Rollouts that are then open are also cancelled.
    """

    def __init__(
        self,
        store: LightningStore,
        read: Callable[[Sequence[Rollout]], Awaitable[Sequence[RolloutResult]]],
        *,
        name: str,
        run: str,
        resources: NamedResources,
        timeout_seconds: float,
        config: RolloutConfig | None = None,
        missing: MissingPolicy = "retry",
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._store, self._read, self._prefix, self._resources = store, read, f"{name}-{run}", resources
        self._timeout, self._config = timeout_seconds, with_timeout(config, timeout_seconds)
        self._retries, self._seconds_left = missing == "retry", seconds_left
        self._results: dict[_Key, RolloutResult] = {}
        self._published: dict[str, str] = {}
        self._next: tuple[_Round, asyncio.Task[None]] | None = None
        """The round that accepts evaluations, and its asyncio task."""
        self.rollouts = 0
        """Number of enqueued rollouts."""

    def resources_with(self, templates: Templates) -> NamedResources:
        """Return all resources, with these prompts in place of those with the same names."""
        return {**self._resources, **templates}

    def known(self, templates: Templates, mode: RolloutMode) -> list[RolloutResult]:
        """Return a candidate's last result for each task in a mode."""
        digest = digest_of(templates)
        return [result for key, result in self._results.items() if key[:2] == (digest, mode)]

    async def evaluate(
        self, version: str, templates: Templates, tasks: Sequence[Any], mode: RolloutMode
    ) -> list[RolloutResult]:
        """Return the results of a candidate on each task, in order."""
        if not tasks:
            return []
        digest, loop = digest_of(templates), asyncio.get_running_loop()
        keys: list[_Key] = [(digest, mode, task) for task in tasks_of(tasks)]
        if self._next is None:
            opened = _Round()
            self._next = opened, asyncio.create_task(self._run(opened), name="evaluate-prompts")
        round, running = self._next
        for key, task in zip(keys, tasks, strict=True):
            round.pending.setdefault(key, _Pending(version, templates, task, loop.create_future()))
        round.evaluations += 1
        round.waiting += 1
        try:
            return await asyncio.gather(*(asyncio.shield(round.pending[key].result) for key in keys))
        finally:
            round.waiting -= 1
            if not round.waiting and not running.done():
                if (
                    self._next is not None and self._next[0] is round
                ):  # it had not begun, and will not accept later evaluations
                    self._next = None
                running.cancel()
                await asyncio.wait([running])

    async def _run(self, round: _Round) -> None:
        await asyncio.sleep(0)  # concurrent evaluations have been added by then
        self._next = None
        try:
            await self._answer(round)
        except Exception as error:  # each caller raises it
            for pending in round.pending.values():
                if not pending.result.done():
                    pending.result.set_exception(error)
        except BaseException:
            for pending in round.pending.values():
                pending.result.cancel()
            raise
        for key in [key for key in self._results if key[1] != "val"][:-MOST_WITH_MESSAGES]:
            self._results[key] = _without_messages(self._results[key])

    async def _answer(self, round: _Round) -> None:
        for key, pending in round.pending.items():
            earlier = self._results.get(key)
            if earlier is not None and earlier["final_reward"] is not None:  # a fault may not recur
                pending.result.set_result(earlier)
        unknown = {key: pending for key, pending in round.pending.items() if not pending.result.done()}
        if not unknown:
            return
        seconds = self._timeout * round.evaluations
        results = await self._run_tasks(unknown, seconds, is_final=not self._retries)
        failed = {key: unknown[key] for key, result in results.items() if result["final_reward"] is None}
        if failed and self._retries and self._seconds_left() > 0:
            logger.info("rollouts without a reward, which run once more: %d of %d", len(failed), len(unknown))
            results |= await self._run_tasks(failed, seconds, is_final=True)
        for key, pending in unknown.items():
            if not pending.result.done():
                pending.result.set_result(results[key])

    async def _run_tasks(
        self, pending: Mapping[_Key, _Pending], seconds: float, *, is_final: bool
    ) -> dict[_Key, RolloutResult]:
        """Enqueue tasks in one call and return their results.

        Results with a reward (with `is_final`: all results) are delivered as soon as their rollouts have ended.
        """
        requests = [
            EnqueueRolloutRequest(
                input=each.task,
                mode=key[1],
                resources_id=await self._publish(key[0], each),
                config=self._config,
                metadata={"prompt_version": each.version, "task": key[2]},
            )
            for key, each in pending.items()
        ]
        self.rollouts += len(requests)
        key_of: dict[str, _Key] = {}
        results: dict[_Key, RolloutResult] = {}

        def keep_keys(rollouts: Sequence[Rollout]) -> None:
            key_of.update(zip((rollout.rollout_id for rollout in rollouts), pending, strict=True))

        async def read_ended(rollouts: Sequence[Rollout]) -> None:
            for rollout, result in zip(rollouts, await self._read(rollouts), strict=True):
                key = key_of[rollout.rollout_id]
                self._results[key] = _without_messages(result) if key[1] == "val" else result
                results[key] = result
                if (is_final or result["final_reward"] is not None) and not pending[key].result.done():
                    pending[key].result.set_result(result)

        limit = max(0.0, min(seconds, self._seconds_left()))
        watcher = Watcher(on_enqueued=keep_keys, on_ended=read_ended)
        rollouts = await collect(self._store, requests, timeout_seconds=limit, watcher=watcher)
        if late := [rollout for rollout in rollouts if key_of[rollout.rollout_id] not in results]:
            await read_ended(late)
        return {key: results[key] for key in pending}

    async def _publish(self, digest: str, pending: _Pending) -> str:
        if digest not in self._published:
            resources_id = f"{self._prefix}-{pending.version}"
            await self._store.update_resources(resources_id, self.resources_with(pending.templates))
            self._published[digest] = resources_id
        return self._published[digest]


def _without_messages(result: RolloutResult) -> RolloutResult:
    return {**result, "messages": [], "spans": []}
