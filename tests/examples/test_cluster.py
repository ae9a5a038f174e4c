"""examples/cluster: each recipe's parts as processes of this machine; a killed runner, an interrupted job, Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.store.base import LightningStore
from tests.algorithm.parts import save_untrained_model
from tests.deploy.recipes import CLUSTER, DEPLOY, VALUES, Part, compose_parts, kubernetes_parts
from tests.deploy.test_recipes import check_command
from tests.deploy.topologies import Topology, in_file, submit
from tests.examples.shown import curve, run
from tests.stubs.processes import LIMIT_SECONDS, Process, Terminal

PROGRAM = CLUSTER / "train.py"
COMPOSE, MANIFEST, SBATCH = CLUSTER / "compose.yaml", CLUSTER / "kubernetes.yaml", CLUSTER / "job.sbatch"
REUSED = [DEPLOY / "kubernetes/settings.yaml", DEPLOY / "kubernetes/store.yaml"]

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-example NAMES=cluster"
)
in_own_environment = pytest.mark.skipif(
    os.environ.get("AGL_TEST_EXAMPLE") != "cluster", reason="takes minutes: make test-example NAMES=cluster"
)


def parts_of_compose() -> list[Part]:
    return compose_parts(VALUES, COMPOSE)


def parts_of_kubernetes() -> list[Part]:
    return kubernetes_parts(VALUES, [*REUSED, MANIFEST])


RECIPES = [pytest.param(parts_of_compose, id="compose"), pytest.param(parts_of_kubernetes, id="kubernetes")]


@pytest.fixture(scope="module")
def first_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model that the example begins with, made once."""
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    from agentlightning.demo.imitation import make_policy

    folder = tmp_path_factory.mktemp("cluster") / "first-model"
    make_policy(folder)
    return folder


@pytest.fixture
def topology(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Part]], Topology]:
    monkeypatch.setenv("AGL_TOKEN", VALUES["AGL_TOKEN"])
    return lambda parts: Topology(parts, terminal, tmp_path, PROGRAM)


