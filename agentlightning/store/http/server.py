"""LightningStoreServer, which serves any store over HTTP. The app is in `app.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.http.app import StoreApp
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.metrics import HttpMetrics
from agentlightning.store.operations import forward_operations
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.store.wrappers import complete
from agentlightning.utils.http.allowed_hosts import AllowedHosts, listed_origins
from agentlightning.utils.http.auth import ASGIApp, check_bind, server_token
from agentlightning.utils.metrics import MetricsBackend
from agentlightning.utils.server_launcher import LaunchMode, PythonServerLauncher, PythonServerLauncherArgs
from agentlightning.utils.version import VERSION

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4747


@forward_operations
class LightningStoreServer(LightningStore):
    """Serve `store` over HTTP. The server is a store itself.

    In the process that created it, it calls the store directly, from any thread. In a process that inherited it (fork)
    or received it (pickle), it sends requests to its address. Only the process that created it can `start` and `stop`
    it. `bind` opens the port before `start`. On an address other than loopback, it does not start without a token.

    `host` is 127.0.0.1 by default, `port` is 4747, and `token` is `AGL_TOKEN`. `allowed_hosts` (default
    `AGL_ALLOWED_HOSTS`) are additional accepted Host headers, `*` for all; on loopback only `localhost`, `127.0.0.1`,
    `[::1]` and the server's address are accepted by default. Pages of the origins in `cors_allow_origins` may send
    requests. `tracker` counts and times the requests. `launch_mode` is `thread` or `asyncio`; `launcher_args` sets
    host, port and mode together.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: str | Sequence[str] | None = None,
        launch_mode: LaunchMode = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        *,
        tracker: MetricsBackend | None = None,
        token: str | None = None,
        allowed_hosts: str | Sequence[str] | None = None,
    ) -> None:
        if launcher_args is not None and (host is not None or port is not None or launch_mode != "thread"):
            raise BadRequestError("host, port, and launch_mode cannot be set when launcher_args is provided.")
        if not store.capabilities.get("async_safe"):
            raise BadRequestError(
                f"{type(store).__name__} is not async-safe according to its capabilities, but a server calls it "
                "concurrently. Make it async-safe and set capabilities['async_safe'] to True."
            )
        self.store: LightningStore = store
        thread_safe = store.capabilities.get("thread_safe")
        self._inner: LightningStore = complete(store) if thread_safe else LightningStoreThreaded(store)
        self._token = token or server_token()
        self.launcher_args = launcher_args or PythonServerLauncherArgs(
            host=host, port=DEFAULT_PORT if port is None else port, launch_mode=launch_mode, healthcheck_url="/health"
        )
        bind_host = self.launcher_args.host or "127.0.0.1"
        check_bind(bind_host, self._token)
        hosts = AllowedHosts.of(bind_host, self.launcher_args.told_host, allowed_hosts)
        origins = listed_origins(cors_allow_origins)
        self.app = StoreApp(lambda: self._inner, token=self._token, hosts=hosts, origins=origins)
        app: ASGIApp = self.app if tracker is None else HttpMetrics(self.app, tracker, self.app.paths())
        version = ("x-agl-version", VERSION)
        self.server_launcher = PythonServerLauncher(app, self.launcher_args, headers=[version])
        self._owner_pid = os.getpid()
        self._client: LightningStoreClient | None = None
        self._client_pid = 0

    # --- life ------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """URL of the server for other processes."""
        return self.server_launcher.access_endpoint

    @override
    def otlp_traces_endpoint(self) -> str:
        return f"{self.endpoint}/v1/traces"

    def bind(self) -> None:
        """Open the port. Connections wait until `start` is called.

        Raises:
            RuntimeError: the port is in use.
        """
        self.server_launcher.bind()

    async def start(self) -> None:
        """Start the server; return when it accepts requests."""
        self._check_owner("start")
        await self.server_launcher.start()
        logger.info("store server listening on %s", self.server_launcher.endpoint)

    async def stop(self) -> None:
        """Stop the server and close its port. Long polls and event streams end immediately. The store stays open."""
        self._check_owner("stop")
        await self.server_launcher.stop()
        if self._inner is not self.store:
            await self._inner.close()

    async def run_forever(self) -> None:
        """Serve until cancelled."""
        self._check_owner("run_forever")
        await self.server_launcher.run_forever()

    def _check_owner(self, what: str) -> None:
        if os.getpid() != self._owner_pid:
            raise RuntimeError(f"only the process that created the server (pid {self._owner_pid}) can call {what}()")

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return LightningStoreClient, (self.endpoint,)

    # --- being a store ---------------------------------------------------------------------------------------------

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        inner = self.store.capabilities
        durable = bool(inner.get("persistent", inner.get("persistence")))
        return {
            "async_safe": True,
            "thread_safe": True,
            "zero_copy": True,
            "otlp_traces": True,
            "distributed": True,
            "persistent": durable,
            "persistence": durable,
        }

    @override
    async def close(self) -> None:
        if self._client is not None and self._client_pid == os.getpid():
            await self._client.close()

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        pid, target = os.getpid(), self._inner
        if pid != self._owner_pid:
            if self._client is None or self._client_pid != pid:
                self._client, self._client_pid = LightningStoreClient(self.endpoint, token=self._token), pid
            target = self._client
        return await getattr(target, operation)(*args, **kwargs)
