"""The command `agl`, as a shell runs it: exit codes, errors in one line, and the imports of `--help`."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.store import LightningStoreClient
from tests.cli.terminal import shell

run = partial(shell, COLUMNS="120")


@pytest.mark.parametrize("arguments", [["nothing"], ["store", "--prot", "1"], ["store", "--port", "many"]])
def test_wrong_use_is_exit_code_2_and_no_traceback(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Error" in done.stderr or "Usage" in done.stderr


def test_a_port_that_is_taken_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        done = run("store", "--port", port, "--db", str(tmp_path / "agl.db"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("agl: ")]
    assert port in line


def test_a_host_beyond_loopback_without_a_token_names_both_ways_out(tmp_path: Path) -> None:
    done = run("store", "--host", "0.0.0.0", "--db", str(tmp_path / "agl.db"), AGL_TOKEN="", AGL_INSECURE="0")
    assert done.returncode == 1
    assert "AGL_TOKEN=" in done.stderr
    assert "AGL_INSECURE=1" in done.stderr
    assert not (tmp_path / "agl.db").exists()


@pytest.mark.parametrize(("backend", "interrupted"), [((), ["agl.db"]), (("--backend", "memory"), [])])
async def test_a_store_is_served_and_ctrl_c_is_its_ordinary_end(
    serve: Any, tmp_path: Path, backend: tuple[str, ...], interrupted: list[str]
) -> None:
    for rounds in (1, 2):
        server, [line] = serve("store", *backend)
        client = LightningStoreClient(line.split()[-1])
        await client.enqueue_rollout({"round": rounds})
        assert len(await client.query_rollouts()) == (rounds if interrupted else 1)
        await client.close()
        assert server.interrupted() == 0
    assert os.listdir(tmp_path) == interrupted


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agentlightning {agl.__version__}\n"
    assert main(["nothing"]) == 2
    assert main(["store", "--log-level", "LOUD"]) == 2
    assert "Invalid log level: 'LOUD'" in capsys.readouterr().err


def test_an_interrupted_run_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentlightning.demo.run.run_demo", interrupted)
    assert main(["demo"]) == 130


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (None, "tasks.jsonl"),
        ("", "tasks.jsonl"),
        ('{"question": "1 and 1", "answer": 2}\n' * 16 + "not json\n", "17"),
        ('{"question": "1 and 1", "answer": 2}\n' * 16 + '{"question": "2"}\n', "17"),
        ('{"question": "1 and 1", "answer": 2}\n' * 3, "30"),
    ],
)
def test_a_wrong_task_file_is_refused_before_anything_starts(
    lines: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    if lines is not None:
        path.write_text(lines)
    assert main(["demo", "--tasks", str(path), "--out", str(tmp_path / "run")]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("agl: ")
    assert text in error
    assert not (tmp_path / "run").exists()
