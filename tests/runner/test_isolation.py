"""`isolation="process"`: the agent runs where it can be killed, and everything else is as if it ran here."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typing_extensions import override

import agentlightning as agl
from agentlightning.emitter import emit_message, emit_reward
from agentlightning.litagent import LitAgent, rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.isolation.process import AgentProcessDied
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Hook, RolloutConfig, Span, Triplet


class OutOfLuck(Exception):
    """An exception that no copy can be made of."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Actor(LitAgent[Any]):
    """Does what its task says."""

    needs_resources = False

    @override
    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        if task == "pid":
            emit_message(str(os.getpid()))
            return 1.0
        if task == "emit":
            emit_reward(0.25)
            return None
        if task == "triplets":
            return [Triplet(prompt={"token_ids": [1]}, response={"token_ids": [2]}, reward=0.75)]
        if task == "tracer":
            return float(self.tracer.get_last_trace() == [])
        if task == "exit":
            os._exit(7)
        if task == "crash":
            ctypes.string_at(0)
        if task == "lambda":
            return lambda: None
        raise {"zero": ZeroDivisionError("mine"), "policy": agl.PolicyFault("bad", reward=-1.0)}.get(task) or OutOfLuck(
            1, 2
        )


class Stubborn(LitAgent[Any]):
    """Ignores its time limit, and the wish that it end; with a program that does the same."""

    needs_resources = False

    @override
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        helper = subprocess.Popen(["sleep", "600"])
        if task.startswith("pipe "):
            Path(task.removeprefix("pipe ")).write_text(f"{os.getpid()} {helper.pid}")
        emit_message(f"{os.getpid()} {helper.pid}")
        if task == "holds the interpreter":
            ctypes.PyDLL(None).sleep(600)
        while True:
            time.sleep(0.01)

    @override
    async def validation_rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        time.sleep(600)  # noqa: ASYNC251 -- the mistake that a process makes up for
        return 1.0


async def run_tasks(store: InMemoryLightningStore, agent: Any, *tasks: Any, **settings: Any) -> list[AttemptedRollout]:
    config = settings.pop("config", None)
    hooks = settings.pop("hooks", None)
    made = [await store.enqueue_rollout(input=task, config=config) for task in tasks]
    runner = LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=len(tasks), isolation="process", **settings)
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        await runner.iter()
    finished = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in made]
    return [rollout for rollout in finished if isinstance(rollout, AttemptedRollout)]


def said(finished: AttemptedRollout) -> tuple[Any, ...]:
    attempt = finished.attempt
    return attempt.outcome, attempt.outcome_reason, attempt.error.type if attempt.error else None


async def reward(store: InMemoryLightningStore, finished: AttemptedRollout) -> float | None:
    return agl.find_final_reward(list(await store.query_spans(finished.rollout_id)))


async def test_an_agent_in_a_process_ends_in_all_the_ways_of_one_that_is_here(store: InMemoryLightningStore) -> None:
    class Looking(Hook):
        seen: list[int]

        async def on_rollout_end(self, *, spans: list[Span], **_: Any) -> None:
            self.seen.append(len(spans))

    hook = Looking()
    hook.seen = []
    tasks = ["pid", "pid", "emit", "triplets", "tracer", "zero", "policy", "luck", "lambda", "exit", "crash", "pid"]
    finished = dict(zip([*tasks[:-1], "last"], await run_tasks(store, Actor(), *tasks, hooks=[hook]), strict=True))
    assert {name: said(one) for name, one in finished.items()} == {
        "pid": ("scored", None, None),
        "emit": ("scored", None, None),
        "triplets": ("scored", None, None),
        "tracer": ("scored", None, None),
        "zero": ("infrastructure_fault", "exception", "ZeroDivisionError"),
        "policy": ("policy_fault", "policy_fault", "agentlightning.errors.PolicyFault"),
        "luck": ("infrastructure_fault", "exception", "agentlightning.runner.isolation.pipe.AgentRaised"),
        "lambda": ("infrastructure_fault", "invalid_result", "agentlightning.runner.outcome.InvalidResult"),
        "exit": ("infrastructure_fault", "runner_died", "agentlightning.runner.isolation.process.AgentProcessDied"),
        "crash": ("infrastructure_fault", "runner_died", "agentlightning.runner.isolation.process.AgentProcessDied"),
        "last": ("scored", None, None),
    }
    rewards = [await reward(store, finished[name]) for name in ("emit", "triplets", "tracer", "policy")]
    assert rewards == [0.25, 0.75, 1.0, -1.0]
    assert [hook.seen[0], hook.seen[2], hook.seen[3]] == [2, 1, 2]

    errors = {name: one.attempt.error for name, one in finished.items() if one.attempt.error is not None}
    assert "raise {" in (errors["zero"].traceback or ""), "the line that raised, in the other process"
    assert errors["luck"].message == "OutOfLuck: 1 and 2"
    assert "ended with exit code 7 during the attempt" in errors["exit"].message
    assert "was ended by SIGSEGV during the attempt" in errors["crash"].message

    spans = [(await store.query_spans(one.rollout_id)).items[0] for one in finished.values() if one.input == "pid"]
    pids = [agl.get_message_value(span) for span in spans]
    assert len(set(pids)) == 2, "a process is used again, and replaced when it has died"
    assert str(os.getpid()) not in pids
    assert not [pid for pid in pids if psutil.pid_exists(int(pid or 0))]


