"""`DevTaskLoader` is a v0.1 client without a server, to try an agent on a few tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from agentlightning.legacy.client import AgentLightningClient
from agentlightning.types import NamedResources, ResourcesUpdate, RolloutLegacy, Task

_LOCAL = "local"


class DevTaskLoader(AgentLightningClient):
    """Deprecated: gives its tasks in turn, for ever, and keeps the results in `rollouts`. Use `Trainer.dev`.

    `tasks` are inputs, or `Task`s, not both. `resources` are by name, or a `ResourcesUpdate`.

    Further settings are those of `AgentLightningClient`.

    Raises:
        ValueError: no tasks, or tasks of both kinds.
    """

    _deprecated = ("DevTaskLoader", "use agl.Trainer(...).dev(agent, tasks)", 2)

    def __init__(self, tasks: Sequence[Any], resources: NamedResources | ResourcesUpdate, **kwargs: Any) -> None:
        super().__init__(_LOCAL, **kwargs)
        if not tasks:
            raise ValueError("DevTaskLoader requires at least one task; got none")
        kinds = {isinstance(task, Task) for task in tasks}
        if len(kinds) > 1:
            raise ValueError("DevTaskLoader takes tasks of one kind: all of them Task, or none; got both")
        self.rollouts: list[RolloutLegacy] = []
        """Results, in the order in which they were posted."""
        if not isinstance(resources, ResourcesUpdate):
            now = time.time()
            resources = ResourcesUpdate(
                resources_id=_LOCAL, create_time=now, update_time=now, version=1, resources=resources
            )
        self._given = resources
        self._tasks = [
            task
            if isinstance(task, Task)
            else Task(rollout_id=f"local_task_{number:03d}", input=task, resources_id=resources.resources_id)
            for number, task in enumerate(tasks, start=1)
        ]

    @override
    def poll_next_task(self) -> Task | None:
        task = self._tasks[self.task_count % len(self._tasks)]
        self.task_count += 1
        return task

    @override
    async def poll_next_task_async(self) -> Task | None:
        return self.poll_next_task()

    @override
    def get_resources_by_id(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the resources.

        Raises:
            ValueError: they have another id.
        """
        if resource_id != self._given.resources_id:
            raise ValueError(f"There are no resources {resource_id!r}; this loader has {self._given.resources_id!r}")
        return self._given

    @override
    def get_latest_resources(self) -> ResourcesUpdate | None:
        return self._given

    @override
    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        self.rollouts.append(rollout)
        return {"status": "received", "rollout_id": rollout.rollout_id}

    @override
    def __repr__(self) -> str:
        return f"DevTaskLoader(num_tasks={len(self._tasks)}, resources={self._given.resources_id!r})"
