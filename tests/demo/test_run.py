"""`agl demo` as a user runs it: the whole path, wrong inputs, and Ctrl+C."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.cli import main
from tests.stubs.processes import Process, Terminal, run_program

ROOT = Path(__file__).parents[2]
QUICK = [sys.executable, "-m", "tests.demo.quick"]
FILES = {"model", "metrics.jsonl", "curve.png", "config.json", "store.db", "log.txt"}
GOOD = '{"question": "What is 1 plus 1?", "answer": 2}'


def _sums(count: int) -> list[str]:
    return [json.dumps({"question": f"Please tell me {n} plus {n}", "answer": 2 * n}) for n in range(count)]


def _tasks(folder: Path, *lines: str) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


# --- a whole demo ----------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(1000)
def test_a_whole_demo_turns_a_wrong_habit_into_the_right_one_reports_and_leaves_everything_in_its_folder(
    tmp_path: Path,
) -> None:
    agl_script = Path(sys.executable).with_name("agl")
    out = tmp_path / "run"
    done = run_program(agl_script, "demo", "--out", out, folder=tmp_path, timeout=800)
    assert done.stderr == ""
    for text in (
        "512 training tasks, 256 held-out tasks",
        "held-out tasks: 256, same tasks before and after",
        "(exact sign test)",
        "verdict: better",
        "then mostly a wrong habit: it copies a number",
        "so it mostly replies wrongly; training rewards only right answers",
        "--- a conversation after training (greedy, reward 1)",
        "calls calculator(expression=",
        "step  16/16  reward ",
    ):
        assert text in done.stdout

    # Before training the reply is a number of the question: the habit as taught, and no broken markup.
    pattern = r"before training \(greedy, reward 0\) ---\n +user: (.*)\n +assistant: (.*)\n\n"
    [(question, reply)] = re.findall(pattern, done.stdout)
    assert reply in re.findall(r"\d+", question)

    # Below 40 % and 30 % before, 90 % after.
    shares = re.findall(r"solved, (\w+) +([\d.]+)% +([\d.]+)%", done.stdout)
    [(_, sampled_before, sampled_after), (_, greedy_before, greedy_after)] = shares
    assert (float(sampled_before) < 40, float(greedy_before) < 30) == (True, True)
    assert (float(sampled_after) >= 90, float(greedy_after) >= 90) == (True, True)

    assert {path.name for path in out.iterdir()} >= FILES
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 17))
    for line in lines:
        assert line["calls_captured"] == line["calls_trained"] + sum(line["calls_excluded"].values())
        assert line["rollouts_done"] + line["rollouts_failed"] == 128
    config = json.loads((out / "config.json").read_text())
    assert (config["demo"]["steps"], config["grpo"]["max_steps"], config["grpo"]["seed"]) == (16, 16, 0)
    assert "torch" in config["versions"]
    assert "verdict: better" in (out / "log.txt").read_text()
    _load_model(out / "model")

    rollouts = asyncio.run(_rollouts_of(out / "store.db"))
    assert sum(rollout.mode == "train" for rollout in rollouts) == 16 * 128
    held_out = {rollout.input["question"] for rollout in rollouts if rollout.mode == "val"}
    assert not held_out & {rollout.input["question"] for rollout in rollouts if rollout.mode == "train"}


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_it_trains_on_the_users_own_tasks(tmp_path: Path) -> None:
    tasks = _tasks(tmp_path, *_sums(40))
    command = [*QUICK, "demo", "--steps", "2", "--runners", "1", "--tasks", tasks, "--out", tmp_path / "run"]
    done = run_program(*command, folder=ROOT, timeout=250, code=None)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # two steps from a bad start need not make it better
    assert "32 training tasks, 8 held-out tasks" in done.stdout
    assert "user: Please tell me" in done.stdout
    assert ("verdict: better" in done.stdout) == (done.returncode == 0)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["demo"]["tasks"] == tasks


async def _rollouts_of(path: Path) -> list[Any]:
    store = agl.SQLiteLightningStore(path)
    rollouts = await store.query_rollouts()
    await store.close()
    return list(rollouts)


@pytest.mark.heavy
def test_a_port_that_is_taken_ends_it_with_one_line_and_the_traceback_in_the_log(tmp_path: Path) -> None:
    command = [*QUICK, "demo", "--steps", "1", "--tasks", _tasks(tmp_path, *_sums(30)), "--out", tmp_path / "run"]
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        done = run_program(*command, folder=ROOT, code=1, AGL_SERVER_PORT=port)
    [line] = done.stderr.splitlines()
    assert line.startswith("agl: ")
    assert port in line
    assert done.stdout.splitlines()[-1] == f"failed; the traceback is in {tmp_path / 'run' / 'log.txt'}"
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()


def _load_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 plus 1?"}], tokenize=False)
    assert model(**tokenizer(prompt, return_tensors="pt")).logits.isfinite().all()


# --- wrong inputs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """A function that runs `agl demo`, checks that it starts and writes nothing, and returns its one line."""
    threads, children = set(threading.enumerate()), psutil.Process().children()

    def refused(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        code = main(["demo", "--out", str(tmp_path / "run"), *arguments])
        output = capsys.readouterr()
        assert code == 2
        assert output.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        [line] = output.err.splitlines()
        assert line.startswith("agl: ")
        return line

    yield refused
    assert set(threading.enumerate()) <= threads
    assert psutil.Process().children() == children


LONG = json.dumps({"question": "1 2 3 " * 50 + "?", "answer": 6})


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (None, ["tasks.jsonl", '{"question"']),
        ([], ["is empty", '{"question"']),
        ([*[GOOD] * 16, "not json"], ["line 17: not JSON", '{"question": "What is 34 plus 5?", "answer": 39}']),
        (_sums(29), ["29 different questions. At least 30 are required", "fewer than 6 held-out tasks", "sign test"]),
        ([*_sums(30), LONG], ["the question '1 2 3 1 2 3", "has 301 tokens", "accepts at most 136"]),
    ],
    ids=["no file", "empty", "no JSON", "too few", "too long a question"],
)
def test_a_wrong_tasks_file_is_refused(refusal: Any, tmp_path: Path, lines: list[str] | None, texts: list[str]) -> None:
    path = str(tmp_path / "tasks.jsonl") if lines is None else _tasks(tmp_path, *lines)
    message = refusal("--tasks", path)
    assert [text for text in texts if text not in message] == []


@pytest.mark.parametrize("out", ["/proc/run", "/dev/null/run"])
def test_an_output_folder_that_cannot_be_written_is_refused(refusal: Any, out: str) -> None:
    assert f"output folder '{out}' cannot be written" in refusal("--out", out)


def test_an_output_folder_that_holds_something_is_refused_and_left_alone(refusal: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert "is not empty. Choose another one" in refusal("--out", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("name", ["runners", "steps"])
@pytest.mark.parametrize("value", ["0", "-2"])
def test_numbers_below_one_are_refused_by_name(refusal: Any, name: str, value: str) -> None:
    assert f"--{name} must be 1 or more; got {value}" in refusal(f"--{name}", value)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        ("from agentlightning.cli import main; sys.exit(main(['demo']))", "agl-framework[demo]"),
        ("import agentlightning as agl; agl.GRPO(model='m')", "agl-framework[grpo]"),
        ("import agentlightning as agl; agl.Trainer(algorithm={'type': 'grpo', 'model': 'm'})", "agl-framework[grpo]"),
    ],
)
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    tmp_path: Path, use: str, text: str, package: str
) -> None:
    program = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
{use}
"""
    done = run_program("python", "-c", program, folder=tmp_path, code=None)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert f"needs the package '{package}', which is not installed" in last
    assert f"Install it with: pip install '{text}'" in last
    assert not list(tmp_path.iterdir())


