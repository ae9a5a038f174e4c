"""`strategy="ray"` on two nodes of this machine: placement, restarts, and every way to end, with no actor left."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.errors import MissingExtraError, RunnerDiedError
from agentlightning.execution import ExecutionEvent, RayExecutionStrategy, StalledError, StrandedWorkError
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.execution.bundles import (
    AtWork,
    DieOnce,
    Serve,
    Tasks,
    blocking_runner,
    broken_algorithm,
    broken_runner,
    deaf_runner,
    killed_at_the_end,
    until_one_is_at_work,
)
from tests.pages import blocks
from tests.stubs.processes import ROOT, Process, Terminal, assert_gone, run_program

INTERRUPT_SECONDS = 5.0
INSTALLED = importlib.util.find_spec("ray") is not None


def on_nodes(test: Any) -> Any:
    """Mark a test that needs Ray."""
    needs_ray = pytest.mark.skipif(not INSTALLED, reason="Ray is not installed: pip install 'agl-framework[ray]'")
    return needs_ray(pytest.mark.slow(test))


def with_token(test: Any) -> Any:
    """Mark a test that needs Ray and has a token."""
    return on_nodes(pytest.mark.usefixtures("token")(test))


# --- without a cluster -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "error", "text"),
    [
        ({"num_gpus": -1}, ValueError, "num_gpus must be a finite number, 0 or more; got -1"),
        ({"num_cpus": "two"}, TypeError, "num_cpus must be a number; got 'two'"),
        ({"resources": {"browser": float("nan")}}, ValueError, "resources['browser'] must be a finite number"),
        ({"resources": {"GPU": 1}}, ValueError, "for 'GPU' use the setting num_gpus"),
        ({"max_runner_restarts": -1}, ValueError, "max_runner_restarts must be at least 0; got -1"),
        ({"server_port": 70000}, ValueError, "server_port must be at most 65535; got 70000"),
        ({"runtime_env": {"env_vars": {"AGL_TOKEN": "s"}}}, ValueError, "which Ray would show"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        RayExecutionStrategy(**setting)
    assert text in str(caught.value)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    make_trainer, algorithm = agl.Trainer, agl.Baseline()  # loaded before, since that looks for modules as well
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agl-framework\[ray\]'"):
        make_trainer(algorithm=algorithm, strategy="ray")


# --- on two nodes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with two processors each; the second has something special."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2, resources={"far": 2})
        yield cluster
    finally:
        cluster.shutdown()
        patch.undo()


@pytest.fixture
def nodes(cluster: Any) -> str:
    return cluster.address


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "between-the-two-sides")


def strategy(nodes: str, **settings: Any) -> RayExecutionStrategy:
    patience = {"graceful_timeout": 2.0, "terminate_timeout": 1.0}
    return RayExecutionStrategy(address=nodes, **{**patience, **settings})


@with_token
def test_a_trainer_runs_its_agent_on_the_node_that_has_what_a_runner_asks_for(nodes: str) -> None:
    import ray

    @agl.algo
    async def who_runs(*, store: LightningStore, train_dataset: Any) -> list[dict[str, Any]]:
        rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
        done = await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in rollouts], timeout=90)
        assert [each.status for each in done] == ["succeeded"] * len(rollouts)
        spans = [span for each in done for span in await store.query_spans(each.rollout_id)]
        return [dict(span.attributes) for span in spans if "node" in span.attributes]

    @agl.rollout
    def agent(task: str) -> float:
        agl.emit_annotation({"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid()})
        return 1.0

    special = {"type": "ray", "address": nodes, "resources": {"far": 1}, "graceful_timeout": 2.0}
    trainer = agl.Trainer(algorithm=who_runs, strategy=special, n_runners=2)
    trainer.fit(agent, train_dataset=[f"task {number}" for number in range(8)])
    attempts = trainer.result
    assert len(attempts) == 8
    assert len({attempt["node"] for attempt in attempts}) == 1, "only the second node has the resource"
    pids = {attempt["pid"] for attempt in attempts}
    assert os.getpid() not in pids
    assert_gone([int(pid) for pid in pids])


@on_nodes
def test_on_a_cluster_of_others_a_token_is_needed(nodes: str) -> None:
    with pytest.raises(RuntimeError, match=r"Refusing to listen on .* no token is set"):
        strategy(nodes).execute(Tasks(1), Serve(), InMemoryLightningStore())


@with_token
def test_a_killed_actor_is_restarted_and_the_run_goes_on(nodes: str, tmp_path: Path) -> None:
    pids = strategy(nodes).execute(Tasks(3), DieOnce(mark=tmp_path / "died"), InMemoryLightningStore())
    assert len(pids) == 3
    assert (tmp_path / "died").exists()
    assert_gone(pids)


@with_token
def test_an_actor_that_is_killed_while_the_run_ends_costs_no_result(
    nodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "agentlightning"):
        run = strategy(nodes, graceful_timeout=15.0).execute
        assert run(until_one_is_at_work, AtWork(killed_at_the_end), InMemoryLightningStore()) == "at work"
    assert "was killed while the run was ending" in caplog.text


@with_token
def test_a_runner_whose_node_is_lost_goes_on_where_there_is_a_place(nodes: str, cluster: Any) -> None:
    lost = cluster.add_node(num_cpus=1, resources={"movable": 1})

    async def loses_a_node(store: LightningStore, event: ExecutionEvent) -> list[int]:
        before = await Tasks(1)(store, event)
        cluster.add_node(num_cpus=1, resources={"movable": 1})
        cluster.remove_node(lost, allow_graceful=True)  # of a sudden loss Ray takes its time to learn
        await asyncio.to_thread(assert_gone, before)
        return before + await Tasks(1)(store, event)

    movable = strategy(nodes, resources={"movable": 1})
    before, after = movable.execute(loses_a_node, Serve(), InMemoryLightningStore())
    assert before != after


async def killed_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@with_token
@pytest.mark.parametrize(
    ("runner", "causes"),
    [
        (broken_runner, ("exitcode=1", "LookupError: worker 0 found nothing", "Traceback")),
        (killed_runner, ("the actor died", "worker process has died")),
    ],
)
def test_actors_that_always_die_end_the_run_with_their_name_and_cause(
    nodes: str, runner: Any, causes: tuple[str, ...]
) -> None:
    with pytest.raises(RunnerDiedError) as caught:
        strategy(nodes, max_runner_restarts=1).execute(Tasks(1), runner, InMemoryLightningStore())
    text = str(caught.value)
    for part in ("runner-0 (pid ", "restarts: 1; the limit is max_runner_restarts=1", *causes):
        assert part in text


@with_token
def test_a_runner_that_no_node_has_room_for_ends_the_run_with_what_it_asked_and_what_there_is(nodes: str) -> None:
    asks_too_much = strategy(nodes, num_cpus=64, start_timeout=1.0)
    with pytest.raises(RunnerDiedError) as caught:
        asks_too_much.execute(Tasks(1), Serve(), InMemoryLightningStore())
    text = str(caught.value)
    assert "runner-0 (never ran)" in text
    assert "'num_cpus': 64" in text
    assert "the cluster has {'CPU': " in text


@with_token
def test_a_run_ends_at_once_while_a_runner_still_waits_for_a_place(nodes: str) -> None:
    assert len(strategy(nodes, n_runners=3, num_cpus=2).execute(Tasks(2), Serve(), InMemoryLightningStore())) == 2


@with_token
def test_work_that_no_actor_is_left_for_ends_the_run(nodes: str) -> None:
    with pytest.raises(StrandedWorkError, match=r"2 rollouts still open"):
        strategy(nodes).execute(Tasks(3), Serve(cap=1), InMemoryLightningStore())


@with_token
def test_an_algorithm_that_raises_ends_the_actors_and_its_error_is_the_one_raised(nodes: str) -> None:
    with pytest.raises(TimeoutError, match="the algorithm gave up"):
        strategy(nodes).execute(broken_algorithm, Serve(), InMemoryLightningStore())


@with_token
def test_a_run_in_which_nothing_moves_ends_with_a_report_when_asked_to(nodes: str) -> None:
    impatient = strategy(nodes, stall_timeout=1.0, on_stall="raise")
    with pytest.raises(StalledError, match="1 unclaimed rollout"):
        impatient.execute(Tasks(1), deaf_runner, InMemoryLightningStore())


@with_token
def test_an_actor_that_does_not_react_is_ended_by_force(nodes: str) -> None:
    async def one(store: LightningStore, event: ExecutionEvent) -> list[int]:
        return await Tasks(1)(store, event)

    async def serves_then_blocks(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        await Serve(cap=1)(store, worker_id, event)
        await blocking_runner(store, worker_id, event)

    pids = strategy(nodes, graceful_timeout=0.5).execute(one, serves_then_blocks, InMemoryLightningStore())
    assert_gone(pids)


@with_token
def test_a_part_that_cannot_be_sent_is_named(nodes: str) -> None:
    runner = Serve()
    runner.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue] -- what a user's agent may hold
    with pytest.raises(TypeError, match=r"runner\.lock \(lock\) cannot be pickled"):
        strategy(nodes).execute(Tasks(1), runner, InMemoryLightningStore())


@on_nodes
def test_an_unmanaged_store_goes_to_the_actors_as_it_is(nodes: str, tmp_path: Path) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    assert len(strategy(nodes, managed_store=False).execute(Tasks(2), Serve(), store)) == 2


@on_nodes
def test_no_cluster_at_the_address_is_told_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError, match="Start one with `ray start --head`"):
        RayExecutionStrategy(address="127.0.0.1:1").execute(Tasks(1), Serve(), InMemoryLightningStore())


# --- from outside ------------------------------------------------------------------------------------------------


@on_nodes
def test_the_program_of_the_page_starts_a_cluster_of_its_own_and_ends_it(tmp_path: Path) -> None:
    [program] = [block for block in blocks("how-to/ray.md") if "fit" in block]
    script = tmp_path / "program.py"
    script.write_text(program)
    assert "2 rollouts (2 scored), mean reward 0.500" in run_program("python", script).stdout


Started = tuple[Process, list[psutil.Process]]


@pytest.fixture
def started(request: pytest.FixtureRequest, nodes: str, terminal: Terminal, token: None) -> Started:
    """`program.py`, whose runner is at work on the nodes or in a cluster of its own, and its processes."""
    address, runner = request.param
    layout = f"ray {nodes if address == 'nodes' else address}"
    command = ["python", "-m", "tests.execution.program", layout, "waits", runner]
    program = terminal(command, folder=ROOT, AGL_TOKEN=os.environ["AGL_TOKEN"])
    [runner_pid] = re.findall(r"ready \S+ (\d+)\n", program.until(r"ready \S+ \d+\n"))
    own = [process for process in program.family() if not process.name().endswith("Agent")]  # Ray's, see the test below
    return program, [psutil.Process(int(runner_pid)), *own]


each_start = pytest.mark.parametrize("started", [("nodes", "serves_then_blocks"), ("local", "serves")], indirect=True)


@with_token
@each_start
def test_ctrl_c_ends_driver_and_actors_in_its_time(started: Started) -> None:
    program, family = started
    pressed = time.monotonic()
    os.killpg(program.popen.pid, signal.SIGINT)
    program.ended()
    assert time.monotonic() - pressed < 2 * INTERRUPT_SECONDS, "twice the promise: this machine may be busy"
    assert "algorithm cleaned up" in program.said
    assert "returned interrupted=True" in program.said
    assert_gone(family)


@with_token
@each_start
def test_actors_do_not_outlive_a_killed_driver(started: Started) -> None:
    """Nor does the cluster that it started, but for two agents of Ray's that take a minute or two to notice."""
    program, family = started
    program.popen.kill()
    assert_gone(family)
