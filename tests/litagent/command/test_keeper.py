"""No process that a program starts outlives its attempt, wherever it hides; and no other process ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import agentlightning as agl
from agentlightning.litagent.command import keeper
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import RolloutConfig
from tests.litagent.test_command import reward_of, run_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: a child subreaper")

HIDING = {
    "in the background": "MARK &",
    "in a session of its own": "setsid MARK &",
    "forked twice": "(setsid setsid --fork MARK &) &",
    "forked twice without an environment": "env -i setsid --fork MARK",
    "deaf to signals": "(trap '' TERM HUP INT; setsid MARK) &",
    "many levels down": "(setsid sh -c '(setsid sh -c \"(setsid MARK &)\" &)' &)",
    "stopped": "setsid --fork sh -c 'kill -STOP $$; MARK'",
    "with our outputs open": "setsid --fork MARK >&1 2>&2",
}


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument that only the processes of this test have."""
    mark = f"86400.{uuid.uuid4().int % 10**12:012d}"
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    pids: list[int] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in " ".join(process.info["cmdline"] or ()):
            pids.append(process.pid)
    return pids


def bash(script: str, **settings: object) -> agl.CommandAgent:
    return agl.CommandAgent(["bash", "-c", textwrap.dedent(script)], **settings)  # pyright: ignore[reportArgumentType] -- settings of a test


def hidden(form: str, mark: str) -> str:
    """Return a script that starts a process in this form, and goes on when it runs."""
    return f"{form.replace('MARK', f'sleep {mark}')}\nuntil pgrep -f 'sleep {mark}' >/dev/null; do sleep 0.02; done\n"


@pytest.mark.parametrize("form", [*HIDING.values()], ids=[*HIDING])
async def test_what_a_program_leaves_behind_ends_with_its_ordinary_end(
    store: InMemoryLightningStore, mark: str, form: str
) -> None:
    attempt = await run_task(store, bash(hidden(form, mark) + "echo 1.0"))
    assert (attempt.outcome, await reward_of(store, attempt)) == ("scored", 1.0)
    assert marked(mark) == []


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "sleep 86400"])
async def test_and_with_any_other_end(store: InMemoryLightningStore, mark: str, end: str) -> None:
    script = hidden(HIDING["forked twice without an environment"], mark) + end
    attempt = await run_task(store, bash(script, timeout_seconds=3.0, stop_seconds=0.1), config=RolloutConfig())
    assert attempt.outcome in ("infrastructure_fault", "cancelled")
    assert marked(mark) == []


async def test_another_program_of_the_same_runner_goes_on(store: InMemoryLightningStore, mark: str) -> None:
    other = asyncio.create_task(run_task(store, bash(f"sleep 2.{mark[-9:]}; echo 0.5")))
    first = await run_task(store, bash(hidden(HIDING["forked twice"], mark) + "echo 1.0"))
    assert await reward_of(store, first) == 1.0
    assert marked(mark) == []
    assert await reward_of(store, await other) == 0.5


async def test_a_program_that_forks_without_end_ends(store: InMemoryLightningStore, mark: str) -> None:
    bomb = f"""
        spread() {{ (setsid sh -c 'sleep {mark}' &) ; (sleep 0.002; spread) & }}
        spread; spread; sleep 0.5; echo 1.0
    """
    attempt = await run_task(store, bash(bomb))
    assert await reward_of(store, attempt) == 1.0
    assert marked(mark) == []


async def test_a_program_that_kills_its_parent_ends_itself(store: InMemoryLightningStore, mark: str) -> None:
    attempt = await run_task(store, bash(f"kill -9 $PPID; sleep {mark}"))
    assert (attempt.outcome, attempt.outcome_reason) == ("infrastructure_fault", "exception")
    assert marked(mark) == []
    assert await reward_of(store, await run_task(store, bash("echo 1.0"))) == 1.0


async def test_the_next_program_gets_a_new_keeper_when_one_was_killed(store: InMemoryLightningStore) -> None:
    assert await reward_of(store, await run_task(store, bash("echo 1.0"))) == 1.0
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    keepers = [child for child in living if any("keeper_main" in part for part in child.cmdline())]
    for each in keepers:
        each.kill()
        each.wait()
    assert keepers
    assert await reward_of(store, await run_task(store, bash("echo 0.5"))) == 0.5


async def test_what_hides_ends_too_when_a_program_kills_its_parent(store: InMemoryLightningStore, mark: str) -> None:
    await run_task(store, bash(hidden(HIDING["forked twice without an environment"], mark) + "kill -9 $PPID; sleep 60"))
    while marked(mark):  # noqa: ASYNC110 -- other processes
        await asyncio.sleep(0.02)
    assert await reward_of(store, await run_task(store, bash("echo 1.0"))) == 1.0


# --- what a program does to its keeper -------------------------------------------------------------------------------

ABOVE = "$PPID"
"""The process above a program."""
KEEPER = "$(ps -o ppid= -p $PPID)"
"""The keeper, which all programs share."""


@pytest.mark.parametrize("stopped", [ABOVE, KEEPER, f"{ABOVE} {KEEPER}"])
async def test_a_program_that_stops_its_keeper_keeps_its_time_limit(
    store: InMemoryLightningStore, mark: str, stopped: str
) -> None:
    script = f"kill -STOP {stopped}; trap '' TERM; setsid sleep {mark} & sleep {mark}"
    attempt = await run_task(store, bash(script, timeout_seconds=1.0, stop_seconds=0.1))
    assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("timeout", "cancelled", "timeout")
    assert marked(mark) == []
    assert await reward_of(store, await run_task(store, bash("echo 0.5"))) == 0.5


