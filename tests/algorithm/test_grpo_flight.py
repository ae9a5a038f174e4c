"""Asynchronous collection from outside: what a user's run with `max_staleness` records, drops, keeps apart and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.grpo.checkpoint.replay import replay
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import ask, calls_of, fit, metrics_of, rollouts_of, say, two_turns, wants_digits

TASKS = ["one", "two", "three", "four"]


def place_of(rollout: AttemptedRollout) -> tuple[int, int, int]:
    """Return step, task and sample of a rollout."""
    about: dict[str, Any] = rollout.metadata or {}
    return about["step"], about["task"], about["sample"]


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


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "minibatch_rollouts": 4}, {"loss_type": "gspo"}])
def test_every_step_can_be_taken_again_from_its_records(
    untrained_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    settings = {"max_steps": 4, "max_staleness": 2, "output_dir": tmp_path / "run", **settings}
    result = fit(wants_digits, TASKS, store=store, model=untrained_model, trainer_run_id="again", **settings)
    stale = [figures for figures in result.metrics if figures.flight.get("max_staleness", 0) > 0]
    assert stale
    for figures in stale:
        update = figures.update
        assert update["stale_kl"] > 0
        assert update["stale_kl"] + update["fresh_kl"] == pytest.approx(update["approx_kl"], rel=1e-3, abs=1e-7)

    async def differences() -> list[str]:
        opened = agl.SQLiteLightningStore(tmp_path / "store.db")
        found = [(await replay(opened, "again", figures.step)).differences for figures in stale]
        await opened.close()
        return [text for texts in found for text in texts]

    assert asyncio.run(differences()) == []


def test_a_group_that_outlives_its_weights_is_dropped_and_holds_nobody_up(untrained_model: Path) -> None:
    later = threading.Event()

    @agl.rollout
    def slow_once(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        reply = ask(llm, [say(task)])["content"]
        step, number, sample = place_of(rollout)
        if step >= 5:
            later.set()
        if (step, number, sample) == (1, 1, 0):
            assert later.wait(60)
        return len(reply) + rollout.start_time % 1

    store = agl.InMemoryLightningStore()
    result = fit(
        slow_once, TASKS, store=store, model=untrained_model, max_steps=7, max_staleness=1, trainer_run_id="slow"
    )
    late = [figures for figures in result.metrics if figures.flight["dropped"]]
    assert [figures.flight["dropped"] for figures in late] == [[[1, 1, None]]]
    assert late[0].flight["dropped_groups"] == 1
    assert late[0].calls_excluded["too_stale"] == 4
    assert late[0].rollouts_excluded == {"too_stale": 4}
    assert all(len(figures.flight["taken"]) == 2 for figures in result.metrics)
    assert not any([1, 1, None] in figures.flight["taken"] for figures in result.metrics)
    entries, endings = asyncio.run(books(store, "slow"))
    assert max(entries.values()) == 1
    assert set(entries) == {call.ref for call in asyncio.run(calls_of(store, asyncio.run(rollouts_of(store))))}
    dropped = {call["rollout"] for call in endings if call["reason"] == "too_stale"}
    assert len(dropped) == 4


def test_an_evaluation_has_the_engine_for_itself(untrained_model: Path) -> None:
    spans: list[tuple[str, float, float]] = []

    @agl.rollout
    def timed(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        began = time.monotonic()
        reward = two_turns(task, llm)
        spans.append((str(rollout.mode), began, time.monotonic()))
        return reward + began % 1

    result = fit(
        timed,
        TASKS,
        model=untrained_model,
        max_steps=4,
        eval_steps=1,
        max_staleness=2,
        val_dataset=["five", "six", "seven", "eight"],
    )
    assert len(result.evaluations) == 2 + 3 + 2
    training = [(began, ended) for mode, began, ended in spans if mode == "train"]
    held_out = [(began, ended) for mode, began, ended in spans if mode == "val"]
    assert held_out
    assert not [one for one in held_out for other in training if one[0] < other[1] and other[0] < one[1]]
    assert max(figures.flight.get("max_staleness", 0) for figures in result.metrics) >= 1


def test_groups_that_fail_are_accounted_for_and_others_are_trained(untrained_model: Path) -> None:
    @agl.rollout
    def breaks(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        reply = ask(llm, [say(task)])["content"]
        if task == "two":
            raise ValueError("no")
        return len(reply) + rollout.start_time % 1

    store = agl.InMemoryLightningStore()
    result = fit(breaks, TASKS, store=store, model=untrained_model, max_steps=4, max_staleness=1)
    assert sum(figures.rollouts_failed for figures in result.metrics) == 2 * 4  # every task comes twice
    assert sum(figures.rollouts_excluded.get("infrastructure_fault", 0) for figures in result.metrics) == 2 * 4
    assert result.steps == 4


def test_zero_is_the_synchronous_run_bit_for_bit(untrained_model: Path, tmp_path: Path) -> None:
    def lines(name: str, **settings: Any) -> list[dict[str, Any]]:
        result = fit(
            two_turns, TASKS, model=untrained_model, deterministic=True, output_dir=tmp_path / name, **settings
        )
        timed = {"seconds", "cpu_seconds", "tokens_per_second", "take"}
        return [{key: value for key, value in line.items() if key not in timed} for line in metrics_of(result)]

    zero = lines("zero", max_staleness=0)
    assert zero == lines("left out")
    assert all(line["flight"] == {} for line in zero)


def run_named(agent: Any, model: Path, folder: Path, **settings: Any) -> Any:
    """Run under one name with a store of its own connection."""
    settings = {"max_steps": 5, "max_staleness": 1, "save_steps": 2, **settings}
    store = agl.SQLiteLightningStore(folder / "store.db")
    return fit(agent, TASKS, store=store, model=model, output_dir=folder / "run", trainer_run_id="named", **settings)


async def adds_up(folder: Path) -> list[dict[str, Any]]:
    """Check that each call of the run's training rollouts is in its ledger once; return how each ended."""
    store = agl.SQLiteLightningStore(folder / "store.db")
    entries, endings = await books(store, "named")
    rollouts = await rollouts_of(store)
    assert {call.ref for call in await calls_of(store, rollouts)} == set(entries)
    assert max(entries.values()) == 1
    assert all(rollout.status in ("succeeded", "failed", "cancelled") for rollout in rollouts)
    records = await store.query_run_records("named", kind_in=["step"])
    taken = Counter(tuple(key) for record in records for key in record.data["flight"]["taken"])
    assert set(taken.values()) == {1}
    await store.close()
    return endings


