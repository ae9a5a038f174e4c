"""The manual's chapter on algorithms, and its commands in several terminals: its programs word for word."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import agentlightning as agl
from tests.seeds.shown import Shown
from tests.stubs.ports import free_port
from tests.stubs.processes import Terminal

CANDIDATES = ["You are a helpful assistant. {any_question}", "You are a friendly chatbot. {any_question}"]
BEST = "You are a friendly chatbot. {any_question}"

PROGRAM = """
import asyncio
import os
import sys

import agentlightning as agl
from agentlightning.algorithm import algo

CANDIDATES = ["You are a helpful assistant. {any_question}", "You are a friendly chatbot. {any_question}"]


async def apo_algorithm(*, store):
    rewards = []
    for prompt in CANDIDATES:
        resources = {"main_prompt": agl.PromptTemplate(template=prompt, engine="f-string")}
        update = await store.add_resources(resources)
        rollout = await store.enqueue_rollout("Explain cats", "train", resources_id=update.resources_id)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        rewards.append(agl.find_final_reward(await store.query_spans(rollout.rollout_id)))
    print("best:", max(zip(rewards, CANDIDATES))[1], flush=True)
    return rewards


@agl.rollout
def apo_rollout(task, prompt_template: agl.PromptTemplate):
    return float("friendly" in prompt_template.format(any_question=task))


@algo
async def apo_algorithm_usable_in_trainer(*, store):
    return await apo_algorithm(store=store)


async def apart(role):
    store = agl.LightningStoreClient(os.environ["STORE"])
    if role == "algo":
        await apo_algorithm(store=store)
    else:
        runner = agl.LitAgentRunner(tracer=agl.OtelTracer())
        with runner.run_context(agent=apo_rollout, store=store):
            await runner.iter()
    await store.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(apart(sys.argv[1]))
    else:
        trainer = agl.Trainer(n_runners=1, algorithm=apo_algorithm_usable_in_trainer)
        trainer.fit(apo_rollout)
"""


@pytest.mark.snippet("003/prompt-candidates")
async def test_an_algorithm_begins_with_its_candidates(shown: Shown) -> None:
    algorithm = (await shown.start(agl=agl)).apo_algorithm
    assert await algorithm(store=agl.InMemoryLightningStore()) is None


@pytest.mark.snippet("003/algo-wrapper")
def test_an_algorithm_that_calls_another(shown: Shown) -> None:
    async def apo_algorithm(*, store: agl.LightningStore) -> str:
        update = await store.add_resources({"main_prompt": agl.PromptTemplate(template=BEST, engine="f-string")})
        return update.resources_id

    made = shown.run(apo_algorithm=apo_algorithm, LightningStore=agl.LightningStore)
    trainer = agl.Trainer(strategy="shm", algorithm=made.apo_algorithm_usable_in_trainer)
    trainer.fit(lambda task: 1.0)
    assert trainer.result.startswith("rs-")


@pytest.mark.snippet("003/verl-options")
def test_the_options_of_a_program(shown: Shown) -> None:
    parser = argparse.ArgumentParser()
    shown.run(subparsers=parser.add_subparsers())
    read = parser.parse_args(["verl", "--model", "qwen25"])
    assert (read.model, read.port, read.search) == ("qwen25", 4747, False)


@pytest.mark.heavy
@pytest.mark.snippet("003/integrated-trainer")
def test_algorithm_and_runner_in_one_trainer(shown: Shown) -> None:
    def apo_rollout(task: str, prompt_template: agl.PromptTemplate) -> float:
        return float("friendly" in prompt_template.format(any_question=task))

    async def apo_algorithm(*, store: agl.LightningStore) -> list[float | None]:
        rewards: list[float | None] = []
        for prompt in CANDIDATES:
            await store.add_resources({"main_prompt": agl.PromptTemplate(template=prompt, engine="f-string")})
            rollout = await store.enqueue_rollout("Explain cats", "train")
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
            rewards.append(agl.find_final_reward(await store.query_spans(rollout.rollout_id)))
        return rewards

    names: dict[str, Any] = {"apo_algorithm": apo_algorithm, "LightningStore": agl.LightningStore}
    with shown.warns_of("n_workers"):
        made = shown.run(after=["003/algo-wrapper"], apo_rollout=apo_rollout, **names)
    assert made.trainer.result == [0.0, 1.0]


@pytest.mark.snippet("003/prompt-updates")
async def test_an_algorithm_that_goes_through_its_candidates(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    made = await shown.start(agl=agl, prompt_candidates=CANDIDATES, console=Console(width=200))
    await made.apo_algorithm(store=agl.InMemoryLightningStore())
    lines = [f"[Algo] Updating prompt template to: '{prompt}'" for prompt in CANDIDATES]
    assert capsys.readouterr().out.splitlines() == lines


# --- in terminals ----------------------------------------------------------------------------------------------------


def three_terminals(shown: Shown, terminal: Terminal, folder: Path) -> None:
    """Run store, algorithm and runner in the order of the snippet."""
    store, algorithm, runner = shown.commands
    (folder / algorithm[1]).write_text(PROGRAM)
    port = str(free_port())
    served = terminal(store, "--port", port)
    served.until(port)
    address = f"http://localhost:{port}"
    learns, runs = (terminal(words, apart=True, STORE=address) for words in (algorithm, runner))
    assert learns.succeeded() == f"best: {BEST}\n"
    assert runs.code is None, "it serves until it is stopped"
    runs.interrupted()
    assert served.interrupted() == 0


@pytest.mark.heavy
@pytest.mark.snippet("003/three-terminals", differs="the test uses a free port")
def test_store_algorithm_and_runner_in_three_terminals(shown: Shown, terminal: Terminal, tmp_path: Path) -> None:
    three_terminals(shown, terminal, tmp_path)


@pytest.mark.heavy
@pytest.mark.snippet("003/training-commands", differs="the test uses a free port")
def test_the_same_by_a_training_script(shown: Shown, terminal: Terminal, tmp_path: Path) -> None:
    three_terminals(shown, terminal, tmp_path)


@pytest.mark.heavy
@pytest.mark.snippet("003/training-script")
def test_the_script_alone(shown: Shown, terminal: Terminal, tmp_path: Path) -> None:
    [words] = shown.commands
    (tmp_path / words[1]).write_text(PROGRAM)
    assert f"best: {BEST}" in terminal(words).succeeded()


@pytest.mark.heavy
@pytest.mark.snippet(
    "003/store-commands", differs="ports of the test; `agl prometheus` gets the folder that the processes share"
)
def test_a_store_and_a_page_of_metrics(shown: Shown, terminal: Terminal, tmp_path: Path) -> None:
    store, prometheus = shown.commands
    served = terminal([store[0], store[1], *store[4:]], "--port", str(free_port()))
    served.until("http://127.0.0.1:")
    assert served.interrupted() == 0, served.said
    alone = terminal(prometheus, apart=True, PROMETHEUS_MULTIPROC_DIR="")
    assert alone.ended() != 0
    shown.tells(alone.errors.strip().splitlines()[-1])
    terminal(prometheus, "--port", "0", PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "metrics")).until("/v1/prometheus")
