"""examples/cluster: each recipe's parts as processes of this machine; a killed runner, an interrupted job, Ray."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.examples.clusters import CLUSTER, INSTALLED, PROGRAM, Process, Topology, attempts_of, curve, kill, steps_of

from agentlightning.utils.version import VERSION
from tests.algorithm.parts import save_untrained_model
from tests.deploy.recipes import DEPLOY, VALUES, Part, compose, compose_parts, documents, kubernetes_parts, workloads
from tests.deploy.test_recipes import check_command
from tests.examples.shown import run
from tests.stubs.ports import free_port

COMPOSE, MANIFEST, SBATCH = CLUSTER / "compose.yaml", CLUSTER / "kubernetes.yaml", CLUSTER / "job.sbatch"
REUSED = [DEPLOY / "kubernetes/settings.yaml", DEPLOY / "kubernetes/store.yaml"]

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-example NAMES=cluster"
)
in_own_environment = pytest.mark.skipif(
    os.environ.get("AGL_TEST_EXAMPLE") != "cluster", reason="takes minutes: make test-example NAMES=cluster"
)
needs_schemas = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="The schemas are not installed: make test-example NAMES=cluster",
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
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[Part]], Topology]]:
    made: list[Topology] = []
    monkeypatch.setenv("AGL_TOKEN", VALUES["AGL_TOKEN"])

    def make(parts: list[Part]) -> Topology:
        made.append(Topology(parts, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


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
            given = parser().parse_args(part.command[2:])
            assert (given.gateway_host, given.gateway_port) == ("0.0.0.0", 8000)
        else:
            check_command(part.command)
    runs = {part.environment.get("AGL_RUN_ID") for part in parts if part.name != "store"}
    assert runs == {"first"}, "only a run with a name goes on after its algorithm has been lost"


def test_nothing_has_more_rights_than_it_needs_and_no_secret_is_in_a_file() -> None:
    pods = [workload["spec"]["template"]["spec"] for workload in workloads([MANIFEST])]
    assert len(pods) == 2
    for pod in pods:
        assert (pod["securityContext"]["runAsUser"], pod["automountServiceAccountToken"]) == (10001, False)
        [container] = pod["containers"]
        assert container["image"] == f"agentlightning:{VERSION}-demo"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        [token] = [entry for entry in container["env"] if entry["name"] == "AGL_TOKEN"]
        assert "secretKeyRef" in token["valueFrom"]
    for service in compose(COMPOSE)["services"].values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["image"] == f"agentlightning:{VERSION}-demo"
        assert service["environment"]["AGL_TOKEN"].startswith("${AGL_TOKEN")
    assert not re.search(r"--token", SBATCH.read_text()), "a command line is read by everybody"


@needs_schemas
@pytest.mark.parametrize("version", ["1.29.0", "1.34.0"])
@pytest.mark.parametrize("document", list(documents([MANIFEST])), ids=lambda each: each["metadata"]["name"])
def test_a_manifest_is_what_kubernetes_expects(document: dict[str, Any], version: str) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, version, strict=True)


def test_settings_of_the_job_stand_before_its_first_command_and_it_is_bash_that_parses() -> None:
    text = SBATCH.read_text()
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    head, _, _ = text.partition("\nset -euo pipefail")
    assert head.count("#SBATCH --") == text.count("#SBATCH --") >= 5, "Slurm reads no further than that"


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed: apt-get install shellcheck"
)
def test_shellcheck_finds_nothing_in_the_job_script() -> None:
    done = subprocess.run(["shellcheck", str(SBATCH)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


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
    assert algorithm.ended() == 0, algorithm.said
    assert curve(algorithm.said) == {0: 0}
    assert "equal_rewards 128" in algorithm.said
    assert (tmp_path / "run/run/model").is_dir()
    assert runner.ended() == 0, runner.said
    store.popen.terminate()
    assert store.ended() == 0, store.said


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
    lost = parts.kill_at_work(first)
    third = parts.start("runner")
    assert algorithm.ended() == 0, algorithm.said
    assert steps_of(algorithm.said) == [1, 2, 3, 4, 5, 6, 7, 8]
    found = curve(algorithm.said)
    assert found[8] >= found[0] + 30, "and it has learnt"
    assert [runner.ended() for runner in (second, third)] == [0, 0], "the end of the run is told to those that are left"
    statuses = attempts_of(tmp_path / "store.db", lost)
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
    again = parts.start("algorithm", "--model", str(first_model))
    assert again.ended() == 0, again.said
    taken = steps_of(again.said)
    assert taken[-1] == 8
    assert taken[0] > 1, "the steps before the checkpoint are not taken again"
    assert runner.ended() == 0, runner.said


# --- Slurm -----------------------------------------------------------------------------------------------------------

SRUN = """#!/usr/bin/env bash
# Two nodes, both of them this machine; as the real one it hands signals on and waits for all tasks.
while [[ $1 == -* ]]; do shift; done
"$@" & one=$!
"$@" & two=$!
echo "nodes $one $two"
trap 'kill -TERM $one $two 2>/dev/null' TERM
wait $one; wait $two; wait
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts the job script as Slurm would, with stand-ins for its commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}
    scripts |= {name: f'#!/bin/sh\nexec {path} "$@"\n' for name, path in INSTALLED.items()}
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    started: list[Process] = []

    def start(job: int, *arguments: str, **given: str) -> Process:
        slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "nodes", "SLURM_SUBMIT_DIR": str(tmp_path)}
        ports = {"STORE_PORT": str(free_port()), "GATEWAY_PORT": str(free_port())}
        places = {"PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        command = ["bash", str(SBATCH), str(PROGRAM), *arguments]
        started.append(Process(command, tmp_path, {**slurm, **ports, **places, **given}, f"job-{job}"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_trains_while_one_of_its_nodes_is_lost(
    submit: Callable[..., Process], tmp_path: Path, first_model: Path
) -> None:
    job = submit(7, "--model", str(first_model))
    job.until(r"step +2/8")
    [node] = re.findall(r"nodes (\d+) \d+", job.said)
    lost = psutil.Process(int(node))
    for each in [lost, *lost.children(recursive=True)]:
        kill(each)
    assert job.ended() == 0, job.said
    assert steps_of(job.said) == [1, 2, 3, 4, 5, 6, 7, 8]
    found = curve(job.said)
    assert found[8] >= found[0] + 30
    folder = tmp_path / "runs/slurm-7"
    assert (folder / "store.db").is_file()
    assert (folder / "run/model").is_dir()
    assert not list(tmp_path.glob("tmp.*")), "the scratch folder is gone"


@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_job_that_is_interrupted_before_its_time_is_up_goes_on_as_another_job(
    submit: Callable[..., Process], first_model: Path
) -> None:
    job = submit(8, "--model", str(first_model))
    job.until(r"step +3/8")
    os.kill(job.popen.pid, signal.SIGTERM)
    assert job.ended() == 128 + signal.SIGINT, job.said
    before = steps_of(job.said)
    again = submit(9, "--model", str(first_model), RUN="slurm-8")
    assert again.ended() == 0, again.said
    taken = steps_of(again.said)
    assert taken[-1] == 8
    assert taken[0] > 1, "the steps before the checkpoint are not taken again"
    assert before[-1] >= 3


# --- Ray -------------------------------------------------------------------------------------------------------------


@needs_ray
@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_runners_are_actors_of_a_ray_cluster(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    given = f"--ray local --model {model} --steps 1 --held-out 4 --out {tmp_path / 'out'}"
    printed = run(f"python {PROGRAM} {given}", timeout=250, RAY_AUTH_MODE="disabled")
    assert curve(printed) == {0: 0}


@needs_ray
@in_own_environment
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_training_goes_on_when_an_actor_is_killed(tmp_path: Path, first_model: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--ray", "local", "--model", str(first_model), "--out", "out"]
    driver = Process(command, tmp_path, {"RAY_AUTH_MODE": "disabled"}, "driver")
    try:
        driver.until(r"step +2/8")
        actors = [one for one in driver.family() if "".join(one.cmdline()[:1]).startswith("ray::RunnerActor")]
        assert len(actors) == 2, [one.cmdline() for one in driver.family()]
        kill(actors[0])
        assert driver.ended() == 0, driver.said
    finally:
        driver.kill()
    assert steps_of(driver.said) == [1, 2, 3, 4, 5, 6, 7, 8]
    found = curve(driver.said)
    assert found[8] >= found[0] + 30
