"""The recipes, run: each part as a process of this machine, with the command and variables of its recipe."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.sqlite import SQLiteLightningStore
from tests.deploy.recipes import PROGRAM, SBATCH, VALUES, Part, compose_parts, kubernetes_parts
from tests.stubs.model_server import ModelServer
from tests.stubs.ports import free_port

LIMIT_SECONDS = 60
TASKS = 16
INSTALLED = {"agl": str(Path(sys.executable).with_name("agl")), "python": sys.executable, "train.py": str(PROGRAM)}


def solve(request: dict[str, Any]) -> str:
    """Answer `What is 2 + 3?`."""
    return str(sum(int(number) for number in re.findall(r"\d+", request["messages"][-1]["content"])))


def here(text: str, places: dict[str, str]) -> str:
    for there, local in places.items():
        text = text.replace(there, local)
    return text


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(part: Part, places: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    command = [here(INSTALLED.get(word, word), places) for word in part.command]
    command = [word.replace("train.py:", f"{PROGRAM}:") for word in command]
    environment = {name: here(value, places) for name, value in part.environment.items()}
    plain = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**plain, "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until_listening(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            return
    raise AssertionError("".join(said))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate(timeout=LIMIT_SECONDS)[0]
    return process.returncode, said


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(compose_parts, id="compose", marks=pytest.mark.slow),
        pytest.param(kubernetes_parts, id="kubernetes", marks=pytest.mark.heavy),
    ],
)
def test_the_parts_of_a_recipe_find_each_other_and_run_every_task(
    recipe: Callable[..., list[Part]], tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    store_port, gateway_port = (str(free_port()) for _ in range(2))
    with ModelServer(solve) as model:
        parts = {part.name: part for part in recipe({**VALUES, "UPSTREAM_URL": "THE-MODEL"})}
        places = {"agl-store:": "127.0.0.1:", "agl-gateway:": "127.0.0.1:", "//store:": "//127.0.0.1:"}
        places |= {"//gateway:": "//127.0.0.1:", "4747": store_port, "8000": gateway_port, "0.0.0.0": "127.0.0.1"}
        places |= {"/data": str(tmp_path), "THE-MODEL": model.base_url}

        def run(name: str) -> subprocess.Popen[str]:
            processes.append(start(parts[name], places, tmp_path))
            return processes[-1]

        store, runner = run("store"), run("runner")
        until_listening(store, "listens on")
        gateway = run("gateway")
        until_listening(gateway, "OPENAI_BASE_URL")
        for port in (store_port, gateway_port):
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        code, said = ended(run("algorithm"))
        assert code == 0, said
        assert f"{TASKS} rollouts ({TASKS} scored), mean reward 1.000" in said
        assert ended(runner)[0] == 0, "the end of the run is told to runners elsewhere"
        for process in (gateway, store):
            process.terminate()
            assert ended(process)[0] == 0
    assert len(model.calls) == TASKS


SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


def job(folder: Path, url: str, processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Start the job script as Slurm would on one node, with its commands in the place of Slurm's."""
    commands = folder / "bin"
    commands.mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}
    scripts |= {name: f'#!/bin/sh\nexec {INSTALLED[name]} "$@"\n' for name in ("agl", "python")}
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    store_port, gateway_port = (str(free_port()) for _ in range(2))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node", "SLURM_SUBMIT_DIR": str(folder)}
    given = {"UPSTREAM_URL": url, "MODEL": "m", "UPSTREAM_API_KEY": "k", "PYTHONUNBUFFERED": "1"}
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(folder), "TMPDIR": str(folder)}
    ports = {"STORE_PORT": store_port, "GATEWAY_PORT": gateway_port}
    processes.append(
        subprocess.Popen(
            ["bash", str(SBATCH), str(PROGRAM)],
            cwd=folder,
            env={**environment, **slurm, **given, **ports},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    )
    return processes[-1]


def rollouts_in(file: Path) -> dict[str, int]:
    return asyncio.run(_count(file))


async def _count(file: Path) -> dict[str, int]:
    store = SQLiteLightningStore(file)
    try:
        found = await store.query_rollouts(run_id="slurm-7")
        return {"all": found.total, "succeeded": sum(rollout.status == "succeeded" for rollout in found)}
    finally:
        await store.close()


@pytest.mark.heavy
def test_the_job_script_runs_every_task_and_leaves_the_store_where_it_was_submitted(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    with ModelServer(solve) as model:
        code, said = ended(job(tmp_path, model.base_url, processes))
    assert code == 0, said
    assert f"{TASKS} rollouts ({TASKS} scored), mean reward 1.000" in said
    assert rollouts_in(tmp_path / "agl-7.db") == {"all": TASKS, "succeeded": TASKS}
    assert not list(tmp_path.glob("tmp.*")), "the scratch folder is gone"


@pytest.mark.heavy
def test_before_its_time_limit_the_job_is_interrupted_and_keeps_what_was_done(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    with ModelServer(solve, delay=0.5) as model:
        script = job(tmp_path, model.base_url, processes)
        while not model.calls:
            assert script.poll() is None, ended(script)[1]
        os.kill(script.pid, signal.SIGTERM)
        code, said = ended(script)
    assert code == 128 + signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    assert 0 < rollouts_in(tmp_path / "agl-7.db")["all"] < TASKS
