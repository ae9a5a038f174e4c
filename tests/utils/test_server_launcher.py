"""Serving an app on a real socket: start, stop, ports, threads."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import aiohttp
import pytest

from agentlightning.utils import server_launcher
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs, freeze_for_good

Mode = Literal["asyncio", "thread"]
both_modes = pytest.mark.parametrize("mode", ["asyncio", "thread"])


class App:
    """Answers `/` and `/thread` at once, `/sick` with 500 and `/park` never."""

    def __init__(self) -> None:
        self.parked = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/park":
            self.parked.set()
            await asyncio.Event().wait()
        body = threading.current_thread().name.encode()
        status = 500 if scope["path"] == "/sick" else 200
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def launcher(mode: Mode = "thread", app: App | None = None, **settings: object) -> PythonServerLauncher:
    args = PythonServerLauncherArgs(launch_mode=mode, shutdown_timeout=0.2)
    for name, value in settings.items():
        assert hasattr(args, name)
        setattr(args, name, value)
    return PythonServerLauncher(app or App(), args)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@both_modes
async def test_it_serves_from_start_to_stop_and_leaves_no_thread_and_no_port(mode: Mode) -> None:
    server = launcher(mode)
    await server.start()
    assert server.is_running()
    with pytest.raises(RuntimeError, match="already running"):
        await server.start()
    assert await get(server.endpoint) == (200, "agl-server" if mode == "thread" else "MainThread")
    await server.stop()
    await server.stop()  # a second time does nothing
    assert not server.is_running()
    assert refuses(server.port)
    assert "agl-server" not in [thread.name for thread in threading.enumerate()]


@both_modes
async def test_open_keep_alive_connections_do_not_hold_up_a_stop(mode: Mode) -> None:
    server = launcher(mode, shutdown_timeout=60.0, thread_join_timeout=60.0)
    await server.start()
    async with aiohttp.ClientSession() as session:
        async with session.get(server.endpoint) as reply:
            await reply.read()
        await asyncio.wait_for(server.stop(), 20)


@both_modes
async def test_parked_requests_are_answered_503_after_the_shutdown_timeout(mode: Mode) -> None:
    app = App()
    server = launcher(mode, app)
    await server.start()
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.get(f"{server.endpoint}/park"))
        while not app.parked.is_set():  # noqa: ASYNC110 -- set from the server's thread
            await asyncio.sleep(0.01)
        await asyncio.wait_for(server.stop(), 20)
        reply = await request
        assert reply.status == 503
        assert reply.headers["Retry-After"] == "1"


async def test_the_port_stays_the_same_across_restarts() -> None:
    server = launcher()
    endpoint = server.endpoint  # known before the start
    await server.start()
    await server.reload()
    assert server.endpoint == endpoint
    assert (await get(endpoint))[0] == 200
    await server.stop()


async def test_binding_comes_before_serving_and_connections_wait() -> None:
    server = launcher("asyncio")
    server.bind()
    server.bind()  # twice is once
    request = asyncio.create_task(get(server.endpoint))
    await asyncio.sleep(0)
    await server.start()
    assert (await request)[0] == 200
    await server.stop()


async def test_a_taken_port_is_an_error_that_says_host_port_and_what_to_do() -> None:
    first = launcher()
    first.bind()
    second = launcher(port=first.port)
    with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{first.port}: .*in use.*use another port"):
        await second.start()
    await first.stop()


@both_modes
async def test_an_unhealthy_server_is_stopped_and_reported(mode: Mode) -> None:
    server = launcher(mode, healthcheck_url="sick", startup_timeout=0.3)
    with pytest.raises(
        RuntimeError, match=r"not healthy at http://127\.0\.0\.1:\d+/sick after 0\.3 seconds; it was stopped"
    ):
        await server.start()
    assert not server.is_running()
    assert refuses(server.port)


async def test_an_unhealthy_server_stays_when_asked_to_and_a_healthy_one_starts() -> None:
    server = launcher(healthcheck_url="/sick", startup_timeout=0.3, kill_unhealthy_server=False)
    with pytest.raises(RuntimeError, match="left running"):
        await server.start()
    assert server.is_running()
    await server.stop()
    healthy = launcher(healthcheck_url="ok")
    await healthy.start()
    assert healthy.health_url == f"{healthy.endpoint}/ok"
    await healthy.stop()


@both_modes
async def test_run_forever_ends_cleanly_when_cancelled(mode: Mode) -> None:
    server = launcher(mode)
    task = asyncio.create_task(server.run_forever())
    assert (await get(server.endpoint))[0] == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert refuses(server.port)


def test_start_and_stop_may_come_from_different_loops_in_thread_mode() -> None:
    server = launcher()
    asyncio.run(server.start())
    assert server.is_running()
    asyncio.run(server.stop())
    assert refuses(server.port)


def test_a_loop_that_ends_takes_its_server_along() -> None:
    server = launcher("asyncio")
    asyncio.run(server.start())
    assert not server.is_running()
    assert refuses(server.port)


def test_a_forked_child_lets_go_of_the_port() -> None:
    server = launcher()
    server.bind()
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(to_child[0], 1)
        os.write(to_parent[1], b"1")
        os.read(to_child[0], 1)
        os._exit(0)
    os.write(to_child[1], b"1")
    os.read(to_parent[0], 1)  # the child lives, and its hooks have run
    asyncio.run(server.stop())
    assert refuses(server.port)
    os.write(to_child[1], b"1")
    os.waitpid(child, 0)
    for fd in (*to_child, *to_parent):
        os.close(fd)


def test_modes_that_cannot_be_served_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mp' is not supported.*'thread'"):
        launcher("mp")  # pyright: ignore[reportArgumentType] -- the point of the test
    with pytest.raises(ValueError, match="Unsupported launch mode: fast"):
        launcher("fast")  # pyright: ignore[reportArgumentType] -- the point of the test


@pytest.mark.parametrize(
    ("settings", "bound", "address"),
    [
        ({}, "http://127.0.0.1:4747", "http://127.0.0.1:4747"),
        ({"host": "::1"}, "http://[::1]:4747", "http://[::1]:4747"),
        ({"host": "0.0.0.0", "access_host": "gpu-box"}, "http://0.0.0.0:4747", "http://gpu-box:4747"),
    ],
)
def test_an_address_is_loopback_unless_said_otherwise(settings: dict[str, Any], bound: str, address: str) -> None:
    server = launcher(port=4747, **settings)
    assert (server.endpoint, server.access_endpoint) == (bound, address)
    assert "0.0.0.0" not in launcher(host="0.0.0.0", port=4747).access_endpoint
    assert "0.0.0.0" not in launcher(host="0.0.0.0", port=4747).access_endpoint


async def test_a_failing_serve_context_is_the_cause_of_the_failed_start(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> object:
        raise OSError("no such device")

    args = PythonServerLauncherArgs(launch_mode="thread")
    server = PythonServerLauncher(App(), args, serve_context=broken)  # pyright: ignore[reportArgumentType] -- never returns
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=r"failed to start.*no such device"):
        await server.start()
    assert not caplog.records  # raised, so not logged as well


# --- the garbage collector -------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' own process has frozen what collection loaded (tests/conftest.py)."""
    monkeypatch.setattr(server_launcher, "_for_good", False)
    gc.unfreeze()
    gc.collect()
    yield
    gc.collect()
    gc.freeze()


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def is_freed(cycle: weakref.ref[Cycle]) -> bool:
    gc.collect()
    return cycle() is None


