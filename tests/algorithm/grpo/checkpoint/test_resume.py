"""A run that is started again under its name goes on where it was, and whoever looks at it sees one run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.grpo.checkpoint.folder import CheckpointFolder
from agentlightning.algorithm.grpo.loop import GRPORun
from tests.algorithm.parts import SMALL, metrics_of, rollouts_of, two_turns

TASKS = ["one", "two", "three", "four"]
_CURVE = ("step", "mean_reward", "calls_captured", "calls_trained", "calls_excluded", "update", "weights")


@pytest.fixture(scope="module")
def whole(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return curve(run(untrained_model, folder, agl.SQLiteLightningStore(folder / "store.db")))


def run(model: Path, folder: Path, store: Any, agent: Any = two_turns, **settings: Any) -> Any:
    """Run under one name; settings of the Trainer begin with `trainer_`."""
    grpo = {"max_steps": 5, "save_steps": 2, "deterministic": True, "output_dir": folder / "run", **settings}
    tasks, val = grpo.pop("tasks", TASKS), grpo.pop("val", None)
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**{**SMALL, "model": model, **grpo}),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        strategy="shm",
        store=store,
        run_id="named",
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=val)
    return trainer.result


def curve(result: Any) -> list[dict[str, Any]]:
    return [{name: line[name] for name in _CURVE} for line in metrics_of(result)]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let the run end in a step, before its update."""
    taken = GRPORun._rows

    async def rows(self: GRPORun, rollouts: Any, ledger: Any) -> Any:
        found = await taken(self, rollouts, ledger)
        if ledger.step == step:
            raise error
        return found

    monkeypatch.setattr(GRPORun, "_rows", rows)


@pytest.mark.heavy
@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_interrupted_run_has_the_curve_of_one_that_nothing_interrupts(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[dict[str, Any]], step: int
) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, RuntimeError("here"))
        with pytest.raises(RuntimeError, match="here"):
            run(untrained_model, tmp_path, store)
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps()[-1:] == ([step - 1] if step > 1 else [])

    result = run(untrained_model, tmp_path, store)
    assert curve(result) == whole
    assert [figures.step for figures in result.metrics] == [1, 2, 3, 4, 5]
    assert checkpoints.steps() == [4, 5]
    rollouts = asyncio.run(rollouts_of(store))
    assert len(rollouts) == 5 * 8
    assert result.steps == 5