async def test_agents_that_ignore_their_time_limit_are_killed_with_all_that_they_started(
    store: InMemoryLightningStore,
) -> None:
    modes = {"ignores it": None, "holds the interpreter": None, "blocks the loop": "val"}
    config = RolloutConfig(timeout_seconds=1.0)
    for task, mode in modes.items():
        await store.enqueue_rollout(input=task, mode=mode, config=config)
    runner = LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=3, concurrency=3, isolation="process")
    with runner.run_context(agent=Stubborn(), store=store):
        await runner.iter()
    attempts = {one.input: one.attempt for one in await store.query_rollouts() if isinstance(one, AttemptedRollout)}
    assert {task: (one.status, one.outcome, one.outcome_reason) for task, one in attempts.items()} == dict.fromkeys(
        modes, ("timeout", "cancelled", "timeout")
    )
    [message] = await store.query_spans(attempts["ignores it"].rollout_id)
    pids = [int(pid) for pid in (agl.get_message_value(message) or "").split()]
    assert len(pids) == 2, "what it had recorded was told before it was killed"
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


class Tidy(LitAgent[Any]):
    """Has something to do at the end of its process."""

    needs_resources = False

    @override
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        atexit.register(Path(task).write_text, "done")
        return 1.0


async def test_a_process_that_has_nothing_to_do_ends_in_order(store: InMemoryLightningStore, tmp_path: Path) -> None:
    await run_tasks(store, Tidy(), str(tmp_path / "note"))
    assert (tmp_path / "note").read_text() == "done"


class Unwelcome(LitAgent[Any]):
    """Cannot be loaded elsewhere."""

    needs_resources = False

    def __reduce__(self) -> Any:
        return os._exit, (3,)


async def test_an_agent_that_cannot_be_loaded_in_its_process_ends_the_runner_before_it_claims(
    store: InMemoryLightningStore,
) -> None:
    with pytest.raises(AgentProcessDied, match=r"exit code 3 before it was ready; can it import the agent\?"):
        await run_tasks(store, Unwelcome(), "x")
    assert (await store.query_rollouts(status_in=["queuing"])).total == 1


def test_an_agent_that_cannot_travel_is_refused_with_the_ways_out(store: InMemoryLightningStore) -> None:
    runner = LitAgentRunner[Any](agl.OtelTracer(), isolation="process")
    with pytest.raises(TypeError, match=r"isolation='process' sends the agent to a process .* cannot be pickled"):
        runner.init(rollout(lambda task: 1.0))
    with pytest.raises(ValueError, match="isolation must be one of thread, process; got 'fork'"):
        LitAgentRunner[Any](agl.OtelTracer(), isolation="fork")


RUNNER = """
import asyncio, sys
import agentlightning as agl
from tests.runner.test_isolation import Stubborn

async def main():
    runner = agl.LitAgentRunner(agl.OtelTracer(), isolation="process")
    with runner.run_context(agent=Stubborn(), store=agl.InMemoryLightningStore()):
        await runner.step("pipe " + sys.argv[1])

asyncio.run(main())
"""


@pytest.mark.slow
def test_no_process_of_an_agent_outlives_a_runner_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(pipe)], cwd=root) as runner:
        agents = [psutil.Process(int(pid)) for pid in pipe.read_text().split()]
        runner.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(agents, timeout=20)
    assert (len(gone), alive) == (2, [])
