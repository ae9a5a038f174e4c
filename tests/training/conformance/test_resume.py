"""A run that is started again under its name continues, whatever ended it, and is one run in the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.training.replay import replay
from tests.algorithm.parts import ask, say
from tests.training.conformance.cases import (
    AHEAD,
    CURRICULUM,
    GRPO,
    HELD_OUT,
    OURS,
    POLICIES,
    PPO,
    RUN,
    SFT,
    STEPS,
    TRL,
    Case,
    Digits,
    ManyEnds,
    StoppingStore,
    assert_complete,
    each,
    fit,
    fit_whole,
    read,
    stored,
)
from tests.training.conformance.conftest import Whole

TRAINED = ("step", "mean_reward", "calls_trained")
"""Fields that stay the same where some rollouts were cancelled and run once more."""


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (folder / "run" / "checkpoints").iterdir())


@each(*OURS)
def test_a_run_that_has_ended_is_not_taken_again_and_may_go_on_for_more_steps(
    case: Case, whole: Whole, untrained_model: Path, tmp_path: Path
) -> None:
    first = fit_whole(case, untrained_model, tmp_path, steps=1)
    again = fit_whole(case, untrained_model, tmp_path, steps=1)
    assert (again.steps, [f.weights for f in again.metrics]) == (1, [f.weights for f in first.metrics])
    begun = read(tmp_path)
    assert_complete(begun, 1, starts=2)
    longer = fit_whole(case, untrained_model, tmp_path, steps=3)
    books = read(tmp_path)
    assert_complete(books, 3, starts=3)
    assert [figures.step for figures in longer.metrics] == [1, 2, 3]
    assert books.lines[0] == begun.lines[0]
    assert len(books.rollouts) == 3 * 16
    assert books.run.best.name == "held_out_sampled", "the mean reward of a later start does not take its place"
    if case.is_exact:
        assert books.curve(*TRAINED, "calls_excluded") == whole.books.curve(*TRAINED, "calls_excluded")[:3]


def stop() -> None:
    raise RuntimeError("the disk is full")


@pytest.mark.heavy
@each(*OURS, TRL)
@pytest.mark.parametrize("point", ["before ledger 2", "after ledger 4"])
def test_a_run_that_an_error_ended_goes_on_as_if_nothing_had_been(
    case: Case, whole: Whole, untrained_model: Path, tmp_path: Path, point: str
) -> None:
    store = StoppingStore(tmp_path / "store.db", point, stop)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit_whole(case, untrained_model, tmp_path, agent=ManyEnds(case.roles), trainer_store=store)
    result = fit_whole(case, untrained_model, tmp_path, agent=ManyEnds(case.roles))
    books = read(tmp_path)
    assert_complete(books, STEPS, starts=2)
    assert [figures.step for figures in result.metrics] == [1, 2, 3, 4]
    if case.is_exact:
        assert books.curve() == whole.books.curve()
        assert books.evaluations() == whole.books.evaluations()
        assert len(books.rollouts) == STEPS * 16


class SendsASignal(ManyEnds):
    """Ends the run while its last step runs, once."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        earned, place = super().rollout(task, resources, rollout), rollout.metadata or {}
        is_there = (rollout.mode, place["step"], place["task"], place.get("sample")) == ("train", STEPS, 0, 0)
        if is_there and (number := os.environ.pop("AGL_TEST_SIGNAL", None)):
            os.kill(os.getpid(), int(number))
        return earned


