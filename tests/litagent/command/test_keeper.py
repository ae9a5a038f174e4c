"""Nothing that a program starts outlives its attempt, wherever it hides; and nothing else ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

import agentlightning as agl
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import RolloutConfig
from tests.litagent.test_command import reward_of, run_task, store

__all__ = ["store"]
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
    found: list[int] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


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
    for keeper in keepers:
        keeper.kill()
        keeper.wait()
    assert keepers
    assert await reward_of(store, await run_task(store, bash("echo 0.5"))) == 0.5


def test_a_killed_runner_leaves_nothing_of_what_hides(mark: str) -> None:
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
            agent = agl.CommandAgent(["bash", "-c", "setsid --fork sleep {mark}; sleep {mark}"])
            with runner.run_context(agent=agent, store=store):
                await runner.iter()

        asyncio.run(main())
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    until = time.monotonic() + 60
    while len(marked(f"sleep {mark}")) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    while marked(f"sleep {mark}") and time.monotonic() < until:
        time.sleep(0.02)
    assert marked(f"sleep {mark}") == []
