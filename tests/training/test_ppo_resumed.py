"""A run of PPO whose processes are all killed goes on with its value head, and with the optimizer of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.training.learner.parameters import PREFIX
from tests.training.resumed import RUN_ID, STEPS
from tests.training.test_grpo_resumed import lines_of

_POINTS = ("update 1", "files 2", "ledger 3", "rollouts 5")
_CURVE = ("step", "mean_reward", "held_out", "calls_trained", "update", "weights")


def play(model: Path, folder: Path, *point: str) -> int:
    command = [sys.executable, "-m", "tests.training.resumed", str(model), str(folder), *point]
    environment = {**os.environ, "ALGORITHM": "PPO"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, start_new_session=True, env=environment
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_a_run_of_ppo_that_is_killed_goes_on_with_its_value_head_and_its_optimizer(
    untrained_model: Path, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    for point in _POINTS:
        assert play(untrained_model, killed, point) == -signal.SIGKILL, point
    assert play(untrained_model, killed) == 0
    assert play(untrained_model, whole) == 0

    lines, expected = (
        [{name: line[name] for name in _CURVE} for line in lines_of(folder)] for folder in (killed, whole)
    )
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines == expected
    assert all("value_loss" in line["update"] for line in lines)

    found, wanted = (tensors_in(folder / "run" / "checkpoints" / f"checkpoint-{STEPS}") for folder in (killed, whole))
    assert found == wanted
    of_head = {name.partition(PREFIX)[0] for name in found if PREFIX in name}
    in_optimizer = {f"optimizer.safetensors/{state}" for state in ("exp_avg/", "exp_avg_sq/", "step/")}
    assert of_head >= in_optimizer, "the checkpoints that are compared hold the state of the head's optimizer"

    store = agl.SQLiteLightningStore(killed / "store.db")
    run = await store.get_run_by_id(RUN_ID)
    await store.close()
    assert run is not None
    assert (run.state, run.starts, run.last_step) == ("succeeded", len(_POINTS) + 1, STEPS)


def tensors_in(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor of a checkpoint, by file and name."""
    return {
        f"{path.relative_to(checkpoint)}/{name}": tensor.numpy().tobytes()
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
