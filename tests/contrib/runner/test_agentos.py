"""`AgentOSRunner` on `KernelSpace` of the package agent-os-kernel: the effect of a refusal, however it is made."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import agentlightning as agl
from agentlightning.contrib.agentos import PolicyWatch, RecorderWatch
from agentlightning.contrib.reward.agentos import PolicyReward
from agentlightning.contrib.runner.agentos import AgentOSRunner
from agentlightning.store import LightningStore
from agentlightning.types import Dataset
from tests.contrib.kernels import (
    ROLE,
    SQLPolicy,
    blocking_agent,
    execute,
    kernel_of,
    known_agent,
    living_agent,
    needs_agent_os,
    recorder_at,
    unknown_agent,
)

pytestmark = needs_agent_os

TASKS = [["SELECT 1"], ["DROP a", "SELECT 1", "DELETE b"]]


class Attempt(NamedTuple):
    outcome: str | None
    reward: float | None
    violations: list[str]
    actions: list[tuple[str, str]]
    """Name and verdict of the spans from a flight recorder."""
    error: str
    texts: str
    """All attributes of its spans."""


@agl.algo
async def attempts(*, store: LightningStore, train_dataset: Dataset[Any]) -> list[Attempt]:
    """Runs every task at once and returns the outcome of each."""
    await store.add_resources({})
    made = [await store.enqueue_rollout(task, config=agl.RolloutConfig(max_attempts=1)) for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made], timeout=60)
    rows: list[Attempt] = []
    for rollout in made:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        spans = list(await store.query_spans(rollout.rollout_id))
        violations = [str(span.attributes["violation"]) for span in spans if "violation" in span.attributes]
        verdict = "agent_os.verdict"
        actions = [(span.name, str(span.attributes[verdict])) for span in spans if verdict in span.attributes]
        error = "" if attempt.error is None else f"{attempt.error.type}: {attempt.error.message}"
        texts = f"{[span.attributes for span in spans]} {[span.status for span in spans]} {attempt.error}"
        rows.append(Attempt(attempt.outcome, agl.find_final_reward(spans), violations, actions, error, texts))
    return rows


def run(agent: Callable[..., Any], runner: Any, reward: Any, tasks: list[Any] = TASKS, **more: Any) -> list[Attempt]:
    trainer = agl.Trainer(**{"runner": runner, "reward_fn": reward, "algorithm": attempts, "strategy": "shm", **more})
    trainer.fit(agent, train_dataset=tasks)
    return trainer.result


@pytest.mark.parametrize("agent_of", [living_agent, blocking_agent])
@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_an_agent_that_lives_on_pays_for_each_refusal(agent_of: Callable[[Any], Any], strategy: Any) -> None:
    kernel = kernel_of(SQLPolicy())
    clean, refused = run(agent_of(kernel), AgentOSRunner(kernel), PolicyReward(kernel), strategy=strategy)
    assert (clean.outcome, clean.reward, clean.violations) == ("scored", 1.0, [])
    assert (refused.outcome, refused.reward) == ("scored", -1.0)
    assert refused.violations == ["DROP is denied in DROP a", "DELETE is denied in DELETE b"]


def test_an_agent_that_the_kernel_ends_is_a_fault_of_the_policy() -> None:
    kernel = kernel_of(SQLPolicy())
    runner = AgentOSRunner(kernel, violation_reward=-0.5)
    clean, refused = run(known_agent(kernel), runner, PolicyReward(kernel))
    assert (clean.outcome, clean.reward) == ("scored", 1.0)
    assert (refused.outcome, refused.reward, refused.violations) == ("policy_fault", -0.5, ["DROP is denied in DROP a"])
    assert "refused an action: DROP is denied in DROP a" in refused.error
    assert "AgentKernelPanic" in refused.texts  # the traceback has both


def test_several_agents_at_once_each_have_their_own_violations() -> None:
    policy = PolicyWatch(SQLPolicy())

    async def agent(task: list[str]) -> Any:
        kernel, codes = kernel_of(policy), []
        for statement in task:
            await asyncio.sleep(0)
            codes.append((await execute(unknown_agent(kernel), statement)).error_code)
        return {"codes": codes}

    tasks = [["DROP a"] * count + ["SELECT 1"] for count in range(12)]
    rows = run(agent, AgentOSRunner(policy, concurrency=12), PolicyReward(policy), tasks)
    assert [attempt.reward for attempt in rows] == [1.0 - count for count in range(12)]


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_several_workers_share_a_policy(strategy: Any) -> None:
    policy = PolicyWatch(SQLPolicy())

    async def agent(task: list[str]) -> Any:
        return await living_agent(kernel_of(policy))(task)

    rows = run(agent, AgentOSRunner(policy), PolicyReward(policy), TASKS * 4, strategy=strategy, n_runners=2)
    assert [attempt.reward for attempt in rows] == [1.0, -1.0] * 4


def test_only_the_kernels_of_the_reward_cost() -> None:
    cheap, dear = kernel_of(SQLPolicy()), kernel_of(SQLPolicy())

    async def agent(task: list[str]) -> Any:
        for kernel in (cheap, dear, dear):
            await living_agent(kernel)(task)
        return "done"

    [attempt] = run(agent, AgentOSRunner([cheap, dear]), PolicyReward(dear), [["DROP a"]])
    assert (attempt.reward, len(attempt.violations)) == (-1.0, 3)
    [attempt] = run(agent, AgentOSRunner([cheap, dear]), PolicyReward([cheap, dear, dear]), [["DROP a"]])
    assert attempt.reward == -2.0


@pytest.mark.parametrize("thread", ["plain", "pool", "copied"])
def test_a_refusal_in_a_thread_of_a_tool_counts(thread: str) -> None:
    kernel = kernel_of(SQLPolicy())

    async def agent(task: list[str]) -> Any:
        def work() -> None:
            asyncio.run(living_agent(kernel)(task))

        if thread == "copied":
            await asyncio.to_thread(work)
        elif thread == "pool":
            with ThreadPoolExecutor(1) as pool:
                await asyncio.wrap_future(pool.submit(work))
        else:
            started = threading.Thread(target=work)
            started.start()
            await asyncio.to_thread(started.join)
        return "done"

    clean, refused = run(agent, AgentOSRunner(kernel, concurrency=2), PolicyReward(kernel))
    assert (clean.reward, refused.reward, len(refused.violations)) == (1.0, -1.0, 2)


def test_what_an_attempt_left_behind_counts_for_no_other(caplog: pytest.LogCaptureFixture) -> None:
    kernel = kernel_of(SQLPolicy())
    go, end = threading.Event(), threading.Event()

    def later() -> None:
        go.wait(30)
        asyncio.run(living_agent(kernel)(["DROP a"]))
        end.set()

    def agent(task: str) -> Any:
        if task == "leave":
            threading.Thread(target=later).start()
        else:
            go.set()
            end.wait(30)
        return "done"

    with caplog.at_level(logging.WARNING):
        rows = run(agent, AgentOSRunner(kernel), PolicyReward(kernel), ["leave", "next"])
    assert [(attempt.reward, attempt.violations) for attempt in rows] == [(1.0, []), (1.0, [])]
    assert "belongs to no attempt (DROP is denied" in caplog.text


def test_the_first_violation_ends_the_attempt_whatever_the_agent_does() -> None:
    kernel, done = kernel_of(SQLPolicy()), list[Any]()

    async def agent(task: list[str]) -> Any:
        for statement in task:
            with contextlib.suppress(Exception):
                done.append((await execute(unknown_agent(kernel), statement)).error_code)
        return 1.0

    runner = AgentOSRunner(kernel, fail_on_violation=True)
    [attempt] = run(agent, runner, PolicyReward(kernel), [["SELECT 1", "DROP a", "SELECT 2", "DELETE b"]])
    assert (attempt.outcome, attempt.reward) == ("policy_fault", -1.0)
    assert attempt.violations == ["DROP is denied in DROP a"]
    assert done == [None, -2]


def test_a_refusal_that_leaves_the_agent_as_an_error_is_the_policys() -> None:
    kernel = kernel_of(SQLPolicy())

    async def agent(task: str) -> Any:
        from agent_control_plane.kernel_space import SyscallType

        context = unknown_agent(kernel)
        refused = await context.syscall(SyscallType.SYS_OPEN, path="/mem")
        assert refused.error_code == -2
        raise OSError(refused.error_message) if task == "refused" else OSError("the disk is full")

    refused, other = run(agent, AgentOSRunner(kernel), PolicyReward(kernel), ["refused", "broken"])
    assert (refused.outcome, other.outcome) == ("policy_fault", "infrastructure_fault")


def test_panics_of_other_kinds() -> None:
    async def agent(task: str) -> Any:
        from agent_control_plane.kernel_space import user_space_execution
        from agent_control_plane.signals import AgentSignal

        own = kernel_of(policy)
        if task == "grouped":
            async with asyncio.TaskGroup() as group:
                group.create_task(execute(own.create_agent_context(ROLE), "DROP a"))
        async with user_space_execution(own, ROLE):
            if task == "kernel":
                own.panic("out of memory")
            own._signal_dispatchers[ROLE].signal(AgentSignal.SIGTRUST, reason="a stranger's key")

    policy = PolicyWatch(SQLPolicy())
    own, trust, grouped = run(agent, AgentOSRunner(policy), None, ["kernel", "trust", "grouped"])
    assert (own.outcome, own.violations) == ("infrastructure_fault", [])
    assert trust.outcome == "policy_fault"
    assert ["a stranger's key" in text for text in trust.violations] == [True]
    assert (grouped.outcome, grouped.violations) == ("policy_fault", ["DROP is denied in DROP a"])


def test_a_question_about_the_policy_is_no_violation() -> None:
    kernel = kernel_of(SQLPolicy())

    async def agent(task: str) -> Any:
        return {"allowed": await unknown_agent(kernel).check_policy("rm", task)}

    [attempt] = run(agent, AgentOSRunner(kernel), PolicyReward(kernel), ["/etc"])
    assert (attempt.outcome, attempt.reward, attempt.violations) == ("scored", 1.0, [])


def test_secrets_in_what_was_refused_are_hidden(tmp_path: Path) -> None:
    kernel = kernel_of(SQLPolicy(), recorder_at(tmp_path))

    async def agent(task: str) -> Any:
        await execute(unknown_agent(kernel), task, password="hunter2-hunter2", note="sk-" + "a1B2" * 12)
        await execute(unknown_agent(kernel), "SELECT 1")
        return "done"

    statement = "DROP a; postgres://user:hunter3-hunter3@db/x"
    runners = [AgentOSRunner(kernel), AgentOSRunner(kernel, fail_on_violation=True)]
    for runner, outcome in zip(runners, ("scored", "policy_fault"), strict=True):
        [attempt] = run(agent, runner, PolicyReward(kernel), [statement])
        assert attempt.outcome == outcome
        assert attempt.violations == ["DROP is denied in DROP a; postgres://user:[hidden]@db/x"]
        assert [part for part in ("hunter2", "hunter3", "a1B2a1B2") if part in attempt.texts] == []
        assert "agent_os.arguments" in attempt.texts


def test_the_flight_recorders_entries_become_spans_of_their_attempt(tmp_path: Path) -> None:
    kernel = kernel_of(SQLPolicy(), recorder_at(tmp_path))
    asyncio.run(living_agent(kernel)(["SELECT 0", "DROP b"]))  # before all attempts
    clean, refused = run(living_agent(kernel), AgentOSRunner(kernel, concurrency=2), PolicyReward(kernel))
    assert clean.actions == [("query", "allowed")]
    assert refused.actions == [("query", "blocked"), ("query", "allowed"), ("query", "blocked")]
    assert refused.reward == -1.0
    [_, quiet] = run(living_agent(kernel), AgentOSRunner(kernel, emit_entries=False), PolicyReward(kernel))
    assert (quiet.actions, quiet.reward) == ([], -1.0)


def test_entries_of_an_attempt_that_failed_are_kept(tmp_path: Path) -> None:
    kernel = kernel_of(SQLPolicy(), recorder_at(tmp_path))
    _, refused = run(known_agent(kernel), AgentOSRunner(kernel), PolicyReward(kernel))
    assert (refused.outcome, refused.actions) == ("policy_fault", [("query", "blocked")])


def test_a_recorder_that_breaks_costs_only_its_spans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = kernel_of(SQLPolicy(), recorder_at(tmp_path))

    async def agent(task: list[str]) -> Any:
        output = await living_agent(kernel)(task)
        with sqlite3.connect(tmp_path / "flight.db") as database:
            database.execute("DROP TABLE audit_log")
        return output

    _, refused = run(agent, AgentOSRunner(kernel), PolicyReward(kernel), [["DROP a"], ["DROP a"]])
    assert refused.actions == []
    assert "could not read the flight recorder" in caplog.text


def test_a_recorder_is_not_taken_into_another_process(tmp_path: Path) -> None:
    kernel = kernel_of(SQLPolicy(), recorder_at(tmp_path))
    runner = AgentOSRunner(kernel)
    runner._made_in = os.getpid() + 1
    with pytest.raises(RuntimeError, match=r"open SQLite connection, .*strategy='shm'"):
        runner.init_worker(0, agl.InMemoryLightningStore())


def test_each_worker_process_may_have_a_recorder_of_its_own(tmp_path: Path) -> None:
    policy = PolicyWatch(SQLPolicy())

    async def agent(task: list[str]) -> Any:
        folder = tmp_path / str(os.getpid())
        folder.mkdir(exist_ok=True)
        return await living_agent(kernel_of(policy, RecorderWatch(recorder_at(folder))))(task)

    strategy = {"type": "cs", "server_port": 0}
    clean, refused = run(agent, AgentOSRunner(policy), PolicyReward(policy), strategy=strategy)
    assert (clean.actions, refused.reward, len(refused.actions)) == ([("query", "allowed")], -1.0, 3)


def test_a_worker_that_dies_after_a_violation_leaves_no_reward(tmp_path: Path) -> None:
    policy, died = PolicyWatch(SQLPolicy()), tmp_path / "died"

    async def agent(task: list[str]) -> Any:
        output = await living_agent(kernel_of(policy))(task)
        if "DROP a" in task and not died.exists():
            died.touch()
            os._exit(1)
        return output

    strategy = {"type": "cs", "server_port": 0}
    trainer = agl.Trainer(
        runner=AgentOSRunner(policy), reward_fn=PolicyReward(policy), algorithm="baseline", strategy=strategy
    )
    trainer.fit(agent, TASKS)
    assert died.exists()
    assert trainer.result.rewards == [1.0, -1.0]  # of a second attempt, which counts its own violations only


def test_a_kernel_without_a_policy_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    kernel = kernel_of(None)
    rows = run(living_agent(kernel), AgentOSRunner(kernel), PolicyReward(kernel))
    assert [attempt.reward for attempt in rows] == [1.0, 1.0]
    assert "the kernel has no policy_engine, so it refuses no actions" in caplog.text


def test_settings_that_cannot_work_are_refused() -> None:
    kernel = kernel_of(SQLPolicy())
    with pytest.raises(ValueError, match=r"isolation='process' is not supported\. Remove it"):
        AgentOSRunner(kernel, isolation="process")
    with pytest.raises(
        ValueError, match=r"violation_reward must be a finite number of at most 1e\+15 in magnitude .*; got nan"
    ):
        AgentOSRunner(kernel, violation_reward=float("nan"))
    with pytest.raises(ValueError, match=r"penalty must be a finite number of at most 1e\+15 in magnitude .*; got inf"):
        PolicyReward(kernel, penalty=float("inf"))
    with pytest.raises(TypeError, match="kernel must not be an empty list"):
        AgentOSRunner([])
    with pytest.raises(TypeError, match="kernel must be a KernelSpace"):
        AgentOSRunner(type(kernel))


def test_what_the_packages_own_engine_sees_of_a_tools_arguments() -> None:
    """Check the statement of `docs/how-to/agent-os.md` on 3.7.0; once this fails, its `Policy` is no longer needed."""
    engine = importlib.import_module("agent_control_plane.policy_engine").PolicyEngine()
    engine.add_constraint(ROLE, ["database_query"])
    kernel = kernel_of(engine)
    kernel.register_tool("database_query", lambda query: query)

    async def agent(task: dict[str, Any]) -> Any:
        syscall = importlib.import_module("agent_control_plane.kernel_space").SyscallType.SYS_EXEC
        return {"code": (await unknown_agent(kernel).syscall(syscall, **task)).error_code}

    tasks = [{"tool": tool, "args": {"query": "DROP TABLE a"}} for tool in ("database_query", "shell")]
    rows = run(agent, AgentOSRunner(kernel), PolicyReward(kernel), tasks)
    assert [attempt.violations for attempt in rows] == [[], [f"Role {ROLE} cannot use tool shell"]]
    assert [attempt.reward for attempt in rows] == [1.0, 0.0]


@pytest.mark.filterwarnings("ignore")  # the package warns of its own use of pydantic
def test_the_interface_of_older_pages_is_not_in_the_package() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'policy'"):
        importlib.import_module("agent_os").KernelSpace(policy=SQLPolicy())
    assert not hasattr(importlib.import_module("agent_os.policies"), "SQLPolicy")
