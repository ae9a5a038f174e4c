"""What Prometheus reads of training runs."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.http import run_metrics
from agentlightning.store.http.metrics import prometheus_response
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types.runs import RunRecord


async def page_of(store: LightningStore) -> list[str]:
    """The lines of the page that tell of runs."""
    response = await prometheus_response(store)
    return [line for line in bytes(response.body).decode().splitlines() if line.startswith("agl_run_")]


async def test_the_last_step_of_each_run_is_told() -> None:
    store = InMemoryLightningStore()
    await store.start_run("grpo")
    figures = {
        "mean_reward": 0.5,
        "update": {"loss": 0.25},
        "calls_trained": 8,
        "calls_excluded": {"helper": 1, "x": 2},
    }
    earlier = RunRecord(kind="step", step=1, data={"mean_reward": 0.0})
    await store.add_run_records("grpo", [RunRecord(kind="step", step=2, data=figures), earlier])
    await store.start_run("")
    await store.add_run_records("", [RunRecord(kind="step", step=1, data={"loss": None, "reward": "high"})])
    assert sorted(await page_of(store)) == [
        'agl_run_calls_excluded{run="grpo"} 3.0', 'agl_run_calls_trained{run="grpo"} 8.0',
        'agl_run_loss{run="grpo"} 0.25', 'agl_run_reward{run="grpo"} 0.5',
        'agl_run_step{run="-"} 1.0', 'agl_run_step{run="grpo"} 2.0',
    ]  # fmt: skip


async def test_the_runs_on_the_page_are_bounded() -> None:
    store = InMemoryLightningStore()
    for number in range(run_metrics.MOST_RUNS + 5):
        await store.start_run(f"r{number}")
        await store.add_run_records(f"r{number}", [RunRecord(kind="step", step=1, data={})])
    assert len(await page_of(store)) == run_metrics.MOST_RUNS


class NoRuns(InMemoryLightningStore):
    """A store of a user's own that keeps no runs."""

    query_runs = LightningStore.query_runs


async def test_a_store_without_runs_has_the_rest_of_the_page() -> None:
    response = await prometheus_response(NoRuns())
    assert b"agl_store_up 1.0" in response.body
    assert b"agl_run_step{" not in response.body


async def test_a_damaged_record_leaves_out_the_figures_of_its_own_run_only(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "runs.db")
    for run_id in ("whole", "damaged"):
        await store.start_run(run_id)
        await store.add_run_records(run_id, [RunRecord(kind="step", step=1, data={"reward": 0.5})])
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as db, db:
        db.execute("UPDATE run_records SET body = '{\"kind\": 1' WHERE run_id = 'damaged'")
    assert sorted(await page_of(store)) == ['agl_run_reward{run="whole"} 0.5', 'agl_run_step{run="whole"} 1.0']
    await store.close()
