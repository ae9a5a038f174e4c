"""The state of a v0.1 server: tasks that wait, tasks that were claimed, results, resources. Pure: the time comes in."""

from __future__ import annotations

import uuid
from collections import deque
from typing import Any

from agentlightning.types import NamedResources, ResourcesUpdate, RolloutLegacy, RolloutMode, Task


class TaskQueue:
    """Tasks in the order of their arrival, and their results. Owned by one event loop."""

    def __init__(self, task_timeout_seconds: float) -> None:
        self._task_timeout_seconds = task_timeout_seconds
        self._waiting: deque[Task] = deque()
        self._claimed: dict[str, Task] = {}
        self._completed: dict[str, RolloutLegacy] = {}
        self._resources: dict[str, ResourcesUpdate] = {}
        self.latest: ResourcesUpdate | None = None
        """The resources that were published last."""

    def add(
        self,
        sample: object,
        mode: RolloutMode | None,
        resources_id: str | None,
        metadata: dict[str, Any] | None,
        now: float,
    ) -> str:
        """Queue a task and return its rollout id."""
        rollout_id = f"rollout-{uuid.uuid4()}"
        task = Task(
            rollout_id=rollout_id,
            input=sample,
            mode=mode,
            resources_id=resources_id,
            create_time=now,
            num_claims=0,
            metadata=metadata or {},
        )
        self._waiting.append(task)
        return rollout_id

    def claim(self, now: float) -> Task | None:
        """Return the next task; claims without a result for longer than the time-out go back into the queue first."""
        for task in list(self._claimed.values()):
            if now - (task.last_claim_time or now) > self._task_timeout_seconds:
                self._waiting.append(self._claimed.pop(task.rollout_id))
        if not self._waiting:
            return None
        task = self._waiting.popleft()
        claimed = task.model_copy(update={"last_claim_time": now, "num_claims": (task.num_claims or 0) + 1})
        self._claimed[task.rollout_id] = claimed
        return claimed

    def complete(self, rollout: RolloutLegacy) -> None:
        """Store a result; the task is done, whoever else has claimed it."""
        self._claimed.pop(rollout.rollout_id, None)
        self._completed[rollout.rollout_id] = rollout

    def take(self, rollout_id: str) -> RolloutLegacy | None:
        """Return a result and forget it; None if it is not there."""
        return self._completed.pop(rollout_id, None)

    def take_all(self) -> list[RolloutLegacy]:
        """Return all results and forget them."""
        found = list(self._completed.values())
        self._completed.clear()
        return found

    def publish(self, resources: NamedResources, now: float) -> str:
        """Publish resources under a fresh id, and return it."""
        resources_id = f"res-{uuid.uuid4()}"
        self.latest = ResourcesUpdate(
            resources_id=resources_id, create_time=now, update_time=now, version=1, resources=resources
        )
        self._resources[resources_id] = self.latest
        return resources_id

    def resources(self, resources_id: str) -> ResourcesUpdate | None:
        """Return resources by id; None if they are unknown."""
        return self._resources.get(resources_id)
