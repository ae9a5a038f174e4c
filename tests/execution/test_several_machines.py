"""Roles in processes that share only a port, as on several machines: they wait, survive, get notices, give up."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.execution import stop_run
from agentlightning.store import LightningStoreClient
from agentlightning.utils.http.sockets import listen
from tests.stubs.ports import free_port
from tests.stubs.processes import ROOT, Process, Terminal, lives
from tests.stubs.running import serving

pytestmark = pytest.mark.slow
LIMIT_SECONDS = 30
REWARDS = "[0.1, 0.2, 0.3]"
SOLVED = re.escape(f"rewards {REWARDS}")


Start = Callable[..., Process]


@pytest.fixture
def start(terminal: Terminal) -> Start:
    """Starts `machine_program.py` with the environment of one machine; `prefix` is a command that runs it there."""

    def started(role: str, port: int, *, prefix: tuple[str, ...] = (), **environment: str) -> Process:
        own = {"AGL_CURRENT_ROLE": role, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
        command = [*prefix, sys.executable, "-m", "tests.execution.machine_program"]
        return terminal(command, folder=ROOT, **{**own, **environment})

    return started


@pytest.mark.parametrize("n_runners", [pytest.param("1", marks=pytest.mark.heavy), "2"])
def test_runners_wait_for_the_server_and_say_so_and_end_when_they_are_told(start: Start, n_runners: str) -> None:
    port = free_port()
    runners = start("runner", port, N_RUNNERS=n_runners)
    runners.until(f"The store at http://127.0.0.1:{port} does not respond yet; waiting up to 60 s")
    algorithm = start("algorithm", port)
    algorithm.ends(0, f"algorithm {REWARDS}\n")
    assert runners.ends(0, "responds after").endswith("runner None\n")


@pytest.mark.heavy
def test_runners_survive_the_death_of_the_server_and_serve_the_one_that_follows(start: Start) -> None:
    port = free_port()
    runners, first = start("runner", port), start("algorithm", port, ALGORITHM="stays")
    first.until(SOLVED)
    first.popen.send_signal(signal.SIGKILL)
    runners.until("has stopped responding")
    second = start("algorithm", port)
    second.ends(0)
    runners.ends(0, "responds after")


def test_runners_give_up_after_the_stated_outage_with_an_exit_code_of_its_own(start: Start) -> None:
    port = free_port()
    runners = start("runner", port, OUTAGE="1")
    runners.until("does not respond yet; waiting up to 1 s")
    before = runners.family()
    away = f"StoreUnreachableError: No response from the store at http://127.0.0.1:{port} for"
    runners.ends(69, away, "(store_unreachable_timeout=1; last:")
    assert not [process for process in before if lives(process)]


async def test_the_algorithm_bears_an_outage_for_as_long_as_its_runner_states(start: Start) -> None:
    async with serving() as server:
        shared = {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": server.endpoint}
        algorithm = start("algorithm", 0, OUTAGE="1", **shared)
        for _ in range(3):  # then it waits for their ends, which do not come
            assert await server.dequeue_rollout(timeout=LIMIT_SECONDS) is not None
    await asyncio.to_thread(algorithm.ends, 69, "did not respond to wait_for_rollouts")


@pytest.mark.heavy
def test_runners_that_are_interrupted_leave_nothing_and_the_run_goes_on(start: Start) -> None:
    port = free_port()
    runners, algorithm = start("runner", port), start("algorithm", port, ALGORITHM="stays")
    algorithm.until(SOLVED)
    before = runners.family()
    runners.popen.send_signal(signal.SIGINT)
    runners.ended()
    assert "KeyboardInterrupt" in runners.said
    assert not [process for process in before if lives(process)]
    assert algorithm.code is None


@pytest.mark.parametrize("n_runners", ["1", pytest.param("2", marks=pytest.mark.heavy)])
def test_runners_that_are_terminated_finish_what_they_run_and_others_go_on(start: Start, n_runners: str) -> None:
    port = free_port()
    leaving = start("runner", port, SLOW="1", N_RUNNERS=n_runners)
    algorithm = start("algorithm", port)
    leaving.until("running 1")
    leaving.popen.send_signal(signal.SIGTERM)
    staying = start("runner", port, N_RUNNERS="1")
    leaving.ends(143, "SIGTERM: no further rollouts; running rollouts have 5 s")
    algorithm.ends(0, f"algorithm {REWARDS}\n")
    staying.ends(0)


@pytest.mark.heavy
def test_a_token_that_the_server_refuses_ends_the_runners_at_once(start: Start) -> None:
    port = free_port()
    algorithm = start("algorithm", port, AGL_TOKEN="right", ALGORITHM="stays")
    runners = start("runner", port, AGL_TOKEN="wrong", N_RUNNERS="1")
    runners.ends(77, "UnauthorizedError")
    algorithm.popen.kill()


@pytest.mark.heavy
async def test_a_run_on_a_store_of_its_own_is_stopped_through_it(start: Start, client: LightningStoreClient) -> None:
    """`agl run stop` ends algorithm and runners, each with exit code 0."""
    address = client.server_address_root
    shared = {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": address, "AGL_RUN_ID": "run-7"}
    algorithm = start("algorithm", 0, ALGORITHM="stays", **shared)
    runners = start("runner", 0, **shared)
    other = start("runner", 0, **{**shared, "AGL_RUN_ID": "run-8"})
    await asyncio.to_thread(algorithm.until, SOLVED)
    await stop_run(client, "run-7", reason="enough")
    for machine in (algorithm, runners):
        await asyncio.to_thread(machine.succeeded)
    assert other.code is None
    late = start("runner", 0, **shared)
    await asyncio.to_thread(late.succeeded)  # the run is over: nothing to wait for


# --- two network namespaces -------------------------------------------------------------------------------------------


def test_algorithm_and_runners_find_each_other_across_two_networks(start: Start, nodes: list[tuple[str, ...]]) -> None:
    runners = start("runner", 4747, prefix=nodes[1], AGL_TOKEN=TOKEN, AGL_SERVER_HOST="10.79.5.1")
    runners.until("The store at http://10.79.5.1:4747 does not respond yet")
    algorithm = start("algorithm", 4747, prefix=nodes[0], AGL_TOKEN=TOKEN, AGL_SERVER_HOST="0.0.0.0")
    algorithm.ends(0, f"algorithm {REWARDS}\n")
    began = time.monotonic()
    runners.ends(0)
    assert time.monotonic() - began < LIMIT_SECONDS


# --- the role `both` on several machines -----------------------------------------------------------------------------

TOKEN = "a-token-for-the-machines-of-this-test"


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, ...]]]:
    """Two network namespaces, 10.79.5.1 and 10.79.5.2, as prefixes of commands that run there."""
    names = [f"agl{os.getpid()}{letter}" for letter in "ab"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    if (made := ip("netns", "add", names[0])).returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "near", "netns", names[0], "type", "veth", "peer", "name", "far", "netns", names[1])
        for name, device, address in zip(names, ("near", "far"), ("10.79.5.1/24", "10.79.5.2/24"), strict=True):
            ip("-n", name, "addr", "add", address, "dev", device)
            for each in ("lo", device):
                assert ip("-n", name, "link", "set", each, "up").returncode == 0
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.parametrize("head_first", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_of_two_nodes_with_both_roles_the_one_that_has_the_address_serves_and_the_other_joins(
    start: Start, nodes: list[tuple[str, ...]], tmp_path: Path, head_first: bool
) -> None:
    shared = {"AGL_SERVER_HOST": "10.79.5.1", "AGL_TOKEN": TOKEN, "N_RUNNERS": "1", "MEET": str(tmp_path)}
    machines: dict[bool, Process] = {}
    for is_head in (head_first, not head_first):
        machines[is_head] = start("both", 4747, prefix=nodes[0 if is_head else 1], **shared)
        if len(machines) == 1:
            machines[is_head].until("running 1" if is_head else "does not respond yet")
    machines[True].ends(0, f"both {REWARDS}\n", "running")
    line = (
        "10.79.5.1 is not an address of this machine: this process joins the run at http://10.79.5.1:4747 with 1 runner"
    )
    other = machines[False].ends(0, "running")
    assert (other.count(line), other.endswith("both None\n")) == (1, True), other


def test_of_two_processes_with_both_roles_the_second_joins_the_one_that_has_the_port(
    start: Start, tmp_path: Path
) -> None:
    port = free_port()
    shared = {"AGL_SERVER_HOST": "0.0.0.0", "AGL_TOKEN": TOKEN, "N_RUNNERS": "1", "MEET": str(tmp_path)}
    first = start("both", port, **shared)
    first.until("running")
    second = start("both", port, **shared)
    first.ends(0, f"both {REWARDS}\n")
    second.ends(0, f"another process on this machine uses port {port}: this process joins", "running")


def test_a_program_that_is_no_store_is_not_joined(start: Start) -> None:
    with listen("0.0.0.0", 0) as other:
        port = other.getsockname()[1]
        threading.Thread(target=_answers_something_else, args=(other,), daemon=True).start()
        start("both", port, AGL_SERVER_HOST="0.0.0.0", AGL_TOKEN=TOKEN).ends(1, "Another program uses this port")


def _answers_something_else(listening: socket.socket) -> None:
    listening.setblocking(True)
    connection, _ = listening.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
