"""Calls to any tracker during a run, the ways to pass one, and the effect on a run of a tracker that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.errors import MissingExtraError
from agentlightning.trackers.tracker import numbers_of, safe_name
from agentlightning.types.runs import RunRecord
from tests.pages import blocks
from tests.trackers.parts import SECRET, Remembers, agent, run

EVERYTHING = [
    ("step", 1, ""), ("step", 2, ""), ("step", 3, ""), ("evaluation", 2, "held_out"), ("alarm", 2, "equal_rewards"),
    ("alarm", 3, "equal_rewards"), ("checkpoint", 3, ""), ("prompt", 1, "v1"),
]  # fmt: skip


def test_trackers_are_told_of_settings_records_and_the_end_of_one_run_after_another() -> None:
    tracker, other = Remembers(), Remembers()
    run(tracker, other)
    [about] = tracker.runs
    assert (about.run_id, about.algorithm, about.resumed) == ("run-1", "Recording", False)
    assert about.config["algorithm"]["rate"] == 0.5
    assert "python" in about.versions
    assert tracker.told == other.told == EVERYTHING
    [ending] = tracker.endings
    assert (ending.state, ending.error, ending.model_path) == ("succeeded", None, "runs/x/model")
    assert ending.best is not None
    assert (ending.best.name, ending.best.value) == ("held_out", 0.75)
    run(tracker, run_id="run-2")
    assert [about.run_id for about in tracker.runs] == ["run-1", "run-2"]
    assert len(tracker.endings) == 2


def test_no_secret_reaches_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    tracker = Remembers()
    with pytest.raises(ValueError, match="the model is gone"):
        run(tracker, fails=True)
    [ending] = tracker.endings
    assert ending.state == "failed"
    assert ending.error is not None
    assert ending.error.startswith("ValueError: the model is gone")
    texts = [json.dumps(tracker.runs[0].config), ending.error, *(r.model_dump_json() for r in tracker.records)]
    assert not any(SECRET in text for text in texts)


def test_a_run_that_goes_on_tells_only_what_is_new(tmp_path: Path) -> None:
    trackers = Remembers(), Remembers()
    store = agl.SQLiteLightningStore(tmp_path / "agl.db")
    run(trackers[0], store=store, steps=2)
    run(trackers[1], store=store, steps=4)
    assert [tracker.runs[0].resumed for tracker in trackers] == [False, True]
    assert trackers[1].told == [("step", 3, ""), ("step", 4, "")]
    assert trackers[1].endings[0].state == "succeeded"


def test_an_algorithm_in_a_process_of_its_own_tells_its_trackers_there(tmp_path: Path) -> None:
    class Writes(Remembers):
        def finish(self, ending: agl.RunEnding) -> None:
            (tmp_path / "told.json").write_text(json.dumps([*self.told, ending.state]))

    from tests.trackers.parts import Recording

    trainer = agl.Trainer(
        algorithm=Recording(), trackers=Writes(), strategy={"type": "cs", "main_process": "runner"}, progress="none"
    )
    trainer.fit(agent)
    assert json.loads((tmp_path / "told.json").read_text()) == [*map(list, EVERYTHING), "succeeded"]


@pytest.mark.parametrize(("how", "state"), [("stop", "stopped"), ("interrupt", "interrupted")])
def test_a_run_that_is_told_to_stop_or_interrupted_says_so(how: str, state: str) -> None:
    class Waits(agl.Algorithm):
        def unused_parts(self) -> frozenset[str]:
            return frozenset(("adapter", "initial_resources"))

        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await self.log_metrics(1, mean_reward=0.5)
            if how == "stop":
                await self.get_store().update_run("run-1", stop_reason="enough")
            else:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)

    tracker = Remembers()
    trainer = agl.Trainer(algorithm=Waits(), trackers=tracker, strategy="shm", progress="none")
    with contextlib.suppress(KeyboardInterrupt, agl.AgentLightningError):
        trainer.fit(agent, run_id="run-1")
    assert tracker.told == [("step", 1, "")]
    assert [ending.state for ending in tracker.endings] == [state]


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = blocks("how-to/track-experiments.md")[-1]
    exec(compile(own, "page", "exec", dont_inherit=True), {"__name__": "page"})
    lines = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    assert lines[-1] == {"state": "succeeded", "best": 1.0, "best_name": "baseline", "best_step": 0}


# --- trackers that misbehave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the disk is full"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["start", "record", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_the_run_and_others_go_on(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Remembers):
        pass

    def fail(self: Any, *_: Any) -> None:
        raise error

    setattr(Fails, where, fail)
    good = Remembers()
    trainer = run(Fails(), good)
    assert trainer.result is not None
    assert good.told == EVERYTHING
    lines = [record.getMessage() for record in caplog.records if "Fails" in record.getMessage()]
    assert len([line for line in lines if f"failed ({where}); training continues" in line]) == 1
    count, dropped = (len(EVERYTHING), 0) if where == "record" else (1, len(EVERYTHING) if where == "start" else 0)
    assert f"Fails: failed calls: {count}, dropped records: {dropped}" in lines[-1]


def test_a_tracker_that_hangs_keeps_nobody_waiting_and_what_it_missed_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.trackers.feed.FINISH_SECONDS", 0.2)
    free = threading.Event()

    class Hangs(Remembers):
        def start(self, run: agl.TrackedRun) -> None:
            free.wait(60)

    tracker = Hangs()
    try:
        assert run(tracker).result is not None
        assert tracker.endings == []
        assert any("Hangs did not finish in time; records lost: 8" in r.getMessage() for r in caplog.records)
    finally:
        free.set()


def test_a_slow_tracker_has_a_bounded_queue(caplog: pytest.LogCaptureFixture) -> None:
    from agentlightning.trackers.feed import Feed

    begun, free = threading.Event(), threading.Event()

    class Slow(Remembers):
        def record(self, record: RunRecord) -> None:
            begun.set()
            free.wait(60)
            super().record(record)

    tracker = Slow()
    feed = Feed(tracker, agl.TrackedRun("r"), most_waiting=2)
    feed.tell(RunRecord(kind="step", step=1))
    assert begun.wait(60)
    for step in range(2, 12):
        feed.tell(RunRecord(kind="step", step=step))
    feed.end(agl.RunEnding("succeeded"))
    free.set()
    assert feed.join(60)
    assert [step for _, step, _ in tracker.told] == [1, 2, 3]
    assert feed.dropped == 8
    assert len(tracker.endings) == 1
    assert sum("is slower than the run" in record.getMessage() for record in caplog.records) == 1


# --- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trackers", "error", "says"),
    [
        (["tensorbord"], ValueError, "did you mean 'tensorboard'"),
        ([Remembers(), 3], ValueError, "class|int|trackers"),
        (3, ValueError, r"int is not a tracker; expected one of 'mlflow'.*start\(run\), record\(record\) and finish"),
        ([object()], ValueError, "object is not a tracker"),
        ([lambda: 3], TypeError, "int is not a tracker"),
    ],
)
def test_what_is_no_tracker_is_refused_when_the_trainer_is_made(trackers: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        agl.Trainer(algorithm=agl.Baseline(), trackers=trackers)


@pytest.mark.parametrize(
    "spec", [Remembers, lambda: Remembers(), {"type": Remembers}, {"type": "tests.trackers.parts.Remembers"}]
)
def test_a_class_a_factory_and_a_dict_are_made_into_trackers_which_need_an_algorithm(spec: Any) -> None:
    [tracker] = agl.Trainer(algorithm=agl.Baseline(), trackers=spec).trackers
    assert isinstance(tracker, agl.Tracker)
    assert type(tracker).__name__ == "Remembers"
    with pytest.raises(ValueError, match="trackers would have no effect"):
        agl.Trainer(trackers=spec).fit(lambda task: 1.0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab"])
def test_a_missing_package_is_one_line_with_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None:
        pytest.skip(f"{name} is installed here")
    (tmp_path / name).mkdir()  # W&B and others make such a folder in the working directory
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match=rf"pip install 'agl-framework\[{name}\]'$") as caught:
        agl.Trainer(algorithm=agl.Baseline(), trackers=[name])
    assert "\n" not in str(caught.value)


# --- what they share -------------------------------------------------------------------------------------------------


def test_numbers_have_a_path_each_and_texts_and_lists_are_none() -> None:
    figures = {"step": 4, "steps": 9, "mean_reward": 0.5, "update": {"loss": 1, "x": None}, "take": "b", "ok": True}
    assert numbers_of(RunRecord(kind="step", step=4, data=figures)) == {"mean_reward": 0.5, "update/loss": 1.0}
    held_out = RunRecord(kind="evaluation", step=4, name="held_out", data={"value": 0.5, "failed": 0, "rewards": [1]})
    assert numbers_of(held_out) == {"evaluation/held_out": 0.5, "evaluation/held_out/failed": 0.0}
    assert numbers_of(RunRecord(kind="alarm", step=4, name="a", data={"state": "over"})) == {"alarm/a": 0.0}
    assert numbers_of(RunRecord(kind="checkpoint", step=4, data={"bytes": 3})) == {}


@given(st.text(max_size=200))
def test_a_safe_name_is_short_and_plain_and_stays_as_it_was_if_it_was_so(run_id: str) -> None:
    name = safe_name(run_id)
    assert 0 < len(name) <= 64
    assert name.replace("-", "a").replace("_", "a").isascii()
    assert safe_name(name) == name
    assert safe_name("a/b") != safe_name("a.b") != safe_name("a-b")
