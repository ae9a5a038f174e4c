"""HarborAgent in containers of podman: what is recorded, what a missing image is, and that no container is left."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli.main import main
from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.trial_folder import remove_left_trials
from tests.environments.harbor_agent.agents import ASK
from tests.environments.harbor_agent.containers import IMAGE, podman, why_not
from tests.environments.harbor_agent.tasks import TOML, make_task
from tests.environments.harbor_agent.test_harbor_agent import MINI, SOLVE, run, script
from tests.frameworks.engine import call, steps

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
DOCKERFILE = {"environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY calc.py .\n"}
WITHOUT_STOPSIGNAL = {"environment/Dockerfile": DOCKERFILE["environment/Dockerfile"] + "STOPSIGNAL SIGTERM\n"}
RUNNER = """
import asyncio, sys
from pathlib import Path
from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.agent import HarborAgent

trial_folder.BASE = Path(sys.argv[1])
script = {"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": sys.argv[3]}}
agent = HarborAgent(script, "podman", stop_seconds=float(sys.argv[4]))


async def main():
    with trial_folder.trial_folder("at-1") as folder:
        await agent.run_trial(sys.argv[2], None, folder)


asyncio.run(main())
"""


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An image with bash and Python, for the tests of this file."""
    variables = dict(os.environ)
    try:
        why = why_not(tmp_path_factory.mktemp("podman"))
        if why is not None:
            pytest.skip(why)
        yield
        podman("rmi", "--force", IMAGE)
    finally:
        os.environ.clear()
        os.environ.update(variables)


@pytest.fixture(autouse=True)
def nothing_left(image: None, own_folder: Path) -> Iterator[None]:
    """After each test, there are as many containers, networks and images as before."""
    before = everything()
    yield
    until = time.monotonic() + 30  # a command that the runner has started may still end
    while everything() != before and time.monotonic() < until:
        time.sleep(0.2)
    assert everything() == before


