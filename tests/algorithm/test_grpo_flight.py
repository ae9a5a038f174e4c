"""Asynchronous collection from outside: what a user's run with `max_staleness` records, drops, keeps apart and ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import agentlightning as agl
from tests.algorithm.parts import calls_of, fit, rollouts_of, wants_digits

TASKS = ["one", "two", "three", "four"]


async def books(store: Any, run_id: str) -> tuple[Counter[tuple[str, str, str]], list[dict[str, Any]]]:
    """Return how often each call is in the ledger, and every call with its step and its ending."""
    entries, endings = Counter[tuple[str, str, str]](), list[dict[str, Any]]()
    for record in await store.query_run_records(run_id, kind_in=["ledger"]):
        for call in record.data["calls"]:
            entries[record.name, call["attempt_id"], call["call_id"]] += 1
            endings.append({**call, "step": record.step, "rollout": record.name})
    return entries, endings


def test_a_run_ahead_of_its_weights_learns_and_its_ledger_adds_up(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    result = fit(
        wants_digits,
        TASKS,
        store=store,
        model=untrained_model,
        max_steps=12,
        batch_size=4,
        num_generations=8,
        learning_rate=3e-3,
        max_staleness=1,
        output_dir=tmp_path / "run",
        trainer_run_id="ahead",
    )
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.3, rewards

    calls = {call.ref for call in asyncio.run(calls_of(store, asyncio.run(rollouts_of(store))))}
    entries, endings = asyncio.run(books(store, "ahead"))
    assert set(entries) == calls
    assert max(entries.values()) == 1
    versions = {
        figures.step: sum(f.update["steps"] > 0 for f in result.metrics[: figures.step - 1])
        for figures in result.metrics
    }
    ages = [versions[call["step"]] - call["weight_version"] for call in endings if call["ending"] == "trained"]
    assert set(ages) == {0, 1}
    flights = [figures.flight for figures in result.metrics]
    assert [flight["in_flight"] for flight in flights] == [8] * 11 + [4]
    assert max(flight.get("max_staleness", 0) for flight in flights) == 1
    assert len({tuple(key) for flight in flights for key in flight["taken"]}) == 12 * 4
    assert len(asyncio.run(rollouts_of(store))) == 12 * 4 * 8
