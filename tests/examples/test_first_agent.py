"""examples/first_agent: with a model that was not taught anything; the whole of it among the heavy tests."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.types import RolloutFilter
from tests.algorithm.parts import save_untrained_model
from tests.examples.shown import run

pytestmark = pytest.mark.heavy

PROGRAM = "python examples/first_agent/train.py"


def curve(printed: str) -> dict[int, int]:
    """Return updates and the percentage of solved tasks after them."""
    table = printed.partition("updates  solved")[2]
    return {int(updates): int(solved) for updates, solved in re.findall(r"^ +(\d+) +(\d+)%", table, re.MULTILINE)}


def test_a_model_of_ones_own_is_measured_and_one_that_earns_nothing_learns_nothing(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    printed = run(f"{PROGRAM} --model {model} --steps 1 --out {tmp_path / 'run'}")
    assert curve(printed) == {0: 0}
    assert "equal_rewards 128" in printed
    assert (tmp_path / "run/metrics.jsonl").is_file()


async def test_a_store_on_another_machine_has_the_run(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), port=0)
    await server.start()
    command = f"{PROGRAM} --model {model} --steps 1 --external-store-address {server.endpoint}"
    printed = await asyncio.to_thread(run, command)
    assert curve(printed) == {0: 0}
    [trained] = await server.query_runs()
    chosen = RolloutFilter(run_id=trained.run_id, mode_in=["train"])
    rollouts = await server.query_rollout_summaries(filter=chosen, limit=1)
    assert (trained.algorithm, rollouts.total) == ("GRPO", 128)  # 16 tasks, eight rollouts of each
    await server.stop()


@pytest.mark.timeout(900)
def test_from_zero_to_a_curve_that_rises() -> None:
    found = curve(run(PROGRAM, timeout=800))
    assert sorted(found) == [0, 2, 4, 6, 8]
    assert found[0] <= 35
    assert found[8] >= 70
