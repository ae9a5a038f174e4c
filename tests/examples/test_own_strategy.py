"""examples/own_strategy: its output, and the end of its loop."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, run, same, shown


def test_the_program_prints_what_its_readme_shows() -> None:
    [one] = shown("own_strategy")
    printed = run(one.command)
    assert same(printed, one.output), printed


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("own_strategy", EXAMPLES / "own_strategy/program.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_algorithm_raises_is_raised_and_the_run_has_failed(program: Any) -> None:
    @agl.algo
    async def fails(*, store: agl.LightningStore) -> None:
        raise KeyError("of the algorithm")

    trainer = agl.Trainer(algorithm=fails, strategy=program.OneLoop())
    with pytest.raises(KeyError, match="of the algorithm"):
        trainer.fit(program.where)


def test_runners_that_end_before_the_work_is_done_end_the_run(program: Any) -> None:
    trainer = agl.Trainer(
        algorithm="baseline", strategy=program.OneLoop(n_runners=2), max_rollouts=1, initial_resources={}
    )
    with pytest.raises(agl.RunnerDiedError, match="before the algorithm"):
        trainer.fit(program.where, train_dataset=["a", "b", "c", "d"])


def test_the_environment_chooses(program: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DEBUG", "1")
    trainer = agl.Trainer(algorithm="baseline", strategy=program.ByEnvironment(), initial_resources={})
    trainer.fit(program.where, train_dataset=["a", "b"])
    assert trainer.result.rewards == [1.0, 1.0]
    assert capsys.readouterr().out.count("this process, main thread") == 2