def everything() -> list[list[str]]:
    listed = (("ps", "--all", "--quiet"), ("network", "ls", "--quiet"), ("images", "--all", "--quiet"))
    return [sorted(podman(*words).split()) for words in listed]


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway of `run` listen on the address of this machine, as a container requires."""
    monkeypatch.setattr(agl, "LLMProxy", functools.partial(agl.LLMProxy, host="0.0.0.0"))


# --- a trial ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("reachable")
@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make test-harbor")
def test_a_harness_in_the_image_solves_a_task_and_its_calls_are_one_row(tmp_path: Path) -> None:
    dockerfile = DOCKERFILE["environment/Dockerfile"] + f"ENV PATH={MINI}/bin:/usr/bin\n"
    answer = steps(
        call("bash", 0, command="cat calc.py; ls /tests /solution /logs/verifier"),
        call("bash", 1, command=SOLVE),
        call("bash", 2, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    in_image = {"type": "bind", "source": str(MINI), "target": str(MINI), "read_only": True}
    agent = agl.HarborAgent(
        {"name": "mini-swe-agent", "kwargs": {"skip_install": True}}, {"type": "podman", "mounts": [in_image]}
    )
    task = make_task(tmp_path / "mul", {"environment/Dockerfile": dockerfile})
    [done] = run(agent, str(task), answer=answer)
    assert (done.end, done.attempt.error, done.attempt.reward) == (("scored", None), None, 1.0)
    [row] = done.record.samples
    assert (len(row.call_ids), len(done.record.calls), done.record.exclusions) == (3, 3, {})


@pytest.mark.usefixtures("reachable")
def test_the_verifier_judges_in_a_second_container(tmp_path: Path) -> None:
    attack = "mkdir -p /usr/local/bin; printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/python3\n"
    toml = TOML + f'docker_image = "{IMAGE}"\nworkdir = "/app"\n'
    changed = {"task.toml": toml, "environment/Dockerfile": None}
    [done] = run(script(ASK + attack, environment="podman"), str(make_task(tmp_path, changed)))
    assert (done.end, done.attempt.reward, len(done.record.calls)) == (("scored", None), 0.0, 1)


def test_a_gateway_on_loopback_is_not_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    [done] = run(script(ASK + "true", environment="podman"), str(make_task(tmp_path, DOCKERFILE)))
    assert done.end == ("infrastructure_fault", "no_call")
    assert "LLMProxy(host='0.0.0.0')" in caplog.text


# --- an image that is missing ----------------------------------------------------------------------------------------

MISSING = {
    "image": (
        {"task.toml": TOML + 'docker_image = "localhost/agl-missing:1"\nworkdir = "/app"\n'},
        "localhost/agl-missing:1",
    ),
    "base": ({"environment/Dockerfile": "FROM localhost/agl-missing:1\nWORKDIR /app\n"}, "localhost/agl-missing:1"),
    "program": ({"environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nRUN cowsay\n"}, "cowsay: command not found"),
}


def test_a_missing_image_is_a_fault(tmp_path: Path) -> None:
    changed, told = MISSING["image"]
    [done] = run(script(ASK, environment="podman"), str(make_task(tmp_path, {**DOCKERFILE, **changed})))
    assert (done.end, done.attempt.reward) == (("infrastructure_fault", "trial_failed"), None)
    assert told in done.error


def test_the_check_of_a_data_set_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (changed, _) in MISSING.items():
        make_task(tmp_path / name, {**DOCKERFILE, **changed})
    make_task(tmp_path / "ready", DOCKERFILE)
    assert main(["harbor", "tasks", str(tmp_path), "--environment", "podman", "--json"]) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    verdicts = {name: (each["verdict"], each["untouched"], each["solved"]) for name, each in found.items()}
    assert verdicts == {**dict.fromkeys(MISSING, ("not ready", None, None)), "ready": ("ready", 0.0, 1.0)}
    for name, (_, told) in MISSING.items():
        assert told in found[name]["problem"][:400]  # that much is in the table


# --- nothing is left -------------------------------------------------------------------------------------------------

SLEEPS = "sleep 4455661"


def started(base: Path, task: Path, text: str, stop_seconds: float = 30) -> subprocess.Popen[bytes]:
    """Start a runner with a trial, and wait until SLEEPS runs in one of its containers."""
    command = [sys.executable, "-c", RUNNER, str(base), str(task), text, str(stop_seconds)]
    runner = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 120
    while not sleeping():
        assert runner.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return runner


def sleeping() -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text() == SLEEPS.replace(" ", "\0") + "\0":
                return True
        except OSError:
            continue
    return False


def containers() -> list[str]:
    return podman("ps", "--all", "--format", "{{.Names}}").split()


@pytest.mark.usefixtures("reachable")
def test_a_time_limit_of_the_rollout_ends_the_container(tmp_path: Path) -> None:
    """The program ends while the container does, so the next start looks after it."""
    config = {"timeout_seconds": 15, "infrastructure_retries": 0}
    agent = script(f"{ASK}{SLEEPS}", environment="podman")
    [done] = run(agent, str(make_task(tmp_path, DOCKERFILE)), rollout_config=config)
    assert done.end == ("cancelled", "timeout")
    asyncio.run(remove_left_trials())
    assert containers() == []


@pytest.mark.parametrize("dockerfile", [DOCKERFILE, WITHOUT_STOPSIGNAL])
def test_ctrl_c_ends_the_container(dockerfile: dict[str, str], own_folder: Path, tmp_path: Path) -> None:
    runner = started(own_folder, make_task(tmp_path, dockerfile), SLEEPS)
    assert len(containers()) == 1
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) != 0
    assert containers() == []
    assert list(trial_folder.parent_folder().iterdir()) == []


def test_a_container_that_does_not_end_in_time_is_ended_by_the_next_start(own_folder: Path, tmp_path: Path) -> None:
    runner = started(own_folder, make_task(tmp_path, WITHOUT_STOPSIGNAL), SLEEPS, stop_seconds=0.1)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) != 0
    [left] = trial_folder.parent_folder().iterdir()
    asyncio.run(remove_left_trials())
    assert containers() == []
    assert not left.exists()


@pytest.mark.parametrize("sandbox", ["env", "verifier__trial"])
def test_the_next_start_ends_the_container_of_a_killed_runner(sandbox: str, own_folder: Path, tmp_path: Path) -> None:
    """The container of the agent, and the one of the verifier."""
    changed = {**DOCKERFILE, "tests/test.sh": f"#!/bin/bash\n{SLEEPS}\n"}
    runner = started(own_folder, make_task(tmp_path, changed), SLEEPS if sandbox == "env" else SOLVE)
    asyncio.run(remove_left_trials())
    [kept] = containers()  # its runner works
    assert f"__{sandbox}_main" in kept
    runner.kill()
    runner.wait()
    assert containers() == [kept]
    asyncio.run(remove_left_trials())
    assert containers() == []
