"""A run that is started again under its name goes on where it was, and whoever looks at it sees one run."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.checkpoint import CheckpointFolder, read_checkpoint
from agentlightning.training.collector import Collector
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import SMALL, ask, calls_of, metrics_of, rollouts_of, say, two_turns

TASKS = ["one", "two", "three", "four"]
_CURVE = ("step", "mean_reward", "calls_captured", "calls_trained", "calls_excluded", "update", "weights")


@pytest.fixture(scope="module")
def whole(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The curve of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return curve(run(untrained_model, folder, agl.SQLiteLightningStore(folder / "store.db")))


def run(model: Path, folder: Path, store: Any, agent: Any = two_turns, **settings: Any) -> Any:
    """Run under one name; settings of the Trainer begin with `trainer_`."""
    grpo = {"max_steps": 5, "save_steps": 2, "deterministic": True, "output_dir": folder / "run", **settings}
    tasks, val = grpo.pop("tasks", TASKS), grpo.pop("val", None)
    given = {name.removeprefix("trainer_"): grpo.pop(name) for name in list(grpo) if name.startswith("trainer_")}
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**{**SMALL, "model": model, **grpo}),
        **{
            "runner": {"type": "agentlightning.LitAgentRunner", "concurrency": 4},
            "strategy": "shm",
            "store": store,
            **given,
        },
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=val, run_id="named")
    return trainer.result


def curve(result: Any) -> list[dict[str, Any]]:
    return [{name: line[name] for name in _CURVE} for line in metrics_of(result)]


def interrupt_in(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let the run end in a step, before its update."""
    collect = Collector.collect

    async def sampled(self: Collector, number: int, *rest: Any) -> Any:
        found = await collect(self, number, *rest)
        if number == step:
            raise error
        return found

    monkeypatch.setattr(Collector, "collect", sampled)


@pytest.mark.heavy
@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_interrupted_run_has_the_curve_of_one_that_nothing_interrupts(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[dict[str, Any]], step: int
) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    with monkeypatch.context() as patch:
        interrupt_in(patch, step, RuntimeError("here"))
        with pytest.raises(RuntimeError, match="here"):
            run(untrained_model, tmp_path, store)
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps()[-1:] == ([step - 1] if step > 1 else [])

    result = run(untrained_model, tmp_path, store)
    assert curve(result) == whole
    assert [figures.step for figures in result.metrics] == [1, 2, 3, 4, 5]
    assert checkpoints.steps() == [4, 5]
    rollouts = asyncio.run(rollouts_of(store))
    assert len(rollouts) == 5 * 8
    assert result.steps == 5