@pytest.mark.heavy
@pytest.mark.usefixtures("nothing_is_frozen")
@pytest.mark.parametrize("for_good", [False, True])
async def test_a_server_keeps_what_was_loaded_before_it_out_of_collections_until_the_last_one_ends(
    for_good: bool,
) -> None:
    before = Cycle()
    freed_before = weakref.ref(before)
    if for_good:
        freeze_for_good()
    between = Cycle()
    freed_between = weakref.ref(between)
    first, second = launcher(), launcher()
    await first.start()
    assert for_good or len(gc.get_objects()) < gc.get_freeze_count() / 2  # what a full collection walks over
    await second.start()
    during = Cycle()
    freed_during = weakref.ref(during)
    del before, between, during
    await first.stop()
    assert is_freed(freed_during)  # what comes after a server's begin is collected as ever
    assert not is_freed(freed_before)
    assert is_freed(freed_between) is for_good
    await second.stop()
    assert is_freed(freed_before) is not for_good


@pytest.mark.heavy
@pytest.mark.usefixtures("nothing_is_frozen")
def test_a_block_that_fails_gives_its_objects_back() -> None:
    before = Cycle()
    freed = weakref.ref(before)
    with pytest.raises(KeyError), server_launcher.short_pauses():
        raise KeyError
    del before
    assert is_freed(freed)
