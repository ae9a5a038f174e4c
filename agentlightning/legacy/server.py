"""`AgentLightningServer`, the v0.1 server, keeps tasks and results in memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError, BusyError
from agentlightning.legacy.client import warn_once
from agentlightning.types import (
    GenericResponse,
    NamedResources,
    ResourcesUpdate,
    RolloutLegacy,
    RolloutMode,
    Task,
    TaskIfAny,
)
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import ASGIApp, BearerAuth, check_bind, server_token
from agentlightning.utils.http.byte_budget import client_hold, read_body
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

_WAKE_SECONDS = 1.0
"""Maximum seconds between two checks of a waiting caller, which every result also wakes."""


class AgentLightningServer:
    """Deprecated: distributes tasks to v0.1 clients and collects their results. Use a `LightningStoreServer`.

    It listens on `host` and `port`. A task without a result after `task_timeout_seconds` is requeued. Call its methods
    from the loop that called `start`. Beyond loopback it requires `AGL_TOKEN`, like every server.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8000, task_timeout_seconds: float = 300.0) -> None:
        warn_once("AgentLightningServer", "use agl.Trainer, or agl.LightningStoreServer")
        token = server_token()
        check_bind(host, token)
        self.host, self.port = host, port
        self.startup_event = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._task_timeout = task_timeout_seconds
        self._waiting: deque[Task] = deque()
        self._claimed: dict[str, Task] = {}
        self._completed: dict[str, RolloutLegacy] = {}
        self._resources: dict[str, ResourcesUpdate] = {}
        """Resources by id, in the order of publication."""
        self._result_posted = asyncio.Event()
        routes = [
            Route("/task", self._claim, methods=["GET"]),
            Route("/resources/{resources_id}", self._get_resources, methods=["GET"]),
            Route("/rollout", self._post_rollout, methods=["POST"]),
        ]
        app: ASGIApp = Starlette(routes=routes)
        if token is not None:
            app = BearerAuth(app, token, lambda scope: False)
        app = HostDoor(app, AllowedHosts.of(host, host, None), same_origin=token is None)
        self._launcher = PythonServerLauncher(app, PythonServerLauncherArgs(host=host, port=port))

    @property
    def endpoint(self) -> str:
        """URL for clients."""
        return self._launcher.access_endpoint

    async def start(self) -> None:
        """Serve in the running loop; return once the server accepts requests."""
        self.loop = asyncio.get_running_loop()
        await self._launcher.start()
        self.startup_event.set()

    async def stop(self) -> None:
        """Stop serving. Tasks and results stay in memory."""
        self.startup_event.clear()
        if self._launcher.is_running():
            await self._launcher.stop()

    async def run_forever(self) -> None:
        """Serve until cancelled."""
        await self.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.stop()

    # --- for the program that trains -------------------------------------------------------------------------------

    async def queue_task(
        self,
        sample: object,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Queue a task, `sample`, and return its rollout id.

        Raises:
            RuntimeError: the server is not running.
        """
        self._check_running()
        task = Task(
            rollout_id=f"rollout-{uuid.uuid4()}",
            input=sample,
            mode=mode,
            resources_id=resources_id,
            create_time=time.time(),
            num_claims=0,
            metadata=metadata or {},
        )
        self._waiting.append(task)
        return task.rollout_id

    async def update_resources(self, resources: NamedResources) -> str:
        """Publish resources as the latest ones and return their id."""
        self._check_running()
        resources_id, now = f"res-{uuid.uuid4()}", time.time()
        self._resources[resources_id] = ResourcesUpdate(
            resources_id=resources_id, create_time=now, update_time=now, version=1, resources=resources
        )
        return resources_id

    async def get_completed_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Return a result and delete it; None if it is not available yet."""
        self._check_running()
        return self._completed.pop(rollout_id, None)

    async def poll_completed_rollout(self, rollout_id: str, timeout: float | None = None) -> RolloutLegacy | None:
        """Wait at most `timeout` seconds for a result, return it and delete it; None after the timeout."""
        end = None if timeout is None else time.monotonic() + timeout
        while (rollout := await self.get_completed_rollout(rollout_id)) is None:
            remaining = _WAKE_SECONDS if end is None else min(_WAKE_SECONDS, end - time.monotonic())
            if remaining <= 0:
                return None
            self._result_posted.clear()
            await asyncio.wait([task := asyncio.ensure_future(self._result_posted.wait())], timeout=remaining)
            task.cancel()
        return rollout

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Return all results and delete them."""
        self._check_running()
        results, self._completed = self._completed, {}
        return list(results.values())

    def _check_running(self) -> None:
        if not self.startup_event.is_set():
            raise RuntimeError("The server is not running; await start() first")

    # --- for clients -----------------------------------------------------------------------------------------------

    async def _claim(self, request: Request) -> Response:
        """Respond with the next task; requeue expired claims first."""
        if not self.startup_event.is_set():
            return _refused(503, "The server has not started.")
        now = time.time()
        for task in list(self._claimed.values()):
            if now - (task.last_claim_time or now) > self._task_timeout:
                self._waiting.append(self._claimed.pop(task.rollout_id))
        if not self._waiting:
            return _model(TaskIfAny(is_available=False, task=None))
        task = self._waiting.popleft()
        claimed_task = task.model_copy(update={"last_claim_time": now, "num_claims": (task.num_claims or 0) + 1})
        self._claimed[task.rollout_id] = claimed_task
        return _model(TaskIfAny(is_available=True, task=claimed_task))

    async def _get_resources(self, request: Request) -> Response:
        """Respond with the resources of an id; `latest` are those published last."""
        if not self.startup_event.is_set():
            return _refused(503, "The server has not started.")
        resources_id = request.path_params["resources_id"]
        resources = self._resources.get(resources_id)
        message = f"Resources {resources_id!r} not found."
        if resources_id == "latest":
            resources = next(reversed(self._resources.values()), None)
            message = "No resources have been set on the server."
        return _refused(404, message) if resources is None else _model(resources)

    async def _post_rollout(self, request: Request) -> Response:
        try:
            with client_hold(request.scope) as hold:
                body = await read_body(request.scope, request.receive, hold)
                rollout = RolloutLegacy.model_validate_json(body)
        except AgentLightningError as error:
            headers = {"Retry-After": "1"} if isinstance(error, BusyError) else None
            return _refused(error.http_status, str(error), headers)
        except ValidationError as error:
            return _refused(
                422, f"The body is not a RolloutLegacy: {error.errors(include_url=False, include_input=False)}"
            )
        self._claimed.pop(rollout.rollout_id, None)
        self._completed[rollout.rollout_id] = rollout
        self._result_posted.set()
        return _model(GenericResponse(status="ok", message=f"Rollout {rollout.rollout_id} received."))


def _model(value: TaskIfAny | ResourcesUpdate | GenericResponse) -> Response:
    return Response(value.model_dump_json(), media_type="application/json")


def _refused(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)