async def test_a_program_that_stops_its_keeper_again_and_again_ends(
    store: InMemoryLightningStore, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "END_SECONDS", 0.5)
    script = (
        f"(trap '' TERM; while :; do kill -STOP {ABOVE}; done) & (while :; do kill -STOP $PPID; done) & sleep {mark}"
    )
    attempt = await run_task(store, bash(script, timeout_seconds=1.0, stop_seconds=0.1))
    assert (attempt.outcome, attempt.outcome_reason) == ("cancelled", "timeout")
    assert marked(mark) == []


@pytest.mark.parametrize("stopped", [ABOVE, KEEPER])
async def test_a_program_that_ends_is_seen_to_end_though_its_keeper_is_stopped(
    store: InMemoryLightningStore, stopped: str
) -> None:
    attempt = await run_task(store, bash(f"kill -STOP {stopped}; echo 1.0"))
    assert await reward_of(store, attempt) == 1.0
    assert await reward_of(store, await run_task(store, bash("echo 0.5"))) == 0.5


@pytest.mark.parametrize("signal", ["STOP", "KILL"])
async def test_a_keeper_that_does_not_answer_is_replaced(
    store: InMemoryLightningStore, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    monkeypatch.setattr(keeper, "ANSWER_SECONDS", 3.0)
    script = f"keeper={KEEPER}; while kill -{signal} $keeper; do :; done & > {tmp_path}/begun; sleep {mark}"
    hostile = asyncio.create_task(run_task(store, bash(script, timeout_seconds=30.0)))
    while not (tmp_path / "begun").exists():  # noqa: ASYNC110 -- another process
        await asyncio.sleep(0.02)
    others = await asyncio.gather(*(run_task(store, bash("echo 0.5")) for _ in range(3)))
    assert [await reward_of(store, other) for other in others] == [0.5] * 3
    assert marked(mark), "another keeper is none of its concern"
    hostile.cancel()
    await asyncio.wait({hostile})
    assert marked(mark) == []


# --- what is told over its socket ------------------------------------------------------------------------------------


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process group that is no program's."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


READY = f"ready {os.getpid()}"


@pytest.mark.parametrize(
    "message",
    [
        "pid BYSTANDER",
        "ready BYSTANDER\npid BYSTANDER",
        "READY\npid BYSTANDER",
        "READY\nREADY",
        "READY\npid 0",
        "READY\npid -1",
        "READY\npid x",
        "READY\npid",
        "READY\nexit 0",
        "exit 0",
        "\n\n",
        "x" * 100_000,
        "READY\npid " + "9" * 10_000,
    ],
    ids=lambda message: ascii(message[:60]),
)
async def test_what_no_keeper_says_ends_the_program_and_nothing_else(
    message: str, bystander: subprocess.Popen[bytes]
) -> None:
    ours, theirs = socket.socketpair()
    program = keeper.KeptProgram(ours)
    with theirs:
        theirs.setblocking(False)
        theirs.send(message.replace("READY", READY).replace("BYSTANDER", str(bystander.pid)).encode() + b"\n")
        assert await asyncio.wait_for(program.exited, 20) == -signal.SIGKILL
    await program.close()
    assert bystander.poll() is None


async def test_an_exit_code_counts_only_from_the_process_above_the_program() -> None:
    ours, theirs = socket.socketpair()
    program = keeper.KeptProgram(ours)
    code = "import os, sys, socket; socket.socket(fileno=int(sys.argv[1])).send(sys.argv[2].encode() % os.getpid())"

    async def say(text: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(theirs.fileno()), text, pass_fds=[theirs.fileno()]
        )
        await process.wait()

    with theirs:
        theirs.send(READY.encode() + b"\n")
        await say("pid %d\n")
        await say("exit 0\n%.0d")
        assert await asyncio.wait_for(program.exited, 20) == -signal.SIGKILL
    await program.close()


@pytest.mark.parametrize("stopping", ["", f"kill -STOP {ABOVE} {KEEPER};"])
def test_a_killed_runner_leaves_nothing_of_what_hides(mark: str, stopping: str) -> None:
    code = f"""
        import asyncio, sys
        from agentlightning.runner import LitAgentRunner
        from agentlightning.store.memory import InMemoryLightningStore
        from agentlightning.tracer.otel import OtelTracer
        import agentlightning as agl

        async def main():
            store = InMemoryLightningStore()
            await store.enqueue_rollout({{}})
            runner = LitAgentRunner(OtelTracer(), max_rollouts=1)
            agent = agl.CommandAgent(["bash", "-c", "{stopping} setsid --fork sleep {mark}; sleep {mark}"])
            with runner.run_context(agent=agent, store=store):
                await runner.iter()

        asyncio.run(main())
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    until = time.monotonic() + 60
    while len(marked(f"sleep {mark}")) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    below = psutil.Process(runner.pid).children(recursive=True)
    runner.kill()
    runner.wait()
    psutil.wait_procs(below, max(0.0, until - time.monotonic()))
    assert [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert marked(f"sleep {mark}") == []
