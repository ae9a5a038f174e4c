"""`agl run` and `agl runner` as a shell runs them: a whole run from a file, roles that share a port, and each end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.cli.plan import has_frame_of_users, load_dataset, load_target, read_plan
from agentlightning.errors import BadRequestError
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import PromptTemplate
from tests.stubs.processes import Terminal, run_program

PROGRAM = """
import os, signal
from pathlib import Path
import agentlightning as agl


def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
    return float(prompt_template.format(name=task) == f"Hello, {task}!")


def tasks() -> list[str]:
    return ["Ada", "Grace"]


@agl.algo
async def breaks(*, store: agl.LightningStore) -> None:
    raise LookupError("a bug of mine")


def answer() -> dict[str, object]:
    return {"answer": 42, "of": object}
"""
FILE = """
trainer:
  algorithm: baseline
  strategy: shm
  initial_resources:
    prompt: {resource_type: prompt_template, engine: f-string, template: "Hello, {name}!"}
agent: my_agent.py:agent
train_dataset: my_agent:tasks
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with an agent and a file that describes its run."""
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    path = sys.path[:]
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_agent", None)


# --- a run from a file -----------------------------------------------------------------------------------------------


def test_a_file_is_a_whole_run(folder: Path) -> None:
    (folder / "more.jsonl").write_text('"Ada"\n"Alan"\n"Grace"\n')
    words = ("run", "run.yaml", "--train", "more.jsonl", "--set", "trainer.n_runners=2", "--json", "--log-json")
    run = run_program("agl", *words)
    assert json.loads(run.stdout)["result"]["rewards"] == [1.0, 1.0, 1.0]
    assert {json.loads(line)["logger"].partition(".")[0] for line in run.stderr.splitlines()} == {"agentlightning"}


def test_an_exception_of_the_users_code_is_shown_with_its_traceback(folder: Path) -> None:
    nothing = "--set", "train_dataset=null", "--set", "trainer.initial_resources=null"
    err = run_program("agl", "run", "run.yaml", "--set", "trainer.algorithm=my_agent:breaks", *nothing, code=1).stderr
    assert "in breaks" in err
    assert err.rstrip().endswith("LookupError: a bug of mine")


def test_a_function_of_python_may_be_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_agent.py:answer"]) == 0
    assert capsys.readouterr().out == "result: {'answer': 42, 'of': <class 'object'>}\n"
    assert main(["run", "my_agent.py:answer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"result": {"answer": 42, "of": "<class 'object'>"}}
    assert main(["run", "my_agent:answer", "--train", "x.jsonl"]) == 2
    assert "--train has no effect: TARGET 'my_agent:answer' is a function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.yaml"], "the file nothing.yaml: No such file or directory"),
        (["my_agent:anser"], "my_agent has no 'anser'; did you mean 'answer'?"),
        (["no_such_module:main"], "module 'no_such_module' not found"),
        (["run.yaml", "--set", "agnt=x:y"], "unknown key 'agnt'; did you mean 'agent'?"),
        (["run.yaml", "--set", "trainer"], "expected key=value"),
        (["run.yaml", "--agent", "agent"], "expected module:object"),
        (["run.yaml", "--train", "gone.jsonl"], "file 'gone.jsonl' not found"),
        (["run.yaml", "--set", "trainer.n_runnrs=2"], "n_runners"),
        (["run.yaml", "--set", "trainer.initial_resources.prompt.engine=x"], "trainer.initial_resources"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("agl: ")
    assert text in line


# --- roles that share nothing but a port -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_runners_join_by_url_and_token_and_end_by_a_signal_or_with_their_run(
    folder: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").write_text("s3cret\n")
    (folder / "token").chmod(0o600)
    store = terminal("agl store --port 0 --db memory", apart=True, AGL_TOKEN="s3cret")
    url = (await asyncio.to_thread(store.until, r"http://\S+\n")).split("\n")[0].split()[-1]
    command = f"agl runner my_agent.py:agent --store {url} --run nightly --token-file token"
    runner = terminal(command, apart=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for what a script starts in the background
    leaver = terminal(command)
    signal.signal(signal.SIGINT, before)
    monkeypatch.setenv("AGL_TOKEN", "s3cret")
    client = LightningStoreClient(url)
    prompt = PromptTemplate(template="Hello, {name}!", engine="f-string")
    await client.add_resources({"prompt": prompt}, run_id="nightly")
    rollout = await client.enqueue_rollout("Ada", run_id="nightly")
    [ended] = await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
    assert ended.status == "succeeded"
    await asyncio.to_thread(leaver.until, "serves the queue")
    assert await asyncio.to_thread(leaver.interrupted, signal.SIGTERM) == 143
    assert await asyncio.to_thread(main, ["run", "stop", "nightly", "--store", url]) == 0
    code = await asyncio.to_thread(runner.ended)
    assert (code, runner.said, "Unclosed" in runner.errors) == (0, "", False)
    await client.close()


SLOW = """
import time
import agentlightning as agl

