"""`AgentLightningServer`, the v0.1 server, keeps tasks and results in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError, BusyError
from agentlightning.legacy.client import warn_once
from agentlightning.legacy.task_queue import TaskQueue
from agentlightning.types import (
    GenericResponse,
    NamedResources,
    ResourcesUpdate,
    RolloutLegacy,
    RolloutMode,
    TaskIfAny,
)
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import ASGIApp, BearerAuth, check_bind, server_token
from agentlightning.utils.http.byte_budget import client_hold, read_body
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs

_NEWS_SECONDS = 1.0
"""A waiting caller is woken by every result, and looks again at least so often."""


class AgentLightningServer:
    """Deprecated: gives tasks to v0.1 clients and collects their results. Use a `LightningStoreServer`.

    It listens on `host` and `port`; a task that no client reports within `task_timeout_seconds` is queued again. Its
    methods belong to the loop that called `start`. Beyond loopback it needs `AGL_TOKEN`, as every server does.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8000, task_timeout_seconds: float = 300.0) -> None:
        warn_once("AgentLightningServer", "use agl.Trainer, or agl.LightningStoreServer")
        token = server_token()
        check_bind(host, token)
        self.host, self.port = host, port
        self.startup_event = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._queue = TaskQueue(task_timeout_seconds)
        self._news = asyncio.Event()
        app: ASGIApp = Starlette(routes=self._routes())
        if token is not None:
            app = BearerAuth(app, token, lambda scope: False)
        app = HostDoor(app, AllowedHosts.of(host, host, None), same_origin=token is None)
        self._launcher = PythonServerLauncher(app, PythonServerLauncherArgs(host=host, port=port))

    @property
    def endpoint(self) -> str:
        """URL to tell clients."""
        return self._launcher.access_endpoint

    async def start(self) -> None:
        """Serve in the running loop; returns when requests are answered."""
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
            RuntimeError: the server does not run.
        """
        return self._running().add(sample, mode, resources_id, metadata, time.time())

    async def update_resources(self, resources: NamedResources) -> str:
        """Publish resources, which become the latest, and return their id."""
        return self._running().publish(resources, time.time())

    async def get_completed_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Return a result and forget it; None if it is not there yet."""
        return self._running().take(rollout_id)

    async def poll_completed_rollout(self, rollout_id: str, timeout: float | None = None) -> RolloutLegacy | None:
        """Wait for a result, at most `timeout` seconds, and forget it; None when time is up."""
        end = None if timeout is None else time.monotonic() + timeout
        while (found := self._running().take(rollout_id)) is None:
            left = _NEWS_SECONDS if end is None else min(_NEWS_SECONDS, end - time.monotonic())
            if left <= 0:
                return None
            self._news.clear()
            await asyncio.wait([task := asyncio.ensure_future(self._news.wait())], timeout=left)
            task.cancel()
        return found

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Return all results and forget them."""
        return self._running().take_all()

    def _running(self) -> TaskQueue:
        if not self.startup_event.is_set():
            raise RuntimeError("The server does not run; await start() first")
        return self._queue

    # --- for clients -----------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        return [
            Route("/task", self._task, methods=["GET"]),
            Route("/resources/latest", self._latest, methods=["GET"]),
            Route("/resources/{resources_id}", self._resources, methods=["GET"]),
            Route("/rollout", self._rollout, methods=["POST"]),
        ]

    async def _task(self, request: Request) -> Response:
        if not self.startup_event.is_set():
            return _refused(503, "The server has not started.")
        task = self._queue.claim(time.time())
        return _model(TaskIfAny(is_available=task is not None, task=task))

    async def _latest(self, request: Request) -> Response:
        return self._resources_response(self._queue.latest, "No resources have been set on the server.")

    async def _resources(self, request: Request) -> Response:
        resources_id = request.path_params["resources_id"]
        return self._resources_response(self._queue.resources(resources_id), f"Resources {resources_id!r} not found.")

    def _resources_response(self, found: ResourcesUpdate | None, absent: str) -> Response:
        if not self.startup_event.is_set():
            return _refused(503, "The server has not started.")
        return _refused(404, absent) if found is None else _model(found)

    async def _rollout(self, request: Request) -> Response:
        try:
            with client_hold(request.scope) as hold:
                body = await read_body(request.scope, request.receive, hold)
                rollout = RolloutLegacy.model_validate_json(body)
        except AgentLightningError as error:
            headers = {"Retry-After": "1"} if isinstance(error, BusyError) else None
            return _refused(error.http_status, str(error), headers)
        except ValidationError as error:
            return _refused(
                422, f"The body is no RolloutLegacy: {error.errors(include_url=False, include_input=False)}"
            )
        self._queue.complete(rollout)
        self._news.set()
        return _model(GenericResponse(status="ok", message=f"Rollout {rollout.rollout_id} received."))


def _model(value: TaskIfAny | ResourcesUpdate | GenericResponse) -> Response:
    return Response(value.model_dump_json(), media_type="application/json")


def _refused(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status_code=status, headers=headers)
