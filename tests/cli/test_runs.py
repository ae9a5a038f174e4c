"""`agl runs`: the training runs of a store, as tables for people and as JSON; no secret is in them."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.store import SQLiteLightningStore
from agentlightning.types import AttemptError
from agentlightning.types.runs import BestFigure, RunRecord
from tests.cli.terminal import on_terminal

SECRET = "correct-horse-battery"
VOCABULARY = ["<user>", "two", "3", "\\xe2"]


def packed(values: list[float], dtype: str) -> Any:
    """Numbers as records hold them."""
    from agentlightning.training.ledger_records import pack

    return pack(values, dtype)  # type: ignore[arg-type]


def ledger_entry(step: int) -> RunRecord:
    """One rollout of which one call is trained and one excluded."""
    common = {"attempt_id": "at-1", "constrained_by": [], "weight_version": step - 1}
    trained = {"call_id": "c1", "ending": "trained", "reason": None, "row": 0, "tokens": 2, "advantage": 0.5}
    left_out = {"call_id": "c2", "ending": "excluded", "reason": "helper", "row": None, "tokens": 0, "advantage": None}
    figures = ("engine_logprobs", "trainer_logprobs", "entropy", "ratio", "weight", "advantage")
    row = {"row": 0, "vocabulary": "v1", "length": 3, "tokens": packed([0, 1, 3], "i32")}
    row |= {"mask": packed([0, 1, 1], "u8"), "clipped": packed([0, 1], "u8")}
    row |= {name: packed([0.25, 0.75], "f32") for name in figures}
    calls = [{**trained, **common}, {**left_out, **common}]
    data = {"rollout_id": f"ro-{step}", "attempt_id": "at-1", "reward": 1.0, "calls": calls, "rows": [row]}
    return RunRecord(kind="ledger", step=step, name=f"ro-{step}", data=data)


@pytest.fixture
async def place(tmp_path: Path) -> str:
    """A store file with a run that succeeded, one that failed, and one that died."""
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    for name, rate, gain in (("run-first", 0.1, 0.0), ("run-second", 0.2, 1.0)):
        await store.start_run(name, algorithm="Mine", config={"algorithm": {"rate": rate, "api_key": SECRET, "n": 1}})
        for step in range(1, 4):
            figures = {"mean_reward": step / 10 + gain, "update": {"loss": 1 / step}, "note": f"token={SECRET}"}
            await store.add_run_records(name, [RunRecord(kind="step", step=step, data=figures)])
        rewards = [gain] * 8
        data = {"rewards": rewards, "tasks": tasks_of(range(8)), "value": gain}
        await store.add_run_records(name, [RunRecord(kind="evaluation", step=3, name="held_out", data=data)])
        await store.update_run(name, best=BestFigure(name="held_out", value=gain, step=3))
    await store.add_run_records("run-first", [ledger_entry(step) for step in (1, 2, 3)])
    await store.add_run_records("run-first", [RunRecord(kind="alarm", step=2, name="drift", data={"text": "too many"})])
    await store.add_vocabulary("v1", VOCABULARY)
    await store.update_run("run-first", state="succeeded")
    error = AttemptError(type="ValueError", message="no such planet", traceback="")
    await store.update_run("run-second", state="failed", error=error)
    await store.start_run("lost")
    await store.close()
    return str(tmp_path / "agl.db")


@pytest.fixture
def agl(agl: Any) -> Any:
    return partial(agl, "runs")


async def test_runs_are_listed_the_newest_first(agl: Any) -> None:
    code, out, _ = await agl("list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["lost", "run-second", "run-first", "3"]
    assert "failed" in lines[2]
    assert "1 held_out (step 3)" in lines[2]
    assert (await agl("list", "--state", "failed"))[1].splitlines()[-1] == "1 run"
    out = (await agl("list", "--limit", "2"))[1]
    assert "2 of 3 runs; use --offset 2 for the next page" in out
    listed_runs = json.loads((await agl("list", "--contains", "first", "--json"))[1])
    assert [run["run_id"] for run in listed_runs] == ["run-first"]


async def test_a_run_whose_algorithm_is_silent_is_told_apart(agl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "running, no" not in (await agl("list"))[1]
    monkeypatch.setattr("agentlightning.cli.run_texts.SILENT_SECONDS", -1.0)
    assert "running, no heartbeat for" in (await agl("list"))[1]


async def test_a_run_is_shown_with_settings_steps_evaluations_and_alarms(agl: Any) -> None:
    code, out, _ = await agl("show", "run-first")
    assert code == 0
    assert out.startswith("run run-first: Mine, succeeded, started 1 time\n")
    assert "algorithm.rate" in out
    assert "mean_reward" in out
    assert "update.loss" in out
    assert "evaluation held_out after step 3: 0 (95 % interval 0.000 to 0.324 (Wilson), 8 of 8 tasks)" in out
    assert "alarm drift after step 2: too many" in out
    assert "failed with ValueError: no such planet" in (await agl("show", "run-second"))[1]
    only = (await agl("show", "run-first", "--figure", "update.loss", "--limit", "1"))[1]
    assert "0.333333" in only
    assert "1 of 3 steps" in only


async def test_an_unknown_run_is_told_with_the_nearest_name(agl: Any) -> None:
    code, _, err = await agl("show", "run-frist")
    assert code == 2
    assert "Run 'run-frist' not found" in err
    assert "did you mean 'run-first'?" in err
    assert "agl runs list --store" in (await agl("show", "-"))[2]


async def test_a_store_in_memory_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["runs", "list", "--store", "memory"]) == 2
    assert "is available only in its own process" in capsys.readouterr().err


async def test_the_ledger_shows_each_call_and_each_token_of_a_row(agl: Any) -> None:
    code, out, _ = await agl("ledger", "run-first")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["3", "ro-3", "c1", "trained", "0", "2", "0.5", "2"], ["3", "ro-3", "c2", "helper", "-", "-", "-", "2"],
    ]  # fmt: skip
    assert "ro-1" in (await agl("ledger", "run-first", "--rollout", "ro-1"))[1]
    _, out, _ = await agl("ledger", "run-first", "--step", "1", "--row", "0")
    assert out.startswith("row 0 of step 1: rollout ro-1, reward 1")
    assert [line.split()[:4] for line in out.splitlines()[2:5]] == [
        ["0", "0", "'<user>'", "-"], ["1", "1", "'two'", "c1"], ["2", "3", "'\\\\xe2'", "c1"],
    ]  # fmt: skip
    tokens = json.loads((await agl("ledger", "run-first", "--step", "1", "--row", "0", "--json"))[1])["tokens"]
    assert (tokens[2]["ratio"], tokens[2]["clipped"], tokens[2]["call_id"]) == (0.75, 1, "c1")
    code, _, err = await agl("ledger", "run-first", "--step", "1", "--row", "7")
    assert (code, "has no recorded tokens for row 7; rows with tokens: 0" in err) == (2, True)


async def test_a_check_says_what_does_not_add_up(agl: Any, place: str) -> None:
    code, out, _ = await agl("ledger", "run-first", "--check")
    assert (code, out.splitlines()[-1]) == (0, "the ledger adds up")
    store = SQLiteLightningStore(place, synchronous="NORMAL")
    rollout = await store.start_rollout("x", run_id="run-first")
    entry = ledger_entry(1)
    twice = [
        RunRecord(kind="ledger", step=step, name=rollout.rollout_id, data={**entry.data, "rows": []}) for step in (4, 5)
    ]
    await store.add_run_records("run-first", twice)
    await store.close()
    code, out, _ = await agl("ledger", "run-first", "--check")
    assert code == 1
    assert "call c1 (rollout" in out
    assert "has 2 outcomes, in steps 4, 5" in out
    report = json.loads((await agl("ledger", "run-first", "--check", "--json"))[1])
    assert (report["adds_up"], report["wrong_count"]) == (False, 2)


async def test_two_runs_are_compared(agl: Any) -> None:
    code, out, _ = await agl("compare", "run-first", "run-second")
    assert code == 0
    assert "algorithm.rate" in out
    assert "algorithm.n" not in out
    assert "step: mean_reward" in out
    assert "better: 8 tasks gained, 0 lost of 8 pairs" in out
    as_json = (await agl("compare", "run-first", "run-second", "--json"))[1]
    assert SECRET not in out + as_json
    report = json.loads(as_json)
    assert report["settings"]["algorithm.rate"] == [0.1, 0.2]
    assert report["figures"]["mean_reward"][0] == [1, 0.1, 1.1]
    assert report["evaluations"][0]["p_value"] < 0.05
    code, _, err = await agl("compare", "run-first", "run-second", "--figure", "mean_rewrd")
    assert (code, "did you mean 'mean_reward'?" in err) == (2, True)


async def test_a_run_is_exported_with_its_vocabulary_and_read_back(agl: Any, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    code, output, _ = await agl("export", "run-first", "--out", str(out))
    assert code == 0
    assert "3 ledger" in output
    assert sorted(path.name for path in out.iterdir()) == [
        "alarm.jsonl", "evaluation.jsonl", "ledger.jsonl", "run.json", "step.jsonl", "vocabulary-v1.json",
    ]  # fmt: skip
    entries = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert [entry["data"]["rows"] for entry in entries] == [ledger_entry(1).data["rows"]] * 3
    assert json.loads((out / "vocabulary-v1.json").read_text()) == VOCABULARY
    code, _, err = await agl("export", "run-first", "--out", str(out))
    assert (code, "is not empty" in err) == (2, True)


async def test_tables_fit_a_narrow_terminal(agl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for command in (("list",), ("show", "run-first"), ("compare", "run-first", "run-second"), ("ledger", "run-first")):
        code, out, _ = await agl(*command)
        assert code == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
        table = [line for line in lines if line.startswith(("run ", "step ", "setting ", "lost "))]
        assert all(len(line.rstrip()) <= 60 for line in table if not line.startswith("run run-")), command


async def test_results_come_before_settings_on_a_terminal(place: str) -> None:
    code, lines = await asyncio.to_thread(on_terminal, "runs", "show", "run-first", "--store", place)
    assert code == 0
    begins = ("step", "evaluation held_out", "alarm drift", "setting")
    assert [next(i for i, line in enumerate(lines[3:]) if line.startswith(text)) for text in begins] == [0, 5, 6, 7]
