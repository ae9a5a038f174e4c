"""Programs in a bubblewrap sandbox: what they reach, what they cannot reach, their limits, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.litagent.command.attempt_folder import PREFIX, held_folder
from agentlightning.litagent.command.sandbox import MOST_CONNECTIONS, MemoryLimit, addresses_of, require_bubblewrap
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, Attempt, RolloutConfig
from tests.stubs.running import run_tasks, run_through_gateway, runner_of

ROOT = Path(__file__).parents[3]


def why_not() -> str:
    try:
        require_bubblewrap()
    except RuntimeError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ASK = """
    import json, os, urllib.request
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
    print(json.dumps({"reward": float(reply == "it is 42")}))
"""


def python(script: str, **settings: Any) -> agl.CommandAgent:
    command = ["/usr/bin/python3", "-I", "-c", textwrap.dedent(script)]
    settings.setdefault("sandbox", "bwrap")
    return agl.CommandAgent(command, **settings)


async def run_task(
    store: InMemoryLightningStore, agent: agl.CommandAgent, config: RolloutConfig | None = None
) -> Attempt:
    [finished] = await run_tasks(store, agent, {}, config=config)
    return finished.attempt


async def output_of(store: InMemoryLightningStore, attempt: Attempt) -> str:
    [span] = [one for one in await store.query_spans(attempt.rollout_id) if one.name == "agentlightning.operation"]
    return str(span.attributes["agentlightning.operation.output.stdout"])


async def scored(store: InMemoryLightningStore, agent: agl.CommandAgent) -> float | None:
    """Run the agent on one task and return its reward; fail with its error if it has none."""
    attempt = await run_task(store, agent)
    assert (attempt.outcome, attempt.error) == ("scored", None)
    return attempt.reward


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that the user of the programs can enter; empty after each test."""
    folder = Path(tempfile.mkdtemp(prefix="agl-sandbox-test-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []
    folder.rmdir()


# --- the network -----------------------------------------------------------------------------------------------------


async def test_its_model_calls_go_through_the_gateway(store: InMemoryLightningStore) -> None:
    [finished] = await run_through_gateway(store, python(ASK), {}, answer=lambda request: "it is 42")
    assert (finished.attempt.outcome, finished.attempt.error) == ("scored", None)
    [triplet] = agl.TracerTraceToTriplet().adapt(list(await store.query_spans(finished.attempt.rollout_id)))
    assert triplet.reward == 1.0
    assert triplet.response["token_ids"]


async def test_many_at_once_each_reach_their_model(store: InMemoryLightningStore) -> None:
    tasks = [{"number": number} for number in range(8)]
    done = await run_through_gateway(store, python(ASK), *tasks, answer=lambda request: "it is 42")
    assert [one.attempt.reward for one in done] == [1.0] * 8


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server on all addresses of this machine that sends back what it gets."""
    server = socket.create_server(("", 0), backlog=512)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=send_back, args=(connection,), daemon=True).start()

    def send_back(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def own_address() -> str:
    """Return an address of this machine other than loopback, or "" (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.9", own_address()])
async def test_it_reaches_the_address_of_its_model_and_no_other(
    host: str, store: InMemoryLightningStore, echo: int
) -> None:
    if not host:
        pytest.skip("this machine has only loopback addresses")
    await store.add_resources({"main": LLM(endpoint=f"http://{host}:{echo}/v1", model="m")})
    with socket.create_server(("127.0.0.1", 0)) as other:
        script = f"""
            import socket
            with socket.create_connection(({host!r}, {echo}), 20) as connection:
                sent = b"x" * 1_000_000
                connection.sendall(sent[:500_000]); got = b""
                while len(got) < 500_000: got += connection.recv(65536)
                connection.sendall(sent[500_000:]); connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536): got += part
            for address in (("127.0.0.1", {other.getsockname()[1]}), ("192.0.2.1", 80)):
                try: socket.create_connection(address, 5)
                except OSError: pass
                else: print("reached", address)
            print(float(got == sent))
        """
        attempt = await run_task(store, python(script, llm="main"))
    assert (attempt.outcome, attempt.reward) == ("scored", 1.0)
    assert "reached" not in await output_of(store, attempt)


async def test_more_connections_than_the_limit_are_reset_and_later_ones_work(
    store: InMemoryLightningStore, echo: int
) -> None:
    await store.add_resources({"main": LLM(endpoint=f"http://127.0.0.1:{echo}/v1", model="m")})
    script = f"""
        import socket
        def answered(connection):
            try:
                connection.sendall(b"x")
                return connection.recv(1) == b"x"
            except OSError:
                return False
        held = [socket.create_connection(("127.0.0.1", {echo}), 20) for _ in range({MOST_CONNECTIONS} + 20)]
        served = [connection for connection in held if answered(connection)]
        assert len(served) == {MOST_CONNECTIONS}, len(served)
        for connection in held: connection.close()
        import time
        while not answered(socket.create_connection(("127.0.0.1", {echo}), 20)): time.sleep(0.05)
        print(1)
    """
    assert await scored(store, python(script, llm="main")) == 1.0


def test_an_address_that_a_sandbox_cannot_have_is_refused() -> None:
    urls = ["http://m/v1", "http://m:80/v2", "https://m/v1", "http://[::1]:5/"]
    assert addresses_of(urls) == [("m", 80), ("m", 443), ("::1", 5)]
    with pytest.raises(ValueError, match=r"cannot reach http://\[2001:db8::1\]:80"):
        addresses_of(["http://[2001:db8::1]:80/v1"])


# --- files and processes ---------------------------------------------------------------------------------------------


async def test_it_reads_the_system_and_writes_only_to_its_folder(
    store: InMemoryLightningStore,
) -> None:
    with tempfile.TemporaryDirectory(prefix="agl-secret-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        (secret := Path(place, "secret")).write_text("the answers of the tasks")
        script = f"""
            import os, pathlib
            assert not os.path.exists({str(secret)!r}), "it sees a file of the machine"
            assert not os.path.exists("/etc/shadow") and not os.path.exists({__file__!r})
            for place in ("/usr/x", "/etc/x", "/x", "/home/x", "/usr/bin/python3"):
                try: open(place, "w")
                except OSError: pass
                else: raise AssertionError("it wrote " + place)
            for folder in (os.environ["TMPDIR"], "/tmp", os.getcwd()):
                pathlib.Path(folder, "own").write_text("x")
            pids = [name for name in os.listdir("/proc") if name.isdigit()]
            assert len(pids) < 5, pids
            print(1)
        """
        assert await scored(store, python(script)) == 1.0


def own_folder(*parts: str) -> Path:
    (folder := Path(*parts)).mkdir()
    return folder


async def test_what_is_named_can_be_read_and_not_written(store: InMemoryLightningStore) -> None:
    with tempfile.TemporaryDirectory(prefix="agl-tools-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        for name in ("tools", "work"):
            folder = own_folder(place, name)
            (folder / "data").write_text("42")
        script = f"""
            import os
            assert os.getcwd() == {place + "/work"!r}
            for file in ("data", {place + "/tools/data"!r}):
                assert open(file).read() == "42"
                try: open(file, "w")
                except OSError: pass
                else: raise AssertionError("it wrote " + file)
            print(1)
        """
        sandbox = agl.Bubblewrap(read=[f"{place}/tools"])
        assert await scored(store, python(script, sandbox=sandbox, cwd=f"{place}/work")) == 1.0


async def test_a_relative_working_folder_is_that_of_the_runner(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="agl-tools-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        folder = own_folder(place, "work")
        monkeypatch.chdir(place)
        assert (
            await scored(store, python(f"import os; print(float(os.getcwd() == {str(folder)!r}))", cwd="work")) == 1.0
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": agl.Bubblewrap(read=["/no/such/folder"])}, "do not exist on this machine: /no/such/folder"),
        ({"cwd": "/"}, "would let the program read the whole machine"),
    ],
)
async def test_paths_that_make_no_sandbox_are_a_fault_that_names_them(
    settings: dict[str, Any], message: str, store: InMemoryLightningStore
) -> None:
    attempt = await run_task(store, python("print(1)", **settings))
    assert attempt.outcome == "infrastructure_fault"
    assert message in str(attempt.error)


async def test_a_program_outside_of_the_sandbox_names_the_setting(store: InMemoryLightningStore) -> None:
    with tempfile.TemporaryDirectory(prefix="agl-tools-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        shutil.copy("/bin/sh", program := f"{place}/program")
        attempt = await run_task(store, agl.CommandAgent([program, "-c", "echo 1"], sandbox="bwrap"))
        assert attempt.outcome == "infrastructure_fault"
        assert f"read=[{place!r}]" in str(attempt.error)
        assert (
            await scored(store, agl.CommandAgent([program, "-c", "echo 1"], sandbox=agl.Bubblewrap(read=[place])))
            == 1.0
        )


# --- limits and ends -------------------------------------------------------------------------------------------------


async def test_it_cannot_start_more_processes_than_its_limit(store: InMemoryLightningStore) -> None:
    script = """
        import os, time
        children = 0
        try:
            while children < 100:
                if os.fork() == 0: time.sleep(60)
                children += 1
        except BlockingIOError:
            print(float(10 < children < 40))
    """
    assert await scored(store, python(script, sandbox=agl.Bubblewrap(processes=40))) == 1.0


def parent_of_groups() -> Path:
    """Return the folder of the control groups of this process, or skip the test."""
    try:
        with contextlib.closing(MemoryLimit("agl-test", 1 << 26)) as limit:
            return limit.path.parent
    except RuntimeError as error:
        pytest.skip(str(error))


async def test_its_memory_has_a_limit(store: InMemoryLightningStore) -> None:
    parent_of_groups()
    script = "held = bytearray(1 << 28); print(1)"
    small, large = (agl.Bubblewrap(memory_bytes=limit) for limit in (1 << 26, 1 << 29))
    attempt = await run_task(store, python(script, sandbox=small))
    assert attempt.outcome == "infrastructure_fault"
    assert "signal 9" in str(attempt.error) or "exit code 137" in str(attempt.error)
    assert await scored(store, python(script, sandbox=large)) == 1.0


async def test_a_time_limit_ends_all_of_its_processes(store: InMemoryLightningStore) -> None:
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                time.sleep(3_141_592)
        time.sleep(3_141_592)
    """
    agent = python(script, timeout_seconds=1.0)
    attempt = await run_task(store, agent)
    assert attempt.outcome != "scored"
    assert "timeout_seconds=1" in str(attempt.error)
    assert [process for process in psutil.process_iter() if "3_141_592" in " ".join(command_of(process))] == []


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


RUNNER = """
import asyncio, sys, agentlightning as agl
from agentlightning.store.memory import InMemoryLightningStore
from tests.stubs.running import run_tasks

program = "import os, time; os.fork(); print('running', flush=True); time.sleep(2_718_281)"
sandbox = agl.Bubblewrap(memory_bytes=(1 << 28) if len(sys.argv) > 1 else None)
agent = agl.CommandAgent(["/usr/bin/python3", "-c", program], sandbox=sandbox)
asyncio.run(run_tasks(InMemoryLightningStore(), agent, {}))
"""


def in_sandboxes() -> list[psutil.Process]:
    """Return the processes of the program itself, without bwrap, which has it among its arguments."""
    commands = ((each, command_of(each)) for each in psutil.process_iter())
    return [each for each, command in commands if command[:2] == ["/usr/bin/python3", "-c"] and "2_718" in command[2]]


@contextlib.contextmanager
def running_elsewhere(*limited: str) -> Generator[None]:
    """A runner in another process with a program; both are killed at the end."""
    env = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, *limited], cwd=ROOT, env=env)
    try:
        wait_until(lambda: len(in_sandboxes()) == 2)
        yield
    finally:
        runner.kill()
        runner.wait()
        wait_until(lambda: not in_sandboxes())


def starts() -> None:
    """Start a runner, which runs no task."""
    python("").set_runner(runner_of())


def test_a_runner_that_is_killed_leaves_no_process_and_the_next_one_removes_its_files(
    own_temporary_folder: Path,
) -> None:
    with running_elsewhere():
        [folder] = own_temporary_folder.iterdir()
        starts()
        assert (folder / "task.json").exists()  # its runner works
        assert len(in_sandboxes()) == 2
    assert (folder / "task.json").exists()
    other = own_temporary_folder / "agl-of-another-program"
    other.mkdir()
    starts()
    assert list(own_temporary_folder.iterdir()) == [other]
    other.rmdir()


def test_the_control_group_of_a_killed_runner_is_removed_by_the_next_one(own_temporary_folder: Path) -> None:
    groups = parent_of_groups()
    with running_elsewhere("limited"):
        [folder] = own_temporary_folder.iterdir()
        assert (groups / folder.name).is_dir()
    assert (groups / folder.name).is_dir()

    def is_removed() -> bool:  # the kernel may need a moment to empty the group
        starts()
        return not folder.exists()

    wait_until(is_removed)
    assert not (groups / folder.name).exists()


def test_files_of_a_program_that_still_ends_wait_for_the_next_start(own_temporary_folder: Path) -> None:
    path, descriptor = held_folder(PREFIX)
    group = parent_of_groups() / path.name
    os.close(descriptor)
    group.mkdir()
    process = subprocess.Popen(["sleep", "60"])
    (group / "cgroup.procs").write_text(str(process.pid))
    starts()
    assert path.exists()
    process.kill()
    process.wait()
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    starts()
    assert not path.exists()
    assert not group.exists()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait; the limit of the test ends it."""
    while not condition():
        time.sleep(0.02)


async def test_a_program_that_attacks_its_runner_finds_nothing(store: InMemoryLightningStore) -> None:
    """It replaces its files, leaves links and processes, and looks for the sockets of the runner."""
    script = """
        import os, signal, socket
        folder = os.environ["TMPDIR"]
        assert not [name for name in os.listdir("/proc/self/fd") if int(name) > 3], os.listdir("/proc/self/fd")
        os.unlink(folder + "/hosts") if os.access(folder + "/hosts", os.W_OK) else None
        os.symlink("/etc/passwd", folder + "/link")
        os.makedirs(folder + "/deep/" * 50)
        os.chmod(folder + "/deep", 0)
        for pid in range(2, 50):
            try: os.kill(pid, signal.SIGKILL) if pid != os.getpid() else None
            except OSError: pass
        print(1)
    """
    assert await scored(store, python(script)) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox": "docker"}, "sandbox must be None, 'bwrap' or agl.Bubblewrap"),
        ({"sandbox": True}, "sandbox must be None, 'bwrap' or agl.Bubblewrap"),
        ({"sandbox": "bwrap", "stop_seconds": 5.0}, "stop_seconds=5.0 has no effect in a sandbox"),
    ],
)
def test_another_sandbox_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agl.CommandAgent(["true"], **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"read": "/opt"}, TypeError, "read must be a list of absolute paths; got '/opt'"),
        ({"read": ["opt"]}, ValueError, "read must contain absolute paths"),
        ({"read": ["/"]}, ValueError, "other than /"),
        ({"memory_bytes": "2GB"}, TypeError, "memory_bytes must be a whole number"),
        ({"memory_bytes": 10}, ValueError, "memory_bytes must be"),
        ({"processes": 0}, ValueError, "processes must be"),
    ],
)
def test_settings_that_are_invalid_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        agl.Bubblewrap(**settings)


def test_a_machine_without_bwrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_bubblewrap.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match="apt-get install bubblewrap"):
        require_bubblewrap()
    require_bubblewrap.cache_clear()