@agl.rollout
def sends_a_signal_once(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """Ends the run while groups of its third step are in flight."""
    reward = two_turns(task, llm)
    if place_of(rollout)[0] == 3 and (number := os.environ.pop("AGL_TEST_SIGNAL", None)):
        os.kill(os.getpid(), int(number))
    return reward + rollout.start_time % 1


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_cancels_what_is_in_flight_and_the_run_goes_on_later(
    untrained_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    monkeypatch.setenv("AGL_TEST_SIGNAL", str(int(number)))
    with pytest.raises(raised):
        run_named(sends_a_signal_once, untrained_model, tmp_path)

    async def still_open() -> list[str]:
        store = agl.SQLiteLightningStore(tmp_path / "store.db")
        rollouts = await rollouts_of(store)
        await store.close()
        return [rollout.status for rollout in rollouts if rollout.status not in ("succeeded", "failed", "cancelled")]

    assert asyncio.run(still_open()) == []
    result = run_named(sends_a_signal_once, untrained_model, tmp_path)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4, 5]
    asyncio.run(adds_up(tmp_path))


@pytest.mark.heavy
def test_a_run_whose_weights_come_out_otherwise_takes_the_later_steps_anew(
    untrained_model: Path, tmp_path: Path
) -> None:
    """As on a GPU: here the record of the second step is changed, and the newest checkpoints are broken."""
    settings = {"max_steps": 4, "save_steps": 1, "save_total_limit": None}
    run_named(two_turns, untrained_model, tmp_path, **settings)
    for step in (2, 3, 4):
        (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").unlink()

    async def change() -> None:
        opened = agl.SQLiteLightningStore(tmp_path / "store.db")
        records = list(await opened.query_run_records("named", step_from=2))
        await opened.rewind_run("named", 1)
        for record in records:
            if (record.kind, record.step) == ("step", 2):
                record.data["weights"] = "of another machine"
        await opened.add_run_records("named", records)
        await opened.close()

    asyncio.run(change())
    result = run_named(two_turns, untrained_model, tmp_path, **settings)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4]
    endings = asyncio.run(adds_up(tmp_path))
    assert sum(call["reason"] == "step_undone" for call in endings) >= 8 * 2
