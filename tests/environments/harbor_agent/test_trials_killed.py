"""Trials while runners, the algorithm with its gateway, and sandboxes are killed at random moments."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.trial_folder import remove_left_trials
from agentlightning.training.ledger import read_rollout
from tests.environments.harbor_agent.tasks import make_task
from tests.frameworks.engine import Engine

ROOT = Path(__file__).parents[3]
TRIALS = int(os.environ.get("TRIALS", "200"))
HERE = "tests.environments.harbor_agent.killed"


class Killed:
    """A program that is started again each time it was killed."""

    def __init__(self, log: Path, environment: dict[str, str], *command: str) -> None:
        self._log, self._environment, self._command = log, environment, command
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", *self._command]
            return subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def members(self) -> list[psutil.Process]:
        """Return the program and its descendants, except its sandboxes."""
        try:
            own = psutil.Process(self.process.pid)
            return [each for each in (own, *own.children(recursive=True)) if each.name().startswith("python")]
        except psutil.NoSuchProcess:
            return []

    def ensure(self) -> None:
        if self.process.poll() is not None:
            self.process = self._start()

    def close(self) -> None:
        for each in self.members():
            each.terminate()
        self.process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def sandboxes(folder: Path) -> list[psutil.Process]:
    """Return the processes of bubblewrap for trials in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.name() == "bwrap" and str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill(processes: list[psutil.Process], choose: random.Random) -> bool:
    if not processes:
        return False
    try:
        choose.choice(processes).kill()
    except psutil.NoSuchProcess:
        return False
    return True


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_no_reward_comes_from_a_fault_and_nothing_is_left(own_folder: Path, tmp_path: Path) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nCOPY . .\n"
    unsolvable = make_task(tmp_path / "no", {"environment/Dockerfile": dockerfile})
    solvable = make_task(tmp_path / "yes", {"environment/Dockerfile": dockerfile, "environment/solvable": "yes"})
    tasks = [{"path": str((unsolvable, solvable)[number % 2]), "number": number} for number in range(TRIALS)]
    port, gateway = free_port(), free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log.txt"
    environment = {
        **os.environ,
        **{"AGL_TOKEN": "the-secret-of-the-server", "HARBOR_TEST_FOLDER": str(own_folder), "PYTHONPATH": str(ROOT)},
    }
    choose, killed = random.Random(7), Counter[str]()
    command = ("agentlightning.cli", "store", "--port", str(port), "--db", str(tmp_path / "run.db"))
    store = Killed(tmp_path / "store.txt", environment, *command)
    with Engine(lambda request: "42") as engine:
        algorithm = Killed(log, environment, HERE, url, engine.base_url, str(gateway), json.dumps(tasks))
        command = ("agentlightning.cli", "runner", f"{HERE}:agent", "--store", url, "--runners", "2")
        runner = Killed(log, environment, *command, "--concurrency", "2")
        try:
            until = time.monotonic() + 1200
            while algorithm.process.poll() != 0:
                assert time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(choose.uniform(1, 5))
                what = choose.choices(["runner", "sandbox", "algorithm"], [3, 12, 1])[0]
                victims = {"runner": runner.members(), "sandbox": sandboxes(own_folder)}.get(what, algorithm.members())
                if algorithm.process.poll() != 0:
                    killed[what] += kill(victims, choose)
                    time.sleep(0.2)
                if algorithm.process.poll() not in (None, 0):
                    algorithm.ensure()
                runner.ensure()
        finally:
            runner.close()
            if algorithm.process.poll() is None:
                algorithm.close()
        replies = {str((exchange.reply or {}).get("id")) for exchange in engine.calls}
    print(dict(killed))
    asyncio.run(_check(url, replies, killed))
    store.close()
    until = time.monotonic() + 30
    while sandboxes(own_folder):
        assert time.monotonic() < until
        time.sleep(0.1)
    asyncio.run(remove_left_trials())
    assert list(trial_folder.parent_folder().iterdir()) == []


async def _check(url: str, replies: set[str], killed: Counter[str]) -> None:
    store = agl.LightningStoreClient(url)
    ends, seen = Counter[Any](), Counter[str]()
    for rollout in await store.query_rollouts(limit=-1):
        attempts = await store.query_attempts(rollout.rollout_id)
        spans = list(await store.query_spans(rollout.rollout_id))
        record = read_rollout(rollout, attempts, spans)
        expected = float(rollout.input["number"] % 2)
        for attempt in attempts:
            assert attempt.reward in (None, expected), (attempt, expected)
            assert (attempt.reward is None) == (attempt.outcome != "scored"), attempt
        in_rows = {ref for sample in record.samples for ref in sample.call_refs()}
        assert all((call.ref in in_rows) != (call.ref in record.exclusions) for call in record.calls)
        if attempts[-1].outcome == "scored":
            assert len(in_rows) == 1, record.exclusions
        else:
            assert record.samples == []
        seen.update(str(call.response_id) for call in record.calls if call.state == "ok")
        ends[attempts[-1].outcome] += 1
    await store.close()
    print(dict(ends), f"{len(replies)} replies, {len(seen)} recorded as answered")
    assert sum(ends.values()) == TRIALS
    assert ends["scored"] > 0.9 * TRIALS
    assert set(seen) <= replies
    assert max(seen.values()) == 1
    assert min(killed["runner"], killed["sandbox"]) > 0
