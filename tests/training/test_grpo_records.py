"""What a GRPO run leaves in its store: every call has one ending, and the numbers are those that the loss used."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.training.learner.policy import Policy
from agentlightning.training.ledger_records import LedgerEntry, check_ledger, numbers_of
from agentlightning.training.progress import StepFigures
from agentlightning.training.recording import RunRecorder
from agentlightning.training.records import RunLog
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.updater import Learner, Updater
from agentlightning.types.runs import RunRecord
from tests.algorithm.parts import calls_of, fit, metrics_of, rollouts_of, two_turns
from tests.training.test_grpo_ledger import ENDS, many_ends

TASKS = ["one", "two", "three", "four"]
SECRET = "correct-horse-battery"


async def run_grpo(
    agent: Any, model: Path, folder: Path, tasks: list[Any] = TASKS, **settings: Any
) -> tuple[agl.InMemoryLightningStore, GRPOResult]:
    """Run GRPO in a thread, so that its store can be asked from here."""
    store = agl.InMemoryLightningStore()
    given = {"trainer_run_id": "r", **settings}
    result = await asyncio.to_thread(fit, agent, tasks, store=store, model=model, output_dir=folder, **given)
    return store, result


async def entries_of_step(store: agl.LightningStore, step: int) -> list[LedgerEntry]:
    """The ledger entries of one step."""
    records = await store.query_run_records("r", kind_in=["ledger"], step_from=step, step_to=step)
    return [cast(LedgerEntry, record.data) for record in records]


async def test_the_loss_of_a_step_can_be_computed_from_its_records(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await run_grpo(two_turns, untrained_model, tmp_path, max_steps=2, batch_size=4)
    for figures in result.metrics:
        entries = await entries_of_step(store, figures.step)
        rows = [numbers_of(row) for entry in entries for row in entry.get("rows", ())]
        assert len(rows) == figures.update["rows"]
        loss, clipped = np.float64(0), np.float64(0)
        for row in rows:
            numbers = {name: np.frombuffer(values, values.typecode) for name, values in row.items()}
            ratio, weight, advantage = (numbers[name].astype(np.float64) for name in ("ratio", "weight", "advantage"))
            gain, clipped_gain = ratio * advantage, ratio.clip(1 - 0.2, 1 + 0.28) * advantage
            loss -= (weight * np.minimum(gain, clipped_gain)).sum()
            clipped += weight[numbers["clipped"].astype(bool)].sum()
            difference = numbers["trainer_logprobs"] - numbers["engine_logprobs"]
            np.testing.assert_allclose(numbers["ratio"], np.exp(difference), rtol=1e-6)
            assert (numbers["clipped"].astype(bool) == (clipped_gain < gain)).all()
        assert loss == pytest.approx(figures.update["loss"], abs=1e-6)
        assert clipped == pytest.approx(figures.update["clip_fraction"], abs=1e-6)
        total = sum(float(np.sum(np.frombuffer(row["weight"], np.float32))) for row in rows)
        assert total == pytest.approx(1.0, abs=1e-5)


async def test_a_recorded_token_is_that_of_its_call(untrained_model: Path, tmp_path: Path) -> None:
    store, _ = await run_grpo(two_turns, untrained_model, tmp_path, max_steps=1)
    calls = {call.ref.call_id: call for call in await calls_of(store, await rollouts_of(store))}
    looked = 0
    for entry in await entries_of_step(store, 1):
        for row in entry.get("rows", ()):
            own = [calls[call["call_id"]] for call in entry["calls"] if call["row"] == row.get("row")]
            numbers = numbers_of(row)
            trained = [token for token, mask in zip(numbers["tokens"], numbers["mask"], strict=True) if mask]
            assert trained == [token for call in own for token in call.completion_token_ids]
            said = np.array([logprob for call in own for logprob in call.logprobs or ()], np.float32)
            assert said.tobytes() == numbers["engine_logprobs"].tobytes()
            texts = await store.get_vocabulary(row.get("vocabulary") or "")
            assert texts is not None
            assert "<user>" in [texts[token] for token in numbers["tokens"]]
            looked += 1
    assert looked > 0


async def test_the_ledger_adds_up_however_agents_end(untrained_model: Path, tmp_path: Path) -> None:
    tasks = [f"{end} {number}" for number, end in enumerate(ENDS)]
    store, result = await run_grpo(many_ends, untrained_model, tmp_path, tasks, batch_size=len(tasks))
    found = await check_ledger(store, "r")
    assert found.wrong == []
    assert found.captured == len(await calls_of(store, await rollouts_of(store)))
    counted: Counter[str] = Counter()
    for figures in result.metrics:
        counted.update(figures.calls_excluded)
    counted.update(result.late_calls)
    assert found.excluded == counted
    assert found.trained == sum(figures.calls_trained for figures in result.metrics)
    entries = await entries_of_step(store, 1)
    assert len(entries) == 4 * len(tasks)
    verdicts = Counter(entry["verdict"] for entry in entries)
    assert (verdicts["infrastructure_fault"], verdicts["no_call"], verdicts["no_reward"]) == (20, 4, 4)


async def test_a_call_that_is_missing_or_counted_twice_is_found(untrained_model: Path, tmp_path: Path) -> None:
    store, _ = await run_grpo(two_turns, untrained_model, tmp_path, max_steps=2, batch_size=1)
    entry = (await entries_of_step(store, 2))[0]
    await store.add_run_records(
        "r", [RunRecord(kind="ledger", step=3, name=entry["rollout_id"], data={"calls": entry["calls"]})]
    )
    found = await check_ledger(store, "r")
    assert (found.adds_up, found.wrong_count) == (False, len(entry["calls"]))
    assert "has 2 endings, in steps 2, 3" in found.wrong[0]
    await store.rewind_run("r", 1)
    found = await check_ledger(store, "r")
    assert found.wrong_count == 2 * 4
    assert "has no recorded ending" in found.wrong[0]


async def test_steps_evaluations_and_settings_are_those_of_the_folder(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await run_grpo(two_turns, untrained_model, tmp_path, val_dataset=["five", "six"], seed=3)
    run = await store.get_run_by_id("r")
    assert run is not None
    assert (run.algorithm, run.state, run.last_step) == ("GRPO", "succeeded", 2)
    assert run.config is not None
    assert (run.config["algorithm"]["seed"], run.config["trainer"]["val_tasks"]) == (3, 2)
    steps = await store.query_run_records("r", kind_in=["step"])
    assert [record.data for record in steps] == metrics_of(result)
    evaluations = await store.query_run_records("r", kind_in=["evaluation"])
    assert [(e.step, e.name, e.data["rewards"]) for e in evaluations] == [
        (step, f"held_out_{e.sampling}", e.rewards) for step, e in zip((0, 0, 2, 2), result.evaluations, strict=True)
    ]
    assert run.best is not None
    sampled = [evaluation.mean_reward or 0.0 for evaluation in result.evaluations if evaluation.sampling == "sampled"]
    assert (run.best.name, run.best.value) == ("held_out_sampled", max(sampled))


async def test_without_held_out_tasks_the_best_figure_is_the_mean_reward(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await run_grpo(two_turns, untrained_model, tmp_path)
    run = await store.get_run_by_id("r")
    assert run is not None
    assert run.best is not None
    assert (run.best.name, run.best.value) == ("mean_reward", max(f.mean_reward or 0.0 for f in result.metrics))


async def test_a_later_start_does_not_put_the_mean_reward_in_the_place_of_the_held_out_figure(
    untrained_model: Path,
) -> None:
    settings = GRPOSettings(model=str(untrained_model))
    updater = Updater([Learner(None, settings, Policy.load(untrained_model))])
    store = agl.InMemoryLightningStore()
    await store.start_run("r")
    first, second = (RunRecorder(RunLog(store, "r"), updater, has_held_out=True) for _ in range(2))
    await first.evaluation(0, Evaluation(0, "sampled", [1.0, 0.0], ["a", "b"], 0.1), ["x", "y"])
    await second.step(StepFigures(1, 2, 0.9, 2, 0, 2, 2, {}, 1.0, {}))
    run = await store.get_run_by_id("r")
    assert run is not None
    assert run.best is not None
    assert (run.best.name, run.best.value) == ("held_out_sampled", 0.5)


@pytest.mark.parametrize(("record_tokens", "share"), [("none", 0), ("sample", 1)])
async def test_tokens_are_recorded_as_the_setting_says(
    untrained_model: Path, tmp_path: Path, record_tokens: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.training.recording.SAMPLED_TOKENS", 40)
    store, _ = await run_grpo(two_turns, untrained_model, tmp_path, max_steps=1, record_tokens=record_tokens)
    entries = await entries_of_step(store, 1)
    lengths = [row.get("length", 0) for entry in entries for row in entry.get("rows", ())]
    assert (len(lengths) > 0) == bool(share)
    assert sum(lengths) <= 40
    assert (await check_ledger(store, "r")).adds_up


async def test_an_alarm_is_recorded_and_no_planted_secret_is(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", SECRET)
    answers = iter([True, False] * 100)

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        agl.emit_annotation({"note": task["password"]})
        if next(answers):
            raise RuntimeError(f"login with {SECRET} failed, token={task['password']}")
        raise agl.PolicyFault(f"no answer for {SECRET}", reward=0.0)

    tasks = [{"password": "planted-in-the-task"}]
    store = agl.InMemoryLightningStore()
    given: dict[str, Any] = {"max_steps": 1, "trainer_run_id": "r", "model": untrained_model, "output_dir": tmp_path}
    with pytest.raises(agl.AgentLightningError):
        await asyncio.to_thread(fit, agent, tasks, store=store, **given)
    run = await store.get_run_by_id("r")
    records = await store.query_run_records("r")
    assert run is not None
    assert (run.state, run.error is not None) == ("failed", True)
    told = run.model_dump_json() + json.dumps([record.model_dump() for record in records])
    assert "planted-in-the-task" not in told
    assert SECRET not in told
    folder = await asyncio.to_thread(texts_of, tmp_path)
    assert SECRET not in folder
    assert "planted-in-the-task" not in folder


def texts_of(folder: Path) -> str:
    """Everything that a run's folder tells of the run, its model left out."""
    files = [path for path in folder.rglob("*.json*") if "model" not in path.parent.name]
    return "".join(path.read_text() for path in files)
