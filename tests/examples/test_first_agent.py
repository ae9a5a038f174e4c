"""examples/first_agent: with a model that was not taught anything; the whole of it among the heavy tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.types import RolloutFilter
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import check_learnt, check_untaught, curve, run

pytestmark = pytest.mark.heavy

PROGRAM = "python examples/first_agent/train.py"


def test_a_model_of_ones_own_is_measured_and_one_that_earns_nothing_learns_nothing(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    printed = run(f"{PROGRAM} --model {model} --steps 1 --out {tmp_path / 'run'}")
    check_untaught(printed)
    assert (tmp_path / "run/metrics.jsonl").is_file()


async def test_a_store_on_another_machine_has_the_run(tmp_path: Path, server: agl.LightningStoreServer) -> None:
    model = save_untrained_model(tmp_path / "model")
    command = f"{PROGRAM} --model {model} --steps 1 --external-store-address {server.endpoint}"
    printed = await asyncio.to_thread(run, command)
    assert curve(printed) == {0: 0}
    [trained] = await server.query_runs()
    chosen = RolloutFilter(run_id=trained.run_id, mode_in=["train"])
    rollouts = await server.query_rollout_summaries(filter=chosen, limit=1)
    assert (trained.algorithm, rollouts.total) == ("GRPO", 128)  # 16 tasks, eight rollouts of each


@pytest.mark.timeout(900)
def test_from_zero_to_a_curve_that_rises() -> None:
    check_learnt(PROGRAM, 800, at_most=35, at_least=70)
