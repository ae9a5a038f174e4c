"""The v0.1 client: gets tasks and resources from a server and posts results. Each call has a sync and an async form.

`DevTaskLoader` is a client without a server, to try an agent on a few tasks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from typing_extensions import override

from agentlightning.types import NamedResources, ResourcesUpdate, RolloutLegacy, Task, TaskIfAny
from agentlightning.utils.http.auth import auth_headers, server_token

logger = logging.getLogger(__name__)

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without the environment's proxies, for traffic to our servers."""
_warned: set[str] = set()
_LOCAL = "local"


def warn_once(name: str, instead: str, *, depth: int = 1) -> None:
    """Warn that `name` is deprecated, unless this process has warned before.

    `depth` is the number of the package's constructors between this function and the user's code.
    """
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"{name} uses the deprecated v0.1 protocol; {instead}", DeprecationWarning, stacklevel=2 + depth)


class AgentLightningClient:
    """Deprecated: a client of `AgentLightningServer`. Use `LightningStoreClient`.

    It polls the server at `endpoint` for a task every `poll_interval` seconds. If the server does not respond, methods
    return None and log a warning. Requests contain `AGL_TOKEN` if it is set.
    """

    _deprecated: ClassVar = ("AgentLightningClient", "use agl.Trainer, or agl.LightningStoreClient", 1)
    """Name, replacement, and the number of constructors between the warning and the user."""

    def __init__(self, endpoint: str, poll_interval: float = 5.0, timeout: float = 10.0) -> None:
        name, instead, depth = self._deprecated
        warn_once(name, instead, depth=depth)
        self.endpoint = endpoint.rstrip("/")
        self.poll_interval = poll_interval
        self.timeout = timeout
        self.task_count = 0
        """Number of received tasks."""
        self._resources: dict[str, ResourcesUpdate] = {}

    # --- tasks -----------------------------------------------------------------------------------------------------

    def poll_next_task(self) -> Task | None:
        """Return the next task; block until one is available."""
        while (task := self._ask_for_task()) is None:
            time.sleep(self.poll_interval)
        return task

    async def poll_next_task_async(self) -> Task | None:
        while (task := await asyncio.to_thread(self._ask_for_task)) is None:  # noqa: ASYNC110 -- the protocol polls
            await asyncio.sleep(self.poll_interval)
        return task

    def _ask_for_task(self) -> Task | None:
        answer = self._request("/task")
        task = None if answer is None else TaskIfAny.model_validate(answer).task
        self.task_count += task is not None
        return task

    # --- resources -------------------------------------------------------------------------------------------------

    def get_resources_by_id(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the resources with this id, or None if the server does not have them. Each id is requested once."""
        if resource_id not in self._resources:
            answer = self._request(f"/resources/{resource_id}")
            if answer is None:
                return None
            self._resources[resource_id] = ResourcesUpdate.model_validate(answer)
        return self._resources[resource_id]

    async def get_resources_by_id_async(self, resource_id: str) -> ResourcesUpdate | None:
        return await asyncio.to_thread(self.get_resources_by_id, resource_id)

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the resources that were published last, or None."""
        answer = self._request("/resources/latest")
        if answer is None:
            return None
        latest = ResourcesUpdate.model_validate(answer)
        self._resources[latest.resources_id] = latest
        return latest

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        return await asyncio.to_thread(self.get_latest_resources)

    # --- results ---------------------------------------------------------------------------------------------------

    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        """Send a result and return the server's response."""
        return self._request("/rollout", rollout.model_dump_json().encode())

    async def post_rollout_async(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        return await asyncio.to_thread(self.post_rollout, rollout)

    def _request(self, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        headers = {"X-AgentLightning-Client": "true", "Content-Type": "application/json"}
        headers |= auth_headers(server_token())
        request = urllib.request.Request(self.endpoint + path, body, headers)
        try:
            with _opener.open(request, timeout=self.timeout) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:  # by the protocol: return None, and the caller continues
            logger.warning("%s%s did not respond: %s", self.endpoint, path, error)
            return None


class DevTaskLoader(AgentLightningClient):
    """Deprecated: returns its tasks in turn, endlessly, and stores the results in `rollouts`. Use `Trainer.dev`.

    `tasks` are inputs or `Task`s, but not both. `resources` is a dict by name or a `ResourcesUpdate`.

    Other settings are those of `AgentLightningClient`.

    Raises:
        ValueError: `tasks` is empty or mixes both kinds.
    """

    _deprecated = ("DevTaskLoader", "use agl.Trainer(...).dev(agent, tasks)", 2)

    def __init__(self, tasks: Sequence[Any], resources: NamedResources | ResourcesUpdate, **kwargs: Any) -> None:
        super().__init__(_LOCAL, **kwargs)
        if not tasks:
            raise ValueError("DevTaskLoader requires at least one task; got none")
        kinds = {isinstance(task, Task) for task in tasks}
        if len(kinds) > 1:
            raise ValueError("DevTaskLoader requires either Task objects or inputs as tasks; got both")
        self.rollouts: list[RolloutLegacy] = []
        """Results, in the order in which they were posted."""
        if not isinstance(resources, ResourcesUpdate):
            now = time.time()
            resources = ResourcesUpdate(
                resources_id=_LOCAL, create_time=now, update_time=now, version=1, resources=resources
            )
        self._local = resources
        self._tasks = [
            task
            if isinstance(task, Task)
            else Task(rollout_id=f"local_task_{number:03d}", input=task, resources_id=resources.resources_id)
            for number, task in enumerate(tasks, start=1)
        ]

    @override
    def _ask_for_task(self) -> Task:
        task = self._tasks[self.task_count % len(self._tasks)]
        self.task_count += 1
        return task

    @override
    def get_resources_by_id(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the resources.

        Raises:
            ValueError: `resource_id` is another id.
        """
        if resource_id != self._local.resources_id:
            raise ValueError(f"Resources {resource_id!r} do not exist; this loader has {self._local.resources_id!r}")
        return self._local

    @override
    def get_latest_resources(self) -> ResourcesUpdate | None:
        return self._local

    @override
    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        self.rollouts.append(rollout)
        return {"status": "received", "rollout_id": rollout.rollout_id}

    @override
    def __repr__(self) -> str:
        return f"DevTaskLoader(num_tasks={len(self._tasks)}, resources={self._local.resources_id!r})"