@pytest.mark.heavy
@each(*OURS, TRL)
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_model_and_checkpoint_of_the_last_complete_step(
    case: Case,
    whole: Whole,
    untrained_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    monkeypatch.setenv("AGL_TEST_SIGNAL", str(int(number)))
    agent, patient = SendsASignal(case.roles), {"type": "shm", "graceful_delay": 60.0}  # on a busy machine
    with pytest.raises(raised):
        fit_whole(case, untrained_model, tmp_path, agent=agent, save_steps=0, trainer_strategy=patient)
    stopped = read(tmp_path)
    assert checkpoints(tmp_path) == [len(stopped.lines)]
    assert case.staleness or len(stopped.lines) == STEPS - 1
    assert list((tmp_path / "run" / "model").rglob("model.safetensors"))
    fit_whole(case, untrained_model, tmp_path, agent=agent, save_steps=0)
    books = read(tmp_path)
    assert_complete(books, STEPS, starts=2)
    if case is TRL:  # its schedule goes on where it was
        rates = [[line["update"]["learning_rate"] for line in lines] for lines in (books.lines, whole.books.lines)]
        assert rates[0] == rates[1]
        assert len(set(rates[0])) == STEPS
    if case.is_exact:
        assert books.curve(*TRAINED) == whole.books.curve(*TRAINED)
        more = set(books.lines[-1]["calls_excluded"]) - set(whole.books.lines[-1]["calls_excluded"])
        assert more <= {"cancelled", "unfinished"}, "of the rollouts that the signal ended"


ALL_POINTS = (
    *("rollout 1", "before ledger 1", "after ledger 2", "evaluation 2", "before step 2", "after step 2"),
    *("rename checkpoint-2", "before checkpoint 2", "rollout 3", "write model"),
)
SOME_POINTS = ("before ledger 1", "rename checkpoint-2", "after ledger 3", "rollout 4")


def play(case: Case, model: Path, folder: Path, *point: str) -> int:
    """Run the program and return its exit status."""
    command = [sys.executable, "-m", "tests.training.conformance.program", case.name, str(model), str(folder), *point]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, start_new_session=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.heavy
@pytest.mark.timeout(900)
@each(*OURS, CURRICULUM, TRL)
def test_a_run_that_is_killed_at_many_points_is_the_one_that_was_not(
    case: Case, whole: Whole, untrained_model: Path, tmp_path: Path
) -> None:
    points = ALL_POINTS if case is GRPO else SOME_POINTS
    killed = 0
    while killed < len(points) and play(case, untrained_model, tmp_path, points[killed]) == -signal.SIGKILL:
        killed += 1
    if killed == len(points):
        assert play(case, untrained_model, tmp_path) == 0
    else:  # a run that is ahead may have run the last rollouts in an earlier start
        assert (case.staleness > 0, points[killed]) == (True, "rollout 4")
    books = read(tmp_path)
    assert_complete(books, STEPS, starts=killed + 1)
    groups = [tuple(key) for line in books.lines for key in line["flight"].get("taken", ())]
    assert len(set(groups)) == len(groups), "no group is trained twice"
    assert [bool(line["curriculum"]) for line in books.lines] == [case is CURRICULUM] * STEPS
    if case.replays:
        assert stored(tmp_path, lambda store: replay(store, RUN, STEPS)).differences == []
    if case.is_exact:
        fields = (*TRAINED, "held_out", "curriculum")
        assert books.curve(*fields) == whole.books.curve(*fields)
        assert books.evaluations() == whole.books.evaluations()
        assert tensors_in(tmp_path) == tensors_in(whole.folder)


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor of the last checkpoint, the optimizer's among them, by file and name."""
    checkpoint = folder / "run" / "checkpoints" / f"checkpoint-{STEPS}"
    return {
        f"{path.relative_to(checkpoint)}/{name}": tensor.numpy().tobytes()
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.heavy
def test_a_killed_runner_does_not_stop_the_run_and_its_rollout_counts_once(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAST_WORDS", str(tmp_path / "dead"))
    assert play(GRPO, untrained_model, tmp_path, "runner 2") == 0
    rollout, dead = (tmp_path / "dead").read_text().split()
    books = read(tmp_path)
    assert_complete(books, STEPS)
    assert [(line["rollouts_done"], line["rollouts_failed"]) for line in books.lines] == [(12, 4)] * STEPS
    assert books.lines[1]["calls_excluded"]["superseded_attempt"] >= 1
    first, *_, last = stored(tmp_path, lambda store: store.query_attempts(rollout))
    state = (first.attempt_id, first.status, first.outcome, first.outcome_reason)
    assert state == (dead, "failed", "infrastructure_fault", "runner_died")
    assert (last.status, last.outcome) == ("succeeded", "scored")
    spans = stored(tmp_path, lambda store: store.query_spans(rollout))
    assert [span.attempt_id for span in spans if agl.get_reward_value(span) is not None] == [last.attempt_id]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "num_iterations": 2, "minibatch_rollouts": 3},
        {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "beta": 0.1},
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "minibatch_rollouts": 3},
        {
            **{"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "beta": 0.1},
            **{"sync_ref_model": True, "ref_model_sync_steps": 2},
        },
        {"lr_scheduler_type": "linear", "eval_steps": 1},
        {"optim": "muon", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 0.3},
        {"optim": "adafactor", "minibatch_rollouts": 3},
    ],
)
def test_reference_adapter_optimizer_schedule_and_evaluations_go_on_as_they_were(
    untrained_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    fit_whole(GRPO, untrained_model, whole, **settings)
    store = StoppingStore(stopped / "store.db", "before ledger 4", stop)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit_whole(GRPO, untrained_model, stopped, trainer_store=store, **settings)
    fit_whole(GRPO, untrained_model, stopped, **settings)
    assert read(stopped).curve() == read(whole).curve()
    assert read(stopped).evaluations() == read(whole).evaluations()


@pytest.mark.heavy
@each(*OURS, CURRICULUM)
def test_what_may_not_change_is_refused_with_both_values(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(untrained_model, model)
    begun: dict[str, Any] = {"max_steps": 1, "lr_scheduler_type": "linear"}
    fit(case, Digits(case.roles), model, tmp_path, **begun)

    def refusal(**changed: Any) -> str:
        with pytest.raises(agl.BadRequestError) as refused:
            fit(case, Digits(case.roles), model, tmp_path, **{**begun, **changed})
        return str(refused.value)

    assert "learning_rate was 0.001 and is 0.5; seed was 0 and is 7" in refusal(learning_rate=0.5, seed=7)
    assert "max_steps was 1 and is 9" in refusal(max_steps=9)
    count = 9 if case is CURRICULUM else 4
    assert f"train_dataset of run '{RUN}' has changed: it had {count} items" in refusal(tasks=["other"] * 5)
    assert f"val_dataset of run '{RUN}' has changed: it had 0 items" in refusal(held_out=HELD_OUT)
    assert "does not have them. Pass their folder as output_dir=" in refusal(output_dir=tmp_path / "elsewhere")
    if case is AHEAD:
        assert "max_staleness was 1 and is 2" in refusal(max_staleness=2)
    if case is CURRICULUM:
        assert "solved_above was None and is 0.5" in refusal(solved_above=0.5)
    if case is POLICIES:
        assert "policies was" in refusal(policies=["planner"])
    with (model / "config.json").open("a") as file:
        file.write(" ")
    assert f"differ from those that run '{RUN}' began with" in refusal()


@pytest.mark.slow
@each(GRPO, PPO, SFT)
def test_the_resources_beside_the_policy_go_on_with_the_run(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    served = list[tuple[str, str, str]]()

    @agl.rollout
    def agent(task: str, main_llm: agl.LLM, judge: agl.LLM, prompt: agl.PromptTemplate) -> float:
        ask(main_llm, [say(prompt.format(task=task))])
        served.append((judge.endpoint, judge.model, prompt.template))
        return float(len(served) % 2)

    def start(steps: int, text: str = "Say {task}.", port: int = 1, key: str = "k-1", judge: str = "judge") -> None:
        beside: dict[str, Any] = {
            "prompt": agl.PromptTemplate(template=text, engine="f-string"),
            "judge": agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model=judge, api_key=key),
        }
        settings: dict[str, Any] = {"max_steps": steps, "trainer_initial_resources": beside}
        fit(case, agent, untrained_model, tmp_path, tasks=["a"], **settings)

    start(1)
    for changed, name in ({"text": "Shout {task}."}, "prompt"), ({"judge": "other"}, "judge"):
        with pytest.raises(agl.BadRequestError, match=f"initial_resources of run '{RUN}' have changed: '{name}' had"):
            start(2, **changed)
    assert set(served) == {("http://127.0.0.1:1/v1", "judge", "Say {task}.")}
    served.clear()
    start(2, port=2, key="k-2")  # the judge is another server now
    assert set(served) == {("http://127.0.0.1:2/v1", "judge", "Say {task}.")}


@pytest.mark.heavy
@each(GRPO, AHEAD)
def test_a_run_whose_weights_come_out_otherwise_takes_the_later_steps_anew(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    """The record of the second step is changed and the newest checkpoints are broken, to get the effect of a GPU."""
    agent, settings = ManyEnds(case.roles), {"save_steps": 1, "save_total_limit": None}
    fit_whole(case, untrained_model, tmp_path, agent=agent, **settings)
    for step in (2, 3, 4):
        (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").unlink()

    async def change(store: Any) -> None:
        records = list(await store.query_run_records(RUN, step_from=2))
        await store.rewind_run(RUN, 1)
        for record in records:
            if (record.kind, record.step) == ("step", 2):
                record.data["weights"] = "of another machine"
        await store.add_run_records(RUN, records)

    stored(tmp_path, change)
    fit_whole(case, untrained_model, tmp_path, agent=agent, **settings)
    books = read(tmp_path)
    assert [line["step"] for line in books.lines] == [1, 2, 3, 4]
    entries = [(call["rollout"], call["attempt_id"], call["call_id"]) for call in books.endings()]
    assert sorted(entries) == sorted(call.ref for call in books.calls)
    undone = sum(call["reason"] == "step_undone" for call in books.endings())
    assert undone >= 16 if case.staleness else undone == 2 * 16
    assert checkpoints(tmp_path) == [1, 2, 3, 4]


@pytest.mark.heavy
def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = os.rename

    def full(source: Any, place: Any) -> None:
        if str(place).endswith("checkpoint-2"):
            raise OSError(28, "No space left on device")
        rename(source, place)

    monkeypatch.setattr(os, "rename", full)
    fit_whole(GRPO, untrained_model, tmp_path, save_steps=1, steps=3)
    assert "the last good one is of step 1" in caplog.text
    books = read(tmp_path)
    assert_complete(books, 3)
    assert checkpoints(tmp_path) == [record.step for record in books.of("checkpoint")] == [1, 3]
    assert Path(books.of("checkpoint")[-1].data["path"]) == tmp_path / "run" / "checkpoints" / "checkpoint-3"
    assert any("No space left on device" in record.data["text"] for record in books.of("alarm"))