def kill_at_work(parts: Topology, runner: Process) -> str:
    """Kill a runner while it has a rollout; return the id of that rollout."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        for each in runner.family():
            each.send_signal(signal.SIGSTOP)  # what it has in hand now, it has when it is killed
        if rollout := asyncio.run(_in_hand(parts.store_port, {each.pid for each in runner.family()})):
            runner.kill()
            return rollout
        for each in runner.family():
            each.send_signal(signal.SIGCONT)
        threading.Event().wait(0.1)
    raise AssertionError(f"it had no rollout in all the time:\n{runner.said[-4000:]}")


async def _in_hand(port: str, pids: set[int]) -> str | None:
    client = agl.LightningStoreClient(f"http://127.0.0.1:{port}")
    try:
        workers = await client.query_workers()
        mine = [one for one in workers if pids & {int(part) for part in re.findall(r"\d+", one.worker_id)}]
        return next((one.current_rollout_id for one in mine if one.current_rollout_id), None)
    finally:
        await client.close()


def steps_of(output: str) -> list[int]:
    """Return the numbers of the steps that an algorithm says it has taken, in their order."""
    return [int(step) for step in re.findall(r"^step +(\d+)/", output, re.MULTILINE)]


def check_learnt(output: str) -> None:
    assert steps_of(output) == [1, 2, 3, 4, 5, 6, 7, 8]
    shares = curve(output)
    assert shares[8] >= shares[0] + 30


def check_goes_on(output: str) -> None:
    steps = steps_of(output)
    assert steps[-1] == 8
    assert steps[0] > 1, "the steps before the checkpoint are not taken again"


# --- what the files say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_and_option_exists(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CLUSTER)
    from train import parser  # type: ignore[import-not-found]

    parts = recipe()
    assert {part.name for part in parts} == {"store", "algorithm", "runner"}
    for part in parts:
        for name, value in part.environment.items():
            monkeypatch.setenv(name, value)
        if part.command[0] == "python":
            assert part.command[1] == "train.py"
            options = parser().parse_args(part.command[2:])
            assert (options.gateway_host, options.gateway_port) == ("0.0.0.0", 8000)
        else:
            check_command(part.command)
    runs = {part.environment.get("AGL_RUN_ID") for part in parts if part.name != "store"}
    assert runs == {"first"}, "only a run with a name goes on after its algorithm has been lost"


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "recipe",
    [RECIPES[0], pytest.param(parts_of_kubernetes, id="kubernetes", marks=[pytest.mark.heavy, in_own_environment])],
)
def test_the_parts_find_each_other_and_a_model_that_earns_nothing_learns_nothing(
    recipe: Any, topology: Callable[[list[Part]], Topology], tmp_path: Path
) -> None:
    parts = topology(recipe())
    model = save_untrained_model(tmp_path / "model")
    runner, store = parts.start("runner"), parts.start("store")
    algorithm = parts.start("algorithm", "--model", str(model), "--steps", "1", "--held-out", "4")
    output = algorithm.succeeded()
    assert curve(output) == {0: 0}
    assert "equal_rewards 128" in output
    assert (tmp_path / "run/run/model").is_dir()
    runner.succeeded()
    assert store.interrupted(signal.SIGTERM) == 0, store.said


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_training_goes_on_when_a_runner_is_killed_and_another_one_joins(
    topology: Callable[[list[Part]], Topology], tmp_path: Path, first_model: Path
) -> None:
    parts = topology(parts_of_compose())
    parts.start("store")
    first, second = parts.start("runner"), parts.start("runner")
    algorithm = parts.start("algorithm", "--model", str(first_model))
    algorithm.until(r"step +1/8")
    lost = kill_at_work(parts, first)
    third = parts.start("runner")
    check_learnt(algorithm.succeeded())
    assert [runner.ended() for runner in (second, third)] == [0, 0], "the end of the run is told to those that are left"

    async def attempts(store: LightningStore) -> list[str]:
        return [attempt.status for attempt in await store.query_attempts(lost)]

    statuses = in_file(tmp_path / "store.db", attempts)
    assert len(statuses) == 2, "what the killed one had in hand was run again"
    assert statuses[-1] == "succeeded"


@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_killed_algorithm_goes_on_from_its_checkpoint_with_the_same_runners(
    topology: Callable[[list[Part]], Topology], first_model: Path
) -> None:
    parts = topology(parts_of_compose())
    parts.start("store")
    runner = parts.start("runner")
    algorithm = parts.start("algorithm", "--model", str(first_model))
    algorithm.until(r"step +4/8")
    algorithm.kill()
    check_goes_on(parts.start("algorithm", "--model", str(first_model)).succeeded())
    runner.succeeded()


# --- Slurm -----------------------------------------------------------------------------------------------------------


@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_trains_while_one_of_its_nodes_is_lost(terminal: Terminal, tmp_path: Path, first_model: Path) -> None:
    job = submit(terminal, tmp_path, SBATCH, str(PROGRAM), "--model", str(first_model), nodes=2)
    job.until(r"step +2/8")
    [node] = re.findall(r"nodes (\d+) \d+", job.said)
    lost = psutil.Process(int(node))
    for each in [lost, *lost.children(recursive=True)]:
        each.kill()
    check_learnt(job.succeeded())
    folder = tmp_path / "runs/slurm-7"
    assert (folder / "store.db").is_file()
    assert (folder / "run/model").is_dir()
    assert not list(tmp_path.glob("tmp.*")), "the scratch folder is gone"


@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_that_is_interrupted_before_its_time_is_up_goes_on_as_another_job(
    terminal: Terminal, tmp_path: Path, first_model: Path
) -> None:
    def submitted(number: int, **variables: str) -> Process:
        model = ("--model", str(first_model))
        return submit(terminal, tmp_path, SBATCH, str(PROGRAM), *model, job=number, nodes=2, **variables)

    job = submitted(8)
    job.until(r"step +3/8")
    os.kill(job.popen.pid, signal.SIGTERM)
    assert job.ended() == 128 + signal.SIGINT, job.said
    assert steps_of(job.said)[-1] >= 3
    check_goes_on(submitted(9, RUN="slurm-8").succeeded())


# --- Ray -------------------------------------------------------------------------------------------------------------


@needs_ray
@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_runners_are_actors_of_a_ray_cluster(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    options = f"--ray local --model {model} --steps 1 --held-out 4 --out {tmp_path / 'out'}"
    printed = run(f"python {PROGRAM} {options}", timeout=250, RAY_AUTH_MODE="disabled")
    assert curve(printed) == {0: 0}


@needs_ray
@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_training_goes_on_when_an_actor_is_killed(terminal: Terminal, first_model: Path) -> None:
    options = ("--ray", "local", "--model", str(first_model), "--out", "out")
    driver = terminal(["python", PROGRAM, *options], RAY_AUTH_MODE="disabled")
    driver.until(r"step +2/8")
    actors = [one for one in driver.family() if "".join(one.cmdline()[:1]).startswith("ray::RunnerActor")]
    assert len(actors) == 2, [one.cmdline() for one in driver.family()]
    actors[0].kill()
    check_learnt(driver.succeeded())