# --- Ctrl+C ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path, terminal: Terminal) -> Callable[[str], Process]:
    """A function that starts a demo in a session of its own and returns it after the expected line."""

    def start(until: str) -> Process:
        tasks = _tasks(tmp_path, *_sums(30))  # six of them are held out: little to measure before the training
        command = [*QUICK, "demo", "--steps", "500", "--tasks", tasks, "--out", str(tmp_path / "run")]
        process = terminal(command, folder=ROOT)
        process.until(rf"(?m)^{until}")
        return process

    return start


def _everything_of(process: Process) -> tuple[list[psutil.Process], list[int]]:
    """Return the processes of a demo and the ports that they listen on."""
    family = process.family()
    ports = {c.laddr.port for member in family for c in member.net_connections("tcp") if c.status == "LISTEN"}
    return family, sorted(ports)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.heavy  # a whole warm start, 16 CPU seconds; tests/execution/test_endings.py has the promise of every run
@pytest.mark.timeout(200)
@pytest.mark.parametrize("whom", ["the terminal's processes", "the main process"])
def test_ctrl_c_in_training_ends_everything_and_says_where_the_run_lies(demo: Any, tmp_path: Path, whom: str) -> None:
    process = demo(until="step   2/500")
    family, ports = _everything_of(process)
    assert len(family) >= 3  # two runners beside the main process
    assert len(ports) >= 3  # store, gateway and engine
    if whom == "the main process":
        process.popen.send_signal(signal.SIGINT)
    else:
        os.killpg(process.popen.pid, signal.SIGINT)
    assert process.ended(10) == 130
    output = process.said
    assert "Traceback" not in output
    run = tmp_path / "run"
    begin = f"interrupted; the run folder {run} contains: checkpoints, config.json, log.txt, "
    assert output.splitlines()[-1].startswith(begin)
    assert {"config.json", "log.txt", "metrics.jsonl", "model", "store.db"} <= {path.name for path in run.iterdir()}
    _, alive = psutil.wait_procs(family, timeout=1)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    assert all(_is_free(port) for port in ports)

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 2
    _load_model(run / "model")


@pytest.mark.timeout(120)
def test_ctrl_c_in_the_warm_start_ends_it_too(demo: Any, tmp_path: Path) -> None:
    process = demo(until="warm start: ")
    os.killpg(process.popen.pid, signal.SIGINT)
    assert process.ended(10) == 130
    assert "Traceback" not in process.said
    assert (
        process.said.splitlines()[-1]
        == f"interrupted; the run folder {tmp_path / 'run'} contains: config.json, log.txt"
    )
