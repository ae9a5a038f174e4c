"""examples/apo: each program as a user runs it, algorithm and runner in terminals, and what Ctrl+C leaves behind."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, Shown, run, same, shown
from tests.stubs.model_server import Json, ModelServer
from tests.stubs.ports import free_port
from tests.stubs.processes import Terminal

SHOWN = shown("apo")


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


def commands() -> list[str]:
    """Return the commands for three terminals, as the README shows them, for another folder."""
    block = re.search(
        r"^```bash\n(agl store\n.*?)^```", (EXAMPLES / "apo/README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    return block[1].replace("python ", f"python {EXAMPLES}/apo/").splitlines()


@pytest.fixture
def address(terminal: Terminal) -> str:
    port = str(free_port())
    terminal(commands()[0], "--port", port).until(port)
    return f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_algorithm_and_runner_work_together_from_two_terminals(terminal: Terminal, address: str) -> None:
    _, algorithm, runner = commands()
    learns, runs = (terminal(each, "--external-store-address", address, apart=True) for each in (algorithm, runner))
    assert same(learns.succeeded(), SHOWN[0].output), "the same as by the Trainer"
    assert runs.code is None, "it serves until it is stopped"
    assert (runs.interrupted(), learns.errors, runs.errors) == (130, "", "")


@pytest.mark.slow
def test_ctrl_c_in_the_middle_ends_both_and_leaves_nothing_open(terminal: Terminal, address: str) -> None:
    request_made, go_on = threading.Event(), threading.Event()

    def never_answers(request: Json) -> str:
        request_made.set()
        go_on.wait(120)
        return "391"

    _, algorithm, runner = commands()
    with ModelServer(never_answers) as model:
        real = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
        options = {"apart": True, **real}
        learns, runs = (terminal(each, "--external-store-address", address, **options) for each in (algorithm, runner))
        try:
            assert request_made.wait(60), "the runner has a rollout"
            assert (learns.interrupted(), learns.errors) == (130, "")
            assert (runs.interrupted(), runs.errors) == (130, "")
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


DEBUG = f"python {EXAMPLES}/apo/apo_debug.py --mode"


def test_a_key_an_address_and_a_name_choose_a_real_model(terminal: Terminal) -> None:
    with ModelServer(lambda request: "B202") as model:
        real = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "the-key", "OPENAI_MODEL": "the-model"}
        printed = terminal(f"{DEBUG} runner", **real).succeeded()
        [call] = model.calls
    assert printed.startswith("succeeded, reward 1.0\n")
    assert (call.request["model"], call.headers["authorization"]) == ("the-model", "Bearer the-key")
    assert '"B202": {"seats": 8' in call.request["messages"][1]["content"], "a model is told the rooms"


def test_a_key_without_the_name_of_a_model_is_refused(terminal: Terminal) -> None:
    process = terminal(f"{DEBUG} hook", OPENAI_API_KEY="the-key")
    assert process.ended() == 1
    assert "Set OPENAI_MODEL" in process.said
    assert "Traceback" not in process.said


def test_a_hook_sees_what_the_agent_raises_and_a_step_raises_it(terminal: Terminal) -> None:
    absent = {"OPENAI_BASE_URL": f"http://127.0.0.1:{free_port()}", "OPENAI_MODEL": "m"}
    hook, step = (terminal(f"{DEBUG} {mode}", apart=True, **absent) for mode in ("hook", "runner"))
    out = hook.succeeded()
    assert (out.count("raised APIConnectionError"), out.count("reward None")) == (3, 3)
    assert (step.ended(), step.errors.splitlines()[-1]) == (1, "openai.APIConnectionError: Connection error.")
