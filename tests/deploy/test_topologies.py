"""The recipes, run: each part as a process of this machine, with the command and variables of its recipe."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.base import LightningStore
from tests.deploy.recipes import PROGRAM, SBATCH, VALUES, Part, compose_parts, kubernetes_parts
from tests.deploy.topologies import Topology, in_file, submit
from tests.stubs.model_server import ModelServer
from tests.stubs.processes import Process, Terminal

TASKS = 16
ALL_SCORED = f"{TASKS} rollouts ({TASKS} scored), mean reward 1.000"


def solve(request: dict[str, Any]) -> str:
    return str(sum(int(number) for number in re.findall(r"\d+", request["messages"][-1]["content"])))


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(compose_parts, id="compose", marks=pytest.mark.slow),
        pytest.param(kubernetes_parts, id="kubernetes", marks=pytest.mark.heavy),
    ],
)
def test_the_parts_of_a_recipe_find_each_other_and_run_every_task(
    recipe: Callable[..., list[Part]], tmp_path: Path, terminal: Terminal
) -> None:
    with ModelServer(solve) as model:
        values = {**VALUES, "UPSTREAM_URL": "THE-MODEL"}
        parts = Topology(recipe(values), terminal, tmp_path, PROGRAM, **{"THE-MODEL": model.base_url})
        store, runner = parts.start("store"), parts.start("runner")
        store.until("listens on")
        gateway = parts.start("gateway")
        gateway.until("OPENAI_BASE_URL")
        for port in (parts.store_port, parts.gateway_port):
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        assert ALL_SCORED in parts.start("algorithm").succeeded()
        runner.succeeded()  # the end of the run is told to runners elsewhere
        for process in (gateway, store):
            assert process.interrupted(signal.SIGTERM) == 0
    assert len(model.calls) == TASKS


def job(terminal: Terminal, folder: Path, url: str) -> Process:
    environment = {"UPSTREAM_URL": url, "MODEL": "m", "UPSTREAM_API_KEY": "k"}
    return submit(terminal, folder, SBATCH, str(PROGRAM), **environment)


async def statuses(store: LightningStore) -> list[str]:
    return [rollout.status for rollout in await store.query_rollouts(run_id="slurm-7")]


@pytest.mark.heavy
def test_the_job_script_runs_every_task_and_leaves_the_store_where_it_was_submitted(
    tmp_path: Path, terminal: Terminal
) -> None:
    with ModelServer(solve) as model:
        assert ALL_SCORED in job(terminal, tmp_path, model.base_url).succeeded()
    assert in_file(tmp_path / "agl-7.db", statuses) == ["succeeded"] * TASKS
    assert not list(tmp_path.glob("tmp.*")), "the scratch folder is gone"


@pytest.mark.heavy
def test_before_its_time_limit_the_job_is_interrupted_and_keeps_what_was_done(
    tmp_path: Path, terminal: Terminal
) -> None:
    with ModelServer(solve, delay=0.5) as model:
        script = job(terminal, tmp_path, model.base_url)
        while not model.calls:
            assert script.code is None, script.said
        os.kill(script.popen.pid, signal.SIGTERM)
        assert script.ended() == 128 + signal.SIGINT, script.said
    assert "KeyboardInterrupt" in script.said
    assert 0 < len(in_file(tmp_path / "agl-7.db", statuses)) < TASKS