@pytest.mark.heavy
@pytest.mark.parametrize("runners", [1, 3])
def test_runs_are_equal_whatever_the_number_of_runners(
    untrained_model: Path, tmp_path: Path, whole: list[dict[str, Any]], runners: int
) -> None:
    strategy = {"type": "cs", "server_port": 0}
    runner = {"type": "agentlightning.LitAgentRunner", "concurrency": runners}
    settings = {"trainer_n_runners": runners, "trainer_strategy": strategy, "trainer_runner": runner}
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    assert curve(run(untrained_model, tmp_path, store, **settings)) == whole


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "num_iterations": 2, "minibatch_rollouts": 3},
        {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "beta": 0.1},
        {"lr_scheduler_type": "linear", "val": ["five"], "eval_steps": 1},
    ],
)
def test_reference_adapter_schedule_and_evaluations_go_on_as_they_were(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    settings = {"max_steps": 4, **settings}
    first = run(untrained_model, tmp_path / "whole", agl.InMemoryLightningStore(), **settings)
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    with monkeypatch.context() as patch:
        interrupt_in(patch, 4, RuntimeError("here"))
        with pytest.raises(RuntimeError, match="here"):
            run(untrained_model, tmp_path, store, **settings)
    again = run(untrained_model, tmp_path, store, **settings)
    assert curve(again) == curve(first)
    assert [e.rewards for e in again.evaluations] == [e.rewards for e in first.evaluations]


def test_a_run_that_has_ended_is_not_taken_again_and_may_go_on_for_more_steps(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    first = run(untrained_model, tmp_path, store, max_steps=1)
    again = run(untrained_model, tmp_path, store, max_steps=1)
    assert (again.steps, [f.weights for f in again.metrics]) == (1, [f.weights for f in first.metrics])
    longer = run(untrained_model, tmp_path, store, max_steps=2)
    assert [line["step"] for line in metrics_of(longer)] == [1, 2]
    assert metrics_of(longer)[0] == metrics_of(first)[0]
    assert len(asyncio.run(rollouts_of(store))) == 2 * 8


@pytest.mark.heavy
def test_what_may_not_change_is_refused_with_both_values(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    model = tmp_path / "model"
    shutil.copytree(untrained_model, model)
    run(model, tmp_path, store, max_steps=1, lr_scheduler_type="linear")

    def told(**changed: Any) -> str:
        settings = {"max_steps": 1, "lr_scheduler_type": "linear", "model": model, **changed}
        with pytest.raises(agl.BadRequestError) as refused:
            run(settings.pop("model"), tmp_path, store, **settings)
        return str(refused.value)

    assert "learning_rate was 0.001 and is 0.5; seed was 0 and is 7" in told(learning_rate=0.5, seed=7)
    assert "max_steps was 1 and is 9" in told(max_steps=9)
    assert "train_dataset of run 'named' was another one: it had 4 items" in told(tasks=["one"])
    assert "val_dataset of run 'named' was another one: it had 0 items" in told(val=["five"])
    assert "does not hold them. Say where they are with output_dir=" in told(output_dir=tmp_path / "elsewhere")
    with (model / "config.json").open("a") as file:
        file.write(" ")
    assert "are not those with which run 'named' began" in told()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [agl.GRPO, agl.PPO, agl.SFT])
def test_the_resources_beside_the_policy_go_on_with_the_run(
    untrained_model: Path, tmp_path: Path, algorithm: Any
) -> None:
    seen = list[tuple[str, str, str]]()

    @agl.rollout
    def agent(task: str, main_llm: agl.LLM, judge: agl.LLM, prompt: agl.PromptTemplate) -> float:
        ask(main_llm, [say(prompt.format(task=task))])
        seen.append((judge.endpoint, judge.model, prompt.template))
        return float(len(seen) % 2)

    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    known = {name: value for name, value in SMALL.items() if name in inspect.signature(algorithm).parameters}
    chosen = {**known, **({"min_reward": 0.0} if algorithm is agl.SFT else {}), "output_dir": tmp_path / "run"}

    def start(steps: int, text: str = "Say {task}.", port: int = 1, key: str = "k-1", judge: str = "judge") -> None:
        beside: dict[str, Any] = {
            "prompt": agl.PromptTemplate(template=text, engine="f-string"),
            "judge": agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model=judge, api_key=key),
        }
        made = algorithm(model=untrained_model, **{**chosen, "max_steps": steps})
        trainer = agl.Trainer(algorithm=made, strategy="shm", store=store, initial_resources=beside)
        trainer.fit(agent, train_dataset=["a"], run_id="beside")

    start(1)
    for changed, name in ({"text": "Shout {task}."}, "prompt"), ({"judge": "other"}, "judge"):
        with pytest.raises(agl.BadRequestError, match=f"initial_resources of run 'beside' were others: '{name}' had"):
            start(2, **changed)
    assert set(seen) == {("http://127.0.0.1:1/v1", "judge", "Say {task}.")}
    seen.clear()
    start(2, port=2, key="k-2")  # the judge is another server now
    assert set(seen) == {("http://127.0.0.1:2/v1", "judge", "Say {task}.")}


@pytest.mark.heavy
def test_a_run_whose_weights_come_out_otherwise_takes_the_later_steps_anew(
    untrained_model: Path, tmp_path: Path
) -> None:
    """As on a GPU: here the record of the second step is changed, and the newest checkpoints are broken."""
    folder = tmp_path / "run"
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    run(untrained_model, tmp_path, store, max_steps=4, save_steps=1, save_total_limit=None)
    for step in (2, 3, 4):
        (folder / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").unlink()

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
    result = run(untrained_model, tmp_path, store, max_steps=4, save_steps=1, save_total_limit=None)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4]

    async def account() -> None:
        opened = agl.SQLiteLightningStore(tmp_path / "store.db")
        rollouts = await rollouts_of(opened)
        assert len(rollouts) == 4 * 8 + 2 * 8
        calls = {call.ref for call in await calls_of(opened, rollouts)}
        entered: list[tuple[str, str, str]] = []
        undone = 0
        for record in await opened.query_run_records("named", kind_in=["ledger"]):
            entered += [(record.name, call["attempt_id"], call["call_id"]) for call in record.data["calls"]]
            undone += sum(call["reason"] == "step_undone" for call in record.data["calls"])
        assert sorted(entered) == sorted(calls)
        assert undone == 2 * 8 * 2
        await opened.close()

    asyncio.run(account())
    assert read_checkpoint(folder / "checkpoints" / "checkpoint-4").step == 4


@pytest.mark.heavy
def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = CheckpointFolder.write

    def full(self: CheckpointFolder, step: int, *rest: Any) -> Any:
        if step == 2:
            raise OSError(28, "No space left on device")
        return write(self, step, *rest)

    monkeypatch.setattr(CheckpointFolder, "write", full)
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    result = run(untrained_model, tmp_path, store, max_steps=3, save_steps=1)
    assert result.steps == 3
    assert "the last good one is of step 1" in caplog.text
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").steps() == [1, 3]

    async def alarms() -> list[str]:
        opened = agl.SQLiteLightningStore(tmp_path / "store.db")
        found = await opened.query_run_records("named", kind_in=["alarm"])
        points = await opened.query_run_records("named", kind_in=["checkpoint"])
        await opened.close()
        assert [point.step for point in points] == [1, 3]
        assert Path(points[-1].data["path"]) == tmp_path / "run" / "checkpoints" / "checkpoint-3"
        return [alarm.data["text"] for alarm in found]

    assert any("No space left on device" in text for text in asyncio.run(alarms()))


@agl.rollout
def sends_a_signal_once(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """Ends the run while its third step is played."""
    reward = two_turns(task, llm)
    if (rollout.metadata or {})["step"] == 3 and (number := os.environ.pop("AGL_TEST_SIGNAL", None)):
        os.kill(os.getpid(), int(number))
    return reward


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_a_checkpoint_of_the_last_complete_step(
    untrained_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: list[dict[str, Any]],
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    monkeypatch.setenv("AGL_TEST_SIGNAL", str(int(number)))
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    with pytest.raises(raised):
        run(untrained_model, tmp_path, store, agent=sends_a_signal_once, save_steps=0)
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").steps() == [2]
    lines = curve(run(untrained_model, tmp_path, store, agent=sends_a_signal_once, save_steps=0))
    assert set(lines[2]["calls_excluded"]) <= {"cancelled", "unfinished"}  # of the rollouts that the signal ended
    for line, other in zip(lines, whole, strict=True):
        assert {**line, "calls_captured": 0, "calls_excluded": 0} == {**other, "calls_captured": 0, "calls_excluded": 0}
