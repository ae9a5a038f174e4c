"""The tutorial on scaling out: its programs word for word, and what its prose says around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.seeds.parts import TASKS, MyCustomTracer, agent, learns
from tests.seeds.shown import Shown, both_end
from tests.stubs.ports import free_port
from tests.stubs.processes import Process

TOKEN = "a-token-for-this-test-alone"


@pytest.mark.snippet("001/parallel-rollouts", instead="VERL requires an extra")
def test_parallel_rollouts_with_the_trainer(shown: Shown) -> None:
    class Rows:
        """The little of `datasets.Dataset` that the program uses."""

        @staticmethod
        def from_parquet(path: str) -> Any:
            assert path in ("data/train.parquet", "data/test.parquet")
            return Rows()

        def to_list(self) -> list[Any]:
            return TASKS

    shown.project("datasets", Dataset=Rows)
    shown.project("calc_agent", calc_agent=agent)
    with shown.explains(ImportError, r"agl-framework\[verl\]"):
        shown.run(verl_config={})


@pytest.mark.heavy
def test_parallel_rollouts_with_an_algorithm_that_there_is() -> None:
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        n_runners=8,
        tracer=agl.OtelTracer(),
        adapter=agl.LlmProxyTraceToTriplet(),
        initial_resources={},
        strategy={"type": "cs", "server_port": 0},
    )
    trainer.fit(agent, train_dataset=TASKS, val_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75, 0.25, 0.75]


@pytest.mark.snippet("001/strategies")
def test_every_form_of_the_shared_memory_strategy(shown: Shown) -> None:
    made: list[agl.Trainer] = []

    class Kept(agl.Trainer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            made.append(self)

    shown.patch.setattr(agl, "Trainer", Kept)
    shown.run()
    assert [trainer.n_runners for trainer in made] == [1, 8, 4]
    for trainer in made:
        assert type(trainer.strategy) is agl.SharedMemoryExecutionStrategy
        learns(trainer)


@pytest.mark.heavy
@pytest.mark.snippet("001/client-server-port", differs="the test uses a free port")
def test_settings_of_client_server_in_a_dict(shown: Shown) -> None:
    trainer = shown.run(agl=agl, algorithm=agl.Baseline()).trainer
    assert type(trainer.strategy) is agl.ClientServerExecutionStrategy
    assert (trainer.strategy.n_runners, trainer.strategy.server_port) == (8, 9999)
    trainer.strategy.server_port = free_port()  # several tests may run at once
    learns(trainer)


@pytest.fixture
def environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that sets variables of its own leaves them to no other test."""
    for variable in ("AGL_SERVER_PORT", "AGL_CURRENT_ROLE", "AGL_MANAGED_STORE"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.mark.usefixtures("environment_as_it_was")
@pytest.mark.snippet("001/environment")
def test_the_environment_configures_client_server(shown: Shown) -> None:
    trainer = shown.run(agl=agl, algorithm=agl.Baseline()).trainer
    assert type(trainer.strategy) is agl.ClientServerExecutionStrategy
    assert (trainer.strategy.server_port, trainer.strategy.role) == (10000, "algorithm")
    assert trainer.strategy.managed_store is False
    assert trainer.store.server_address_root == "http://127.0.0.1:10000", "the store that both roles share"


@pytest.mark.heavy
@pytest.mark.snippet("001/client-server-settings", differs="`AGL_TOKEN` is set; port of the test")
def test_a_server_for_other_machines_and_a_runner_to_debug(shown: Shown) -> None:
    trainer = shown.run(agl=agl, algorithm=agl.Baseline()).trainer
    with pytest.raises(RuntimeError, match=r"Refusing to listen on 0\.0\.0\.0.*AGL_TOKEN") as refused:
        trainer.fit(agent, train_dataset=TASKS)
    assert type(refused.value) is RuntimeError, "told in this process, before any other is started"
    shown.tells(refused.value, "error without `AGL_TOKEN`:")
    shown.patch.setenv("AGL_TOKEN", TOKEN)
    assert trainer.strategy.server_port == 9999
    trainer.strategy.server_port = free_port()
    learns(trainer)


TRAIN_CALC_AGENT = """
import argparse
import agentlightning as agl
from tests.seeds.parts import TASKS, agent

parser = argparse.ArgumentParser()
parser.add_argument("--n-runners", type=int, default=1)
trainer = agl.Trainer(
    algorithm=agl.Baseline(), n_runners=parser.parse_args().n_runners, initial_resources={}, run_id="calc"
)
trainer.fit(agent, train_dataset=TASKS)
print("role", trainer.strategy.role, "result", trainer.result)
"""


def started(shown: Shown, folder: Path, port: int) -> Process:
    here = {"AGL_SERVER_PORT=4747": f"AGL_SERVER_PORT={port}", "10.0.0.4": "127.0.0.1"}
    return shown.script(folder / shown.snippet.name, here, train_calc_agent=TRAIN_CALC_AGENT)


@pytest.mark.heavy
@pytest.mark.snippet("001/algorithm-machine", differs="`AGL_TOKEN` is set on both machines; port of the test")
def test_the_algorithm_on_a_machine_of_its_own(shown: Shown, tmp_path: Path) -> None:
    refused = started(shown, tmp_path, port := free_port())
    refused.ended(60)
    shown.tells(refused.said.strip().splitlines()[-1], "error without `AGL_TOKEN`:")
    shown.patch.setenv("AGL_TOKEN", TOKEN)
    both_end(started(shown, tmp_path, port), started(shown.beside("001/runner-machine"), tmp_path, port))


@pytest.mark.heavy
@pytest.mark.snippet("001/runner-machine", differs="`AGL_TOKEN` is set on both machines; address of the test")
def test_runners_on_a_machine_of_their_own(shown: Shown, tmp_path: Path) -> None:
    shown.patch.setenv("AGL_TOKEN", TOKEN)
    runner = started(shown, tmp_path, port := free_port())
    both_end(started(shown.beside("001/algorithm-machine"), tmp_path, port), runner)


# --- what the prose says -----------------------------------------------------------------------------------------


def test_other_parts_by_class_path_and_settings() -> None:
    trainer = agl.Trainer(tracer="tests.seeds.parts.MyCustomTracer", adapter={"agent_match": "planner"})
    assert type(trainer.tracer) is MyCustomTracer
    assert type(trainer.adapter) is agl.TracerTraceToTriplet
    assert type(agl.Trainer(adapter="agentlightning.adapter.LlmProxyTraceToTriplet").adapter) is (
        agl.LlmProxyTraceToTriplet
    )
