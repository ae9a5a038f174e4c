"""The numbers that a run records of its loss, the findings of a ledger check, and texts that are not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.training.ledger_records import check_ledger, numbers_of
from agentlightning.types.runs import RunRecord
from tests.algorithm.parts import two_turns
from tests.training.conformance.cases import GRPO, RUN, fit, read, stored

SECRET = "correct-horse-battery"


def test_the_loss_of_a_step_can_be_computed_from_its_records(untrained_model: Path, tmp_path: Path) -> None:
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=2)
    books = read(tmp_path)
    for line in books.lines:
        ledger, update = [record for record in books.of("ledger") if record.step == line["step"]], line["update"]
        rows = [numbers_of(row) for record in ledger for row in record.data.get("rows", ())]
        assert len(rows) == update["rows"] < line["calls_trained"], "turns that continue each other are one row"
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
        assert loss == pytest.approx(update["loss"], abs=1e-6)
        assert clipped == pytest.approx(update["clip_fraction"], abs=1e-6)
        total = sum(float(np.sum(np.frombuffer(row["weight"], np.float32))) for row in rows)
        assert total == pytest.approx(1.0, abs=1e-5)


def test_a_call_that_is_missing_or_counted_twice_is_found(untrained_model: Path, tmp_path: Path) -> None:
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=2, batch_size=1)
    entry = next(record for record in read(tmp_path).of("ledger") if record.step == 2)
    calls = entry.data["calls"]
    again = RunRecord(kind="ledger", step=3, name=entry.name, data={"calls": calls})
    stored(tmp_path, lambda store: store.add_run_records(RUN, [again]))
    check = stored(tmp_path, lambda store: check_ledger(store, RUN))
    assert (check.adds_up, check.wrong_count) == (False, len(calls))
    assert "has 2 outcomes, in steps 2, 3" in check.wrong[0]
    stored(tmp_path, lambda store: store.rewind_run(RUN, 1))
    check = stored(tmp_path, lambda store: check_ledger(store, RUN))
    assert check.wrong_count == 2 * 4
    assert "has no recorded outcome" in check.wrong[0]


@pytest.mark.parametrize(("record_tokens", "share"), [("none", 0), ("sample", 1)])
def test_tokens_are_recorded_as_the_setting_says(
    untrained_model: Path, tmp_path: Path, record_tokens: str, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.training.recording.SAMPLED_TOKENS", 40)
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=1, record_tokens=record_tokens)
    ledger = read(tmp_path).of("ledger")
    lengths = [row.get("length", 0) for record in ledger for row in record.data.get("rows", ())]
    assert (len(lengths) > 0) == bool(share)
    assert sum(lengths) <= 40


def test_no_planted_secret_is_in_the_records_or_the_folder_of_a_run_that_failed(
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

    tasks: list[Any] = [{"password": "planted-in-the-task"}]
    with pytest.raises(agl.AgentLightningError):
        fit(GRPO, agent, untrained_model, tmp_path, tasks=tasks, max_steps=1)
    books = read(tmp_path)
    assert (books.run.state, books.run.error is not None) == ("failed", True)
    files = [path for path in (tmp_path / "run").rglob("*.json*") if "model" not in path.parent.name]
    for text in (books.run.model_dump_json(), *map(str, books.records), *(path.read_text() for path in files)):
        assert "planted-in-the-task" not in text
        assert SECRET not in text
