"""`agl tasks`: rates of tasks in a file that an interruption does not lose, and the selection by them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.cli import main

AGENT = """
import os, signal, time
from pathlib import Path
import agentlightning as agl


def agent(task: str, main_llm: agl.LLM) -> float:
    with open("ran", "a") as file:
        file.write(task)
    ran = Path("ran").read_text()
    if ran.count("c") == 2 and (number := os.environ.get("AGL_TEST_SIGNAL")):
        time.sleep(1.0)  # until the rewards before are in the file
        os.killpg(os.getpgrp(), int(number))
        time.sleep(5.0)
    if task == "d":
        raise KeyError("d")
    return float(task == "b" or (task == "c" and ran.count("c") % 2))
"""
ENDPOINT = ("--model", "http://127.0.0.1:1/v1", "--model-name", "m")
MEASURE = ("tasks", "difficulty", "tasks.jsonl", "--agent", "my_agent.py:agent", "--out", "rates.jsonl")
ARGUMENTS = (*MEASURE, *ENDPOINT, "--samples", "4", "--concurrency", "1", "--log-level", "WARNING")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('"a"\n"b"\n"c"\n"d"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, number: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `agl`, and send the signal `number` to it and its processes when the second sample of `c` begins."""
    import os

    own = {"AGL_TEST_SIGNAL": str(int(number))} if number else {}
    command = [sys.executable, "-m", "agentlightning.cli", *arguments]
    environment = {**os.environ, **own}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True, env=environment
    )


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGKILL])
def test_what_was_run_before_an_interruption_is_kept(folder: Path, number: int) -> None:
    if number:
        stopped = run(*ARGUMENTS, number=number)
        assert stopped.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), stopped.stderr
        kept = [json.loads(line) for line in (folder / "rates.jsonl").read_text().splitlines()]
        assert sum(len(line["rewards"]) for line in kept) >= 8, "those of a and b, before c"
    done = run(*ARGUMENTS)
    assert done.returncode == 0, done.stderr
    ran = (folder / "ran").read_text()
    assert (ran.count("a"), ran.count("b"), ran.count("d")) == (4, 4, 4)
    assert ran.count("c") <= 5, "at most the one in progress was run again"
    lines = [json.loads(line) for line in (folder / "rates.jsonl").read_text().splitlines()]
    assert [(line["n"], line["failed"]) for line in lines] == [(4, 0), (4, 0), (4, 0), (0, 4)]
    assert [line["mean_reward"] for line in lines[:2]] == [0.0, 1.0]
    assert "4 tasks, 12 samples with a reward, 4 failed (KeyError), written to rates.jsonl" in done.stdout

    selected = ("tasks", "select", "tasks.jsonl", "--rates", "rates.jsonl", "--out", "selected.jsonl")
    assert main([*selected]) == 0
    assert (folder / "selected.jsonl").read_text() == '"c"\n'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*MEASURE, "--model", "http://127.0.0.1:1/v1"), "--model-name is required with a URL"),
        ((*MEASURE, "--model", "no/such/folder"), "is not a checkpoint"),
        ((*MEASURE, "--model", "folder", "--model-name", "m"), "require a URL"),
        ((*MEASURE, *ENDPOINT, "--api-key", "NO_SUCH_KEY"), "'NO_SUCH_KEY' is not set"),
        (("tasks", "select", "tasks.jsonl", "--rates", "no", "--out", "o"), "--rates: file 'no' not found"),
        (("tasks", "select", "no.jsonl", "--rates", "my_agent.py", "--out", "o"), "file 'no.jsonl' not found"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, arguments: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    assert text in capfd.readouterr().err
