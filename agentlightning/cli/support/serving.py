"""Serve a store until a signal ends it: the first one in good order, the second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentlightning.cli.support.output import say
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.spec import public_form, retention_policy, store_from_spec
from agentlightning.utils.http.auth import check_bind, server_token

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

_ECHO_SECONDS = 0.3
"""A signal that follows so soon is the same one: `timeout`, for example, signals a child and then its group."""

_LOOK_SECONDS = 1.0
"""Between two looks whether the server still runs, which tells nobody when it ends by itself."""


@dataclass(frozen=True)
class Serving:
    """What is served where, as the command line says it."""

    spec: str
    host: str
    port: int
    cors_origins: list[str]
    allowed_hosts: list[str]
    trackers: list[str]
    lease_seconds: float | None
    keep_last: int | None
    max_age: float | None
    max_bytes: int | None


def serve(serving: Serving) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code, 0. A second signal ends the process: 128 and its number.

    At the end the port is free, requests in progress are answered (503 with `Retry-After` where they wait for
    something), and everything that was answered is stored.
    """
    asyncio.run(_serve(serving))
    say("store closed")
    return 0


async def _serve(serving: Serving) -> None:
    check_bind(serving.host, server_token())
    tracker = _tracker(serving.trackers)
    store = store_from_spec(serving.spec, **_settings(serving, tracker))
    options: dict[str, Any] = {"allowed_hosts": serving.allowed_hosts, "tracker": tracker}
    try:
        server = LightningStoreServer(
            store,
            host=serving.host,
            port=serving.port,
            cors_allow_origins=serving.cors_origins,
            **{name: value for name, value in options.items() if value},
        )
        server.bind()
        end = end_of_process()
        say(f"store in {_where(serving.spec)} listens on {server.endpoint}")
        await _run_until(server, end)
    finally:
        await store.close()


def _settings(serving: Serving, tracker: MetricsBackend | None) -> dict[str, Any]:
    """Return the settings of the store's class that were given."""
    bounds = {"keep_last": serving.keep_last, "max_age": serving.max_age, "max_bytes": serving.max_bytes}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    settings = {
        "lease_seconds": serving.lease_seconds,
        "retention": retention_policy(**given) if given else None,
        "tracker": tracker,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _tracker(names: list[str]) -> MetricsBackend | None:
    if not names:
        return None
    from agentlightning.utils.metrics import ConsoleMetricsBackend, MultiMetricsBackend, PrometheusMetricsBackend

    kinds = {"prometheus": PrometheusMetricsBackend, "console": ConsoleMetricsBackend}
    backends: list[MetricsBackend] = [kinds[name]() for name in dict.fromkeys(names)]
    return backends[0] if len(backends) == 1 else MultiMetricsBackend(backends)


def _where(spec: str) -> str:
    return public_form(spec).removeprefix("sqlite:///")


def end_of_process() -> asyncio.Future[None]:
    """Return what resolves at the first SIGINT or SIGTERM; the second one ends the process where it stands."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[None] = loop.create_future()
    first = 0.0

    def note(number: int) -> None:
        nonlocal first
        if not asked.done():
            first = loop.time()
            asked.set_result(None)
            say("stopping: requests in progress are answered first")
        elif loop.time() - first > _ECHO_SECONDS:
            os.write(2, b"ended at once\n")
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    return asked


async def _run_until(server: LightningStoreServer, end: asyncio.Future[None]) -> None:
    """Serve until `end`.

    Raises:
        RuntimeError: serving ended by itself.
    """
    await server.start()
    try:
        while not end.done():
            await asyncio.wait([end], timeout=_LOOK_SECONDS)
            if not end.done() and not server.server_launcher.is_running():
                raise RuntimeError("The server has ended by itself; the log says why")
    finally:
        await server.stop()
