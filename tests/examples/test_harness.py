"""examples/harness: its tasks are ready, and its program runs a harness on them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.training.ledger import read_rollout
from tests.examples.shown import EXAMPLES, ROOT
from tests.frameworks.engine import Engine, Json, call, said

pytest.importorskip("harbor", reason="Harbor is in an environment of its own: make test-harbor")
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
MINI = ROOT / ".venv-harbor/tools"
LEARNER = ROOT / ".venv/bin/python"
"""Python of an environment with PyTorch and without Harbor."""
NEEDS_BOTH = pytest.mark.skipif(
    not (MINI.exists() and LEARNER.exists()), reason="requires mini-swe-agent and .venv: make setup-dev test-harbor"
)


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_task_is_ready() -> None:
    checked = json.loads(run("-m", "agentlightning.cli", "harbor", "tasks", "examples/harness/tasks", "--json"))
    assert [(each["verdict"], each["untouched"], each["solved"]) for each in checked] == [("ready", 0.0, 1.0)] * 5
    readme = (EXAMPLES / "harness/README.md").read_text()
    assert all(f"\n{each['name']:<12}  ready" in readme for each in checked)


def knows_two(request: Json) -> Json:
    """A model that solves two of the tasks."""
    text = " ".join(said(message) for message in request["messages"] if message["role"] == "user")
    solve = {"count.txt": "wc -w < text.txt > count.txt", "sum.txt": "echo 40 > sum.txt"}
    command = next((does for word, does in solve.items() if word in text), "ls")
    turn = sum(message["role"] == "tool" for message in request["messages"])
    return call("bash", turn, command=command if turn == 0 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make test-harbor")
def test_the_program_prints_which_tasks_were_solved() -> None:
    with Engine(knows_two) as engine:
        model = ("--url", engine.base_url, "--model", "policy")
        printed = run("examples/harness/run.py", "mini-swe-agent", "--tools", MINI, *model)
        assert engine.trouble == []
    assert dict(line.split(maxsplit=1) for line in printed.splitlines()[-5:]) == {
        "count-words": "solved",
        "find-secret": "not solved",
        "fix-product": "not solved",
        "sum-column": "solved",
        "write-median": "not solved",
    }


# --- the small model -------------------------------------------------------------------------------------------------


def imported(code: str, python: str | Path = sys.executable) -> None:
    code = f"import sys\nfrom pathlib import Path\nsys.path.insert(0, 'examples/harness')\n{code}"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_tasks_of_the_small_model_are_ready_and_differ_by_part(tmp_path: Path) -> None:
    writing = f"for part in ('train', 'held_out'): write_tasks(part, 2, Path({str(tmp_path)!r}))"
    imported(f"from counting import write_tasks\n{writing}")
    for part in ("train", "held_out"):
        checked = json.loads(run("-m", "agentlightning.cli", "harbor", "tasks", tmp_path / part, "--json"))
        assert [(each["verdict"], each["untouched"], each["solved"]) for each in checked] == [("ready", 0.0, 1.0)] * 2
    files = [path.name for path in tmp_path.glob("*/*/environment/*.txt")]
    assert len(set(files)) == len(files) == 4


class Program:
    """A program that can be killed and started again."""

    def __init__(self, folder: Path, name: str, *command: str | Path, **environment: str) -> None:
        self._log = folder / f"{name}.txt"
        self._command = [str(part) for part in command]
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "TOOLS": str(MINI)}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def printed(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def learn(folder: Path, *options: str, kills: int) -> tuple[str, Counter[str]]:
    """Train in two environments; kill both programs after each of the first steps. Return the output and the calls."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = [LEARNER, "examples/harness/learn.py", "--out", folder, *options]
    algorithm = Program(folder, "algorithm", *command, AGL_CURRENT_ROLE="algorithm", AGL_SERVER_PORT=port)
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli",
        "runner",
        "examples/harness/agent.py:agent",
        "--run",
        "counting",
    ]
    runner = Program(folder, "runner", *command, "--store", f"http://127.0.0.1:{port}", "--concurrency", "2")
    killed, until = 0, time.monotonic() + 1500
    try:
        while algorithm.process.poll() is None:
            assert time.monotonic() < until, algorithm.printed() + runner.printed()
            if killed < kills and f"step   {killed + 1}/" in algorithm.printed():
                time.sleep(5)  # within the next step
                for program in (algorithm, runner):
                    program.kill()
                    program.start()
                killed += 1
            if runner.process.poll() is not None and algorithm.process.poll() is None:
                runner.start()
            time.sleep(0.2)
    finally:
        for program in (algorithm, runner):
            if program.process.poll() is None:
                program.process.terminate()
                program.process.wait(60)
    assert (algorithm.process.returncode, killed) == (0, kills), algorithm.printed()
    return algorithm.printed(), asyncio.run(_calls(folder / "store.db"))


async def _calls(path: Path) -> Counter[str]:
    """Count what became of each call, by `trained` or the reason of its exclusion."""
    store = agl.SQLiteLightningStore(path)
    found: Counter[str] = Counter()
    for rollout in await store.query_rollouts(limit=-1):
        attempts = await store.query_attempts(rollout.rollout_id)
        record = read_rollout(rollout, attempts, list(await store.query_spans(rollout.rollout_id)))
        in_rows = {ref for sample in record.samples for ref in sample.call_refs()}
        assert all((call.ref in in_rows) != (call.ref in record.exclusions) for call in record.calls)
        if rollout.status != "cancelled":  # as those that were in flight at a kill
            assert [attempt.outcome for attempt in attempts][-1] == "scored"
        found.update(record.exclusions.get(call.ref, "in a row") for call in record.calls)
    await store.close()
    return found


def solved(printed: str) -> list[int]:
    """Return the shares of solved held-out tasks in percent, sampled: before and after."""
    return [int(share) for share in re.findall(r"updates, sampled: (\d+)%", printed)]


@NEEDS_BOTH
@pytest.mark.timeout(300)
def test_a_harness_trains_in_two_environments(tmp_path: Path) -> None:
    model = f"make_first_model(Path({str(tmp_path / 'model')!r}), steps=60)"
    imported(f"from first_model import make_first_model\n{model}", LEARNER)
    printed, calls = learn(tmp_path, "--steps", "1", "--tasks", "1", "--held-out", "1", kills=0)
    assert len(solved(printed)) == 2
    assert calls["in a row"] > 8


@NEEDS_BOTH
@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_small_model_learns_to_use_a_harness_through_kills(tmp_path: Path) -> None:
    printed, calls = learn(tmp_path, "--steps", "4", "--tasks", "4", "--held-out", "12", kills=2)
    before, after = solved(printed)
    assert after >= before + 30, printed
    print(before, after, dict(calls))
