"""Roles in processes that share only a port, as on several machines: they wait, survive, get notices, give up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agentlightning.execution import stop_run
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.utils.http.sockets import listen
from tests.execution.left import LIMIT_SECONDS, Program, lives
from tests.stubs.ports import free_port

pytestmark = pytest.mark.slow
REWARDS = "[0.1, 0.2, 0.3]"


class Machine(Program):
    """`machine_program.py` with the environment of one machine."""

    def __init__(self, role: str, port: int, *, prefix: tuple[str, ...] = (), **environment: str) -> None:
        own = {"AGL_CURRENT_ROLE": role, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
        super().__init__("tests.execution.machine_program", prefix=prefix, env={**os.environ, **own, **environment})

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and its output."""
        output = self.output()
        return self.process.returncode, output


@pytest.fixture
def start() -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def started(role: str, port: int, **settings: object) -> Machine:
        machines.append(Machine(role, port, **settings))  # type: ignore[arg-type]
        return machines[-1]

    yield started
    for machine in machines:
        machine.close()


def family(machine: Machine) -> list[psutil.Process]:
    return psutil.Process(machine.process.pid).children(recursive=True)


@pytest.mark.parametrize("n_runners", [pytest.param("1", marks=pytest.mark.heavy), "2"])
def test_runners_wait_for_the_server_and_say_so_and_end_when_they_are_told(
    start: Callable[..., Machine], n_runners: str
) -> None:
    port = free_port()
    runners = start("runner", port, N_RUNNERS=n_runners)
    runners.until(f"The store at http://127.0.0.1:{port} does not answer yet; waiting up to 60 s")
    algorithm = start("algorithm", port)
    code, output = algorithm.end()
    assert (code, f"algorithm {REWARDS}\n" in output) == (0, True), output
    code, other = runners.end()
    assert (code, "answers after" in other, other.endswith("runner None\n")) == (0, True, True), other


@pytest.mark.heavy
def test_runners_survive_the_death_of_the_server_and_serve_the_one_that_follows(start: Callable[..., Machine]) -> None:
    port = free_port()
    runners, first = start("runner", port), start("algorithm", port, ALGORITHM="stays")
    first.until(f"rewards {REWARDS}")
    first.process.send_signal(signal.SIGKILL)
    runners.until("does not answer any more")
    second = start("algorithm", port)
    assert second.end()[0] == 0, second.lines
    code, runner_output = runners.end()
    assert (code, "answers after" in runner_output) == (0, True), runner_output


def test_runners_give_up_after_the_stated_outage_with_an_exit_code_of_its_own(start: Callable[..., Machine]) -> None:
    port = free_port()
    runners = start("runner", port, OUTAGE="1")
    runners.until("does not answer yet; waiting up to 1 s")
    before = family(runners)
    code, runner_output = runners.end()
    assert code == 69
    assert f"StoreUnreachableError: No answer from the store at http://127.0.0.1:{port} for" in runner_output
    assert "(store_unreachable_timeout=1; last:" in runner_output
    assert not [process for process in before if lives(process)]


