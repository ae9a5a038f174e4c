"""examples/apo: each program as a user runs it, algorithm and runner in terminals, and what Ctrl+C leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, Shown, run, same, shown
from tests.stubs.model_server import Json, ModelServer
from tests.stubs.ports import free_port

SHOWN = shown("apo")
Terminal = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize("one", SHOWN, ids=lambda one: one.command.split("/")[-1])
def test_each_program_prints_what_its_readme_shows(one: Shown) -> None:
    printed = run(one.command)
    assert same(printed, one.output), printed


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["apo", "gepa"])
def test_a_search_finds_what_the_prompt_forgets(method: str) -> None:
    printed = run(f"python examples/apo/room_selector_apo.py --method {method}")
    assert f"--- {method}: " in printed
    before, after = re.findall(r"^(?:before|after) +([\d.]+) \[([\d.]+), ([\d.]+)\]", printed, re.MULTILINE)
    assert before == ("0.60", "0.51", "0.68")
    assert float(after[1]) > float(before[2]), "the intervals are apart"
    assert "\nbetter: " in printed
    assert "0 lost of 112 pairs" in printed


# --- in terminals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Runs a command of the README in a terminal of its own."""
    opened: list[subprocess.Popen[str]] = []
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OPENAI_"))}

    def start(command: str, *further: str, **environment: str) -> subprocess.Popen[str]:
        program, *words = command.split()
        words = (
            ["-m", "agentlightning.cli", *words] if program == "agl" else [str(EXAMPLES / "apo" / words[0]), *words[1:]]
        )
        process = subprocess.Popen(
            [sys.executable, *words, *further], cwd=tmp_path, env={**clean, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        opened.append(process)
        return process

    yield start
    for process in opened:
        process.kill()
        process.communicate()


def commands() -> list[str]:
    """Return the commands for three terminals, as the README shows them."""
    block = re.search(
        r"^```bash\n(agl store\n.*?)^```", (EXAMPLES / "apo/README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    return block[1].splitlines()


@pytest.fixture
def address(terminal: Terminal) -> str:
    port = str(free_port())
    served = terminal(commands()[0], "--port", port)
    assert served.stdout is not None
    assert port in served.stdout.readline()
    return f"http://127.0.0.1:{port}"


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """End a program by Ctrl+C; return its exit code and what it says on the standard error."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.slow
def test_algorithm_and_runner_work_together_from_two_terminals(terminal: Terminal, address: str) -> None:
    _, algorithm, runner = commands()
    learns, runs = (terminal(each, "--external-store-address", address) for each in (algorithm, runner))
    out, errors = learns.communicate(timeout=120)
    assert (learns.returncode, errors) == (0, "")
    assert same(out, SHOWN[0].output), "the same as by the Trainer"
    assert runs.poll() is None, "it serves until it is stopped"
    assert interrupted(runs) == (130, "")


@pytest.mark.slow
def test_ctrl_c_in_the_middle_ends_both_and_leaves_nothing_open(terminal: Terminal, address: str) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def never_answers(request: Json) -> str:
        asked.set()
        go_on.wait(120)
        return "391"

    _, algorithm, runner = commands()
    with ModelServer(never_answers) as model:
        real = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
        learns, runs = (terminal(each, "--external-store-address", address, **real) for each in (algorithm, runner))
        try:
            assert asked.wait(60), "the runner has a rollout"
            assert interrupted(learns) == (130, "")
            assert interrupted(runs) == (130, "")
        finally:
            go_on.set()

    async def statuses() -> list[tuple[str, list[str]]]:
        store = agl.LightningStoreClient(address)
        try:
            rollouts = await store.query_rollouts()
            return [(r.status, [a.status for a in await store.query_attempts(r.rollout_id)]) for r in rollouts]
        finally:
            await store.close()

    first, *others = asyncio.run(statuses())
    assert first == ("cancelled", ["failed"])
    assert others == [("cancelled", []), ("cancelled", [])]


# --- a real model, and one that does not answer ----------------------------------------------------------------------


def test_a_key_an_address_and_a_name_choose_a_real_model(terminal: Terminal) -> None:
    with ModelServer(lambda request: "B202") as model:
        real = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "the-key", "OPENAI_MODEL": "the-model"}
        process = terminal("python apo_debug.py --mode runner", **real)
        printed, _ = process.communicate(timeout=60)
        [call] = model.calls
    assert printed.startswith("succeeded, reward 1.0\n")
    assert (call.request["model"], call.headers["authorization"]) == ("the-model", "Bearer the-key")
    assert '"B202": {"seats": 8' in call.request["messages"][1]["content"], "a model is told the rooms"


def test_a_key_without_the_name_of_a_model_is_refused(terminal: Terminal) -> None:
    process = terminal("python apo_debug.py --mode hook", OPENAI_API_KEY="the-key")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "set OPENAI_MODEL" in errors, "Traceback" in errors) == (1, True, False)


def test_a_hook_sees_what_the_agent_raises_and_a_step_raises_it(terminal: Terminal) -> None:
    absent = {"OPENAI_BASE_URL": f"http://127.0.0.1:{free_port()}", "OPENAI_MODEL": "m"}
    hook, step = (terminal(f"python apo_debug.py --mode {mode}", **absent) for mode in ("hook", "runner"))
    out, _ = hook.communicate(timeout=60)
    assert (hook.returncode, out.count("raised APIConnectionError"), out.count("reward None")) == (0, 3, 3)
    _, errors = step.communicate(timeout=60)
    assert (step.returncode, errors.splitlines()[-1]) == (1, "openai.APIConnectionError: Connection error.")
