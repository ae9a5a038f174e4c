"""`CommandAgent(user=...)`: the program runs as another user, and the runner's data is out of its reach."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.litagent.command import agent as program_user
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, Attempt
from tests.litagent.test_command import printed, reward_of, run_task
from tests.stubs.processes import run_program
from tests.stubs.unprivileged import ATTACK, NOBODY, unprivileged

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user reaches; pytest's own is closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def decoy(**environment: str) -> Generator[None]:
    """A process of root's that protects nothing."""
    process = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def said_by(store: InMemoryLightningStore, attempt: Attempt) -> Any:
    return json.loads((await printed(store, attempt))["stderr"])


def bash(script: str, folder: Path, **settings: Any) -> agl.CommandAgent:
    return agl.CommandAgent(["bash", "-c", textwrap.dedent(script)], user=NOBODY, cwd=folder, **settings)


@AS_ROOT
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_the_program_is_that_user_and_owns_its_files(
    store: InMemoryLightningStore, shared_folder: Path, isolation: str
) -> None:
    script = """
        files=$(stat -c %u:%a $TMPDIR $AGL_TASK_FILE $AGL_RESOURCES_FILE | tr '\\n' ' ')
        echo "$(id -u) $(id -g) $(id -G) $files$HOME"
        cat $AGL_TASK_FILE; echo 0.5 > $AGL_REWARD_FILE
    """
    agent = bash(script, shared_folder, reward="file")
    attempt = await run_task(store, agent, {"q": 1}, isolation=isolation)
    assert (attempt.outcome, attempt.error) == ("scored", None)
    assert await reward_of(store, attempt) == 0.5
    first, task = (await printed(store, attempt))["stdout"].splitlines()
    home = program_user.user_of(NOBODY).home
    assert first == f"{NOBODY} {NOBODY} {NOBODY} {NOBODY}:700 {NOBODY}:600 {NOBODY}:600 {home}"
    assert json.loads(task) == {"q": 1}


@AS_ROOT
async def test_it_finds_no_secret_of_a_runner_that_is_root_and_cannot_end_it(
    store: InMemoryLightningStore, shared_folder: Path
) -> None:
    token = f"token-{os.urandom(12).hex()}"
    closed = shared_folder / "store.db"
    closed.write_text(token)
    closed.chmod(0o600)
    (shared_folder / "program.py").write_text(
        ATTACK
        + """
task = json.loads(sys.stdin.readline())
found = attack(task["planted"], [])
refused = []
for action in (lambda: os.kill(os.getppid(), 9), lambda: os.kill(task["runner"], 9), lambda: os.setuid(0),
               lambda: open("store.db"), lambda: open(f"/proc/{task['runner']}/environ")):
    try:
        action()
    except PermissionError:
        refused.append(True)
nnp = [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")]
print(json.dumps([found, len(refused), nnp]), file=sys.stderr)
print(1.0)
"""
    )
    await store.add_resources({"main": LLM(endpoint="http://127.0.0.1:9/v1", model="m")})
    agent = agl.CommandAgent(["/usr/bin/env", "python3", "program.py"], user=NOBODY, cwd=shared_folder)
    with decoy(AGL_TOKEN=token):
        attempt = await run_task(store, agent, {"planted": [token.encode().hex()], "runner": os.getpid()})
    assert (attempt.outcome, attempt.error) == ("scored", None)
    assert await said_by(store, attempt) == [[], 5, ["1"]]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc/self/fd")
@pytest.mark.parametrize("task", ["stdin", "file"])
@pytest.mark.parametrize("user", [None, pytest.param(NOBODY, marks=AS_ROOT)])
async def test_a_program_has_its_three_streams_and_no_other_descriptor(
    store: InMemoryLightningStore, shared_folder: Path, task: Any, user: int | None
) -> None:
    code = """if True:
        import json, os, sys
        listed = os.listdir("/proc/self/fd")  # closed again when they are looked at
        print(json.dumps([n for n in listed if os.path.lexists("/proc/self/fd/" + n)]), file=sys.stderr)
        print(1.0)
    """
    agent = agl.CommandAgent(
        ["/usr/bin/env", "python3", "-c", code], user=user, cwd=shared_folder, task=task, env={"PATH": os.defpath}
    )
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.set_inheritable(True)
        attempt = await run_task(store, agent)
    assert sorted(await said_by(store, attempt)) == ["0", "1", "2"]


@AS_ROOT
@pytest.mark.parametrize("script", ["setsid --fork sleep 86399 >/dev/null 2>&1; echo 1.0", "trap '' TERM; sleep 86399"])
async def test_it_ends_like_every_program(store: InMemoryLightningStore, shared_folder: Path, script: str) -> None:
    await run_task(store, bash(script, shared_folder, timeout_seconds=1.0, stop_seconds=0.1))
    assert [one for one in psutil.process_iter(["cmdline"]) if "86399" in (one.info["cmdline"] or ())] == []


@AS_ROOT
async def test_a_working_folder_that_it_may_not_enter_is_named(
    store: InMemoryLightningStore, shared_folder: Path
) -> None:
    os.chmod(shared_folder, 0o700)
    attempt = await run_task(store, bash("echo 1.0", shared_folder))
    assert attempt.outcome == "infrastructure_fault"
    assert attempt.error is not None
    assert "Permission denied" in attempt.error.message
    assert str(shared_folder) in attempt.error.message


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "error", "text"),
    [
        ("root", ValueError, "other than root"),
        (0, ValueError, "other than root"),
        (-1, ValueError, "not a valid user number"),
        (True, TypeError, "name or the number"),
        (["nobody"], TypeError, "name or the number"),
    ],
)
def test_what_is_no_user_to_run_as_is_refused(user: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        agl.CommandAgent(["true"], user=user)


async def test_a_user_that_this_machine_does_not_know_is_told_at_the_start(store: InMemoryLightningStore) -> None:
    with pytest.raises(RuntimeError, match="this machine has no such user"):
        await run_task(store, agl.CommandAgent(["true"], user="nobody-of-this-name"))


def test_a_runner_that_is_not_root_says_so_when_it_starts() -> None:
    user = unprivileged()
    code = """
        import agentlightning as agl
        from agentlightning.runner import LitAgentRunner
        from agentlightning.tracer.otel import OtelTracer
        try:
            LitAgentRunner(OtelTracer()).init(agl.CommandAgent(["true"], user=12345))
        except RuntimeError as error:
            print(error)
    """
    words, own = (user.python, "-c", textwrap.dedent(code)), {"PYTHONPATH": user.path}
    done = run_program(*words, folder=Path("/"), environment=own, popen=user.popen)
    assert "requires a runner that is root" in done.stdout, done.stderr


@AS_ROOT
@pytest.mark.skipif(sys.platform != "linux", reason="needs capabilities (Linux)")
def test_root_without_the_capabilities_is_told_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program_user.user_of(NOBODY).uid == NOBODY
    monkeypatch.setattr(program_user, "_NEEDED", {"CAP_OF_TOMORROW": 63})
    with pytest.raises(RuntimeError, match="root without the capabilities CAP_OF_TOMORROW"):
        program_user.user_of(NOBODY)