def test_the_algorithm_bears_an_outage_for_as_long_as_its_runner_states(start: Callable[..., Machine]) -> None:
    async def outage() -> None:
        store = InMemoryLightningStore()
        server = LightningStoreServer(store, "127.0.0.1", 0)
        await server.start()
        shared = {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": server.endpoint}
        algorithm = start("algorithm", 0, OUTAGE="1", **shared)
        for _ in range(3):  # then it waits for their ends, which do not come
            assert await store.dequeue_rollout(timeout=LIMIT_SECONDS) is not None
        await server.stop()
        code, output = await asyncio.to_thread(algorithm.end)
        assert (code, "did not answer wait_for_rollouts" in output) == (69, True), output

    asyncio.run(outage())


@pytest.mark.heavy
def test_runners_that_are_interrupted_leave_nothing_and_the_run_goes_on(start: Callable[..., Machine]) -> None:
    port = free_port()
    runners, algorithm = start("runner", port), start("algorithm", port, ALGORITHM="stays")
    algorithm.until(f"rewards {REWARDS}")
    before = family(runners)
    runners.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in runners.end()[1]
    assert not [process for process in before if lives(process)]
    assert algorithm.process.poll() is None


@pytest.mark.parametrize("n_runners", ["1", pytest.param("2", marks=pytest.mark.heavy)])
def test_runners_that_are_terminated_finish_what_they_run_and_others_go_on(
    start: Callable[..., Machine], n_runners: str
) -> None:
    port = free_port()
    leaving = start("runner", port, SLOW="1", N_RUNNERS=n_runners)
    algorithm = start("algorithm", port)
    leaving.until("running 1")
    leaving.process.send_signal(signal.SIGTERM)
    staying = start("runner", port, N_RUNNERS="1")
    code, output = leaving.end()
    assert (code, "SIGTERM: no further rollouts; those under way have 5 s" in output) == (143, True), output
    code, output = algorithm.end()
    assert (code, f"algorithm {REWARDS}\n" in output) == (0, True), output
    assert staying.end()[0] == 0


@pytest.mark.heavy
def test_a_token_that_the_server_refuses_ends_the_runners_at_once(start: Callable[..., Machine]) -> None:
    port = free_port()
    algorithm = start("algorithm", port, AGL_TOKEN="right", ALGORITHM="stays")
    runners = start("runner", port, AGL_TOKEN="wrong", N_RUNNERS="1")
    code, runner_output = runners.end()
    assert (code, "UnauthorizedError" in runner_output) == (77, True), runner_output
    algorithm.process.kill()


@pytest.mark.heavy
def test_a_run_on_a_store_of_its_own_is_stopped_through_it(start: Callable[..., Machine]) -> None:
    """`agl run stop` ends algorithm and runners, each with exit code 0."""

    async def stopped() -> None:
        server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0)
        await server.start()
        shared = {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": server.endpoint, "AGL_RUN_ID": "run-7"}
        client = LightningStoreClient(server.endpoint)
        try:
            algorithm = start("algorithm", 0, ALGORITHM="stays", **shared)
            runners = start("runner", 0, **shared)
            other = start("runner", 0, **{**shared, "AGL_RUN_ID": "run-8"})
            await asyncio.to_thread(algorithm.until, f"rewards {REWARDS}")
            await stop_run(client, "run-7", reason="enough")
            for machine in (algorithm, runners):
                code, output = await asyncio.to_thread(machine.end)
                assert code == 0, output
            assert other.process.poll() is None
            late = start("runner", 0, **shared)
            assert (await asyncio.to_thread(late.end))[0] == 0  # the run is over: nothing to wait for
        finally:
            await client.close()
            await server.stop()

    asyncio.run(stopped())


# --- two network namespaces -------------------------------------------------------------------------------------------


def test_algorithm_and_runners_find_each_other_across_two_networks(
    start: Callable[..., Machine], nodes: list[tuple[str, ...]]
) -> None:
    runners = start("runner", 4747, prefix=nodes[1], AGL_TOKEN=TOKEN, AGL_SERVER_HOST="10.79.5.1")
    runners.until("The store at http://10.79.5.1:4747 does not answer yet")
    algorithm = start("algorithm", 4747, prefix=nodes[0], AGL_TOKEN=TOKEN, AGL_SERVER_HOST="0.0.0.0")
    code, output = algorithm.end()
    assert (code, f"algorithm {REWARDS}\n" in output) == (0, True), output
    began = time.monotonic()
    assert runners.end()[0] == 0
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
    start: Callable[..., Machine], nodes: list[tuple[str, ...]], tmp_path: Path, head_first: bool
) -> None:
    shared = {"AGL_SERVER_HOST": "10.79.5.1", "AGL_TOKEN": TOKEN, "N_RUNNERS": "1", "MEET": str(tmp_path)}
    machines: dict[bool, Machine] = {}
    for is_head in (head_first, not head_first):
        machines[is_head] = start("both", 4747, prefix=nodes[0 if is_head else 1], **shared)
        if len(machines) == 1:
            machines[is_head].until("running 1" if is_head else "does not answer yet")
    code, output = machines[True].end()
    assert (code, f"both {REWARDS}\n" in output, "running" in output) == (0, True, True), output
    code, other_output = machines[False].end()
    line = "10.79.5.1 is no address of this machine: this process joins the run at http://10.79.5.1:4747, with 1 runner"
    assert (code, other_output.count(line), "running" in other_output) == (0, 1, True), other_output
    assert other_output.endswith("both None\n")


def test_of_two_processes_with_both_roles_the_second_joins_the_one_that_has_the_port(
    start: Callable[..., Machine], tmp_path: Path
) -> None:
    port = free_port()
    shared = {"AGL_SERVER_HOST": "0.0.0.0", "AGL_TOKEN": TOKEN, "N_RUNNERS": "1", "MEET": str(tmp_path)}
    first = start("both", port, **shared)
    first.until("running")
    second = start("both", port, **shared)
    code, output = first.end()
    assert (code, f"both {REWARDS}\n" in output) == (0, True), output
    code, other = second.end()
    assert (code, f"another process of this machine has port {port}: this process joins" in other) == (0, True), other
    assert "running" in other


def test_a_program_that_is_no_store_is_not_joined(start: Callable[..., Machine]) -> None:
    with listen("0.0.0.0", 0) as other:
        port = other.getsockname()[1]
        threading.Thread(target=_answers_something_else, args=(other,), daemon=True).start()
        code, output = start("both", port, AGL_SERVER_HOST="0.0.0.0", AGL_TOKEN=TOKEN).end()
    assert (code, "Another program has this port" in output) == (1, True), output


def _answers_something_else(listening: socket.socket) -> None:
    listening.setblocking(True)
    connection, _ = listening.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