@agl.rollout
def agent(task):
    print("begins", flush=True)
    time.sleep(2)
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_runner_finishes_its_rollouts_after_sigterm_and_cancels_them_after_ctrl_c(
    number: signal.Signals, folder: Path, terminal: Terminal
) -> None:
    (folder / "slow_agent.py").write_text(SLOW)
    store = terminal("agl store --port 0 --db memory")
    url = (await asyncio.to_thread(store.until, r"http://\S+\n")).split("\n")[0].split()[-1]
    runner = terminal(f"agl runner slow_agent.py:agent --store {url} --run nightly", apart=True)
    client = LightningStoreClient(url)
    await client.add_resources({"prompt": PromptTemplate(template="x", engine="f-string")}, run_id="nightly")
    rollout = await client.enqueue_rollout("Ada", run_id="nightly")
    await asyncio.to_thread(runner.until, "begins")
    code = await asyncio.to_thread(runner.interrupted, number)
    await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
    attempt = await client.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert (code, attempt.outcome) == ((143, "scored") if number == signal.SIGTERM else (130, "cancelled"))
    await client.close()


def test_a_runner_that_waits_in_vain_or_is_refused_has_an_exit_code_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = ["runner", "my_agent.py:agent", "--log-level", "ERROR", "--outage", "0.1", "--store"]
    assert main([*runner, "http://127.0.0.1:1"]) == 69
    [line] = capsys.readouterr().err.splitlines()
    assert "store_unreachable_timeout=0.1" in line
    server = LightningStoreServer(InMemoryLightningStore(), port=0, token="s3cret")
    asyncio.run(server.start())
    monkeypatch.setenv("AGL_TOKEN", "wrong")
    assert main([*runner, server.endpoint]) == 77
    assert "AGL_TOKEN" in capsys.readouterr().err
    asyncio.run(server.stop())


# --- what a text names -----------------------------------------------------------------------------------------------


def test_settings_go_before_the_file_and_may_be_new(folder: Path) -> None:
    plan = read_plan(Path("run.yaml"), ["trainer.n_runners=4", "trainer.runner.concurrency=8", "dev=true"])
    assert (plan.trainer["n_runners"], plan.trainer["runner"], plan.dev) == (4, {"concurrency": 8}, True)


@pytest.mark.parametrize(
    ("name", "text", "tasks"),
    [
        ("t.jsonl", '{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("t.json", "[1, 2]", [1, 2]),
        ("t.jsonl", '"a\u2028b"', ["a\u2028b"]),
    ],
)
def test_tasks_come_out_of_a_file(folder: Path, name: str, text: str, tasks: list[Any]) -> None:
    Path(name).write_text(text)
    assert load_dataset("--train", name) == tasks


def test_a_line_that_is_no_json_is_named(folder: Path) -> None:
    Path("t.jsonl").write_text("1\nx\n")
    with pytest.raises(BadRequestError, match=r"--train t.jsonl, line 2 is not JSON"):
        load_dataset("--train", "t.jsonl")


def test_a_file_whose_name_is_taken_by_a_module_is_refused(folder: Path) -> None:
    Path("json.py").write_text("x = 1")
    with pytest.raises(BadRequestError, match=r"another module is already named 'json'\. Rename the file"):
        load_target("TARGET", "json.py:x")


def test_frames_of_users_are_told_from_those_of_libraries() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("x")
    trace = caught.value.__traceback__
    assert trace is not None
    assert has_frame_of_users(trace)
    assert not has_frame_of_users(trace.tb_next)
