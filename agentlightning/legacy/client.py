"""`AgentLightningClient` gets tasks and resources from a v0.1 server and posts results; each call is sync and async."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
import warnings
from typing import Any, ClassVar

from agentlightning.types import ResourcesUpdate, RolloutLegacy, Task, TaskIfAny
from agentlightning.utils.http.auth import auth_headers, server_token

logger = logging.getLogger(__name__)

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Traffic to a server of ours takes no proxy of the environment."""
_warned: set[str] = set()


def warn_once(name: str, instead: str, *, depth: int = 1) -> None:
    """Warn that `name` is deprecated, unless a warning was given before in this process.

    `depth` is how many constructors of ours are between this function and the code of the user.
    """
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} speaks the deprecated v0.1 protocol; {instead}", DeprecationWarning, stacklevel=2 + depth
        )


class AgentLightningClient:
    """Deprecated: a client of `AgentLightningServer`. Use `LightningStoreClient`.

    It asks the server at `endpoint` for a task every `poll_interval` seconds. A server that does not answer gives None,
    and a warning in the log. Sends `AGL_TOKEN` if it is set.
    """

    _deprecated: ClassVar = ("AgentLightningClient", "use agl.Trainer, or agl.LightningStoreClient", 1)
    """Name, what to use instead, and how many constructors are between the warning and the user."""

    def __init__(self, endpoint: str, poll_interval: float = 5.0, timeout: float = 10.0) -> None:
        name, instead, depth = self._deprecated
        warn_once(name, instead, depth=depth)
        self.endpoint = endpoint.rstrip("/")
        self.poll_interval = poll_interval
        self.timeout = timeout
        self.task_count = 0
        """Tasks that were received."""
        self._resources: dict[str, ResourcesUpdate] = {}

    # --- tasks -----------------------------------------------------------------------------------------------------

    def poll_next_task(self) -> Task | None:
        """Return the next task; blocks until there is one."""
        while (task := self._ask_for_task()) is None:
            time.sleep(self.poll_interval)
        return task

    async def poll_next_task_async(self) -> Task | None:
        """Return the next task; waits until there is one."""
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
        """Return resources, asked for once per id; None if the server does not have them."""
        if resource_id not in self._resources:
            answer = self._request(f"/resources/{resource_id}")
            if answer is None:
                return None
            self._resources[resource_id] = ResourcesUpdate.model_validate(answer)
        return self._resources[resource_id]

    async def get_resources_by_id_async(self, resource_id: str) -> ResourcesUpdate | None:
        """Return resources, asked for once per id; None if the server does not have them."""
        return await asyncio.to_thread(self.get_resources_by_id, resource_id)

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the resources that were published last; None if there are none."""
        answer = self._request("/resources/latest")
        if answer is None:
            return None
        found = ResourcesUpdate.model_validate(answer)
        self._resources[found.resources_id] = found
        return found

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        """Return the resources that were published last; None if there are none."""
        return await asyncio.to_thread(self.get_latest_resources)

    # --- results ---------------------------------------------------------------------------------------------------

    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        """Send a result and return the server's answer."""
        return self._request("/rollout", rollout.model_dump_json().encode())

    async def post_rollout_async(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        """Send a result and return the server's answer."""
        return await asyncio.to_thread(self.post_rollout, rollout)

    def _request(self, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        headers = {"X-AgentLightning-Client": "true", "Content-Type": "application/json"}
        headers |= auth_headers(server_token())
        request = urllib.request.Request(self.endpoint + path, body, headers)
        try:
            with _opener.open(request, timeout=self.timeout) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:  # the protocol says: None, and the caller goes on
            logger.warning("%s%s gave no answer: %s", self.endpoint, path, error)
            return None
