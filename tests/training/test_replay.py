"""A step that is computed again from its records has the recorded result, and a later change is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.errors import GoneError
from agentlightning.training.model_export import trained_in
from agentlightning.training.replay import replay
from tests.algorithm.parts import ask, metrics_of, say, two_turns
from tests.training.conformance.cases import GRPO, fit, stored


def ask_again(folder: Path, step: int) -> Any:
    return stored(folder, lambda store: replay(store, "named", step))


@pytest.fixture(scope="module")
def recorded(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of five steps, with the checkpoints of steps 4 and 5."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = {"num_iterations": 2, "minibatch_rollouts": 3, "lr_scheduler_type": "linear", "deterministic": False}
    fit(GRPO, two_turns, untrained_model, folder, max_steps=5, **settings)
    return folder


def test_steps_from_a_checkpoint_and_from_the_beginning_are_the_same_bit_for_bit(recorded: Path) -> None:
    last, third = ask_again(recorded, 5), ask_again(recorded, 3)
    assert (last.differences, last.updates) == ([], 1)
    assert last.source.endswith("checkpoint-4")
    assert (third.differences, third.updates) == ([], 3)
    assert third.tokens > 0


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_another_optimizer_a_schedule_and_a_moving_reference_are_replayed_from_checkpoints(
    untrained_model: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    settings: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "minibatch_rollouts": 3}
    settings |= {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 1, "lora": lora}
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=5, **settings)
    last, third = ask_again(tmp_path, 5), ask_again(tmp_path, 3)
    assert (last.differences, last.updates, last.source.rpartition("/")[2]) == ([], 1, "checkpoint-4")
    assert (third.differences, third.updates) == ([], 3)


def test_a_step_or_a_run_that_is_not_there_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "named", "--step", "9", "--store", str(recorded / "store.db")]) == 2
    assert "has steps up to 5" in capsys.readouterr().err
    assert main(["replay", "nobody", "--step", "1", "--store", str(recorded / "store.db")]) == 2


def test_a_run_whose_folder_was_moved_is_found_where_it_is(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, moved = ["--store", str(recorded / "store.db")], tmp_path / "elsewhere"
    (recorded / "run").rename(moved)
    try:
        assert main(["replay", "named", "--step", "5", "--folder", str(moved), *store]) == 0
        output = capsys.readouterr().out
        assert f"from {moved}/checkpoints/checkpoint-4: 1 update repeated" in output
        assert "bit-identical" in output
        assert main(["replay", "named", "--step", "5", *store]) != 0
        output = capsys.readouterr().err
        assert f"'{recorded / 'run'}' is not the folder of run" in output
        assert "--folder" in output
        assert main(["serve", "named", *store]) == 2
        output = capsys.readouterr().err
        assert f"'{recorded / 'run'}/checkpoints/checkpoint-5', which does not exist" in output
        assert trained_in(moved).path == moved / "checkpoints" / "checkpoint-5"
    finally:
        moved.rename(recorded / "run")


def test_a_changed_record_is_found(untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=2, save_steps=1)

    async def change(store: Any) -> None:
        records = list(await store.query_run_records("named", step_from=2))
        await store.rewind_run("named", 1)
        for record in records:
            for call in record.data.get("calls", ()):
                call["advantage"] *= 2
        await store.add_run_records("named", records)

    stored(tmp_path, change)
    assert main(["replay", "named", "--step", "2", "--store", str(tmp_path / "store.db")]) == 1
    output = capsys.readouterr().out
    assert "differs: weights after step 2" in output
    assert "differs: loss" in output
    assert "log-probabilities" not in output


def test_records_without_tokens_and_a_folder_that_is_gone_are_told(untrained_model: Path, tmp_path: Path) -> None:
    fit(GRPO, two_turns, untrained_model, tmp_path, max_steps=1, record_tokens="none")
    with pytest.raises(GoneError, match=r"Only 0 of .* with their tokens: train with record_tokens='all'"):
        ask_again(tmp_path, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(GoneError, match="is not the folder of run"):
        ask_again(tmp_path, 1)


@agl.rollout
def two_rewarded_turns(task: str, llm: agl.LLM) -> float:
    """Each turn earns a reward for its digits; the rollout has that of its first turn."""
    messages, earned = [say(task)], list[float]()
    for _ in range(2):
        messages.append(ask(llm, messages))
        earned.append(float(sum(map(str.isdigit, messages[-1]["content"]))) + len(messages[-1]["content"]) / 100)
        agl.emit_reward(earned[-1])
        messages.append(say("go on"))
    return earned[0]


def test_a_run_with_rewards_of_calls_is_repeated_with_the_advantage_of_each_call(
    untrained_model: Path, tmp_path: Path
) -> None:
    fit(GRPO, two_rewarded_turns, untrained_model, tmp_path, max_steps=2, turn_advantage_weight=1.0)
    again = ask_again(tmp_path, 2)
    assert (again.differences, again.updates > 0) == ([], True)
    records = stored(tmp_path, lambda store: store.query_run_records("named", kind_in=["ledger"]))
    trained = [[call["advantage"] for call in r.data["calls"] if call["row"] is not None] for r in records]
    assert any(len(set(own)) == 2 for own in trained if len(own) == 2)


def clipped(inputs: agl.LossInputs) -> Any:
    """The loss of DAPO, in the user's words."""
    bounded = inputs.ratio.clamp(1 - inputs.settings.epsilon, 1.28)
    return -(inputs.ratio * inputs.advantages).minimum(bounded * inputs.advantages)


def test_a_run_with_a_custom_loss_is_repeated_by_the_import_path_of_its_function(
    untrained_model: Path, tmp_path: Path
) -> None:
    (folder := tmp_path / "own").mkdir()
    own = fit(GRPO, two_turns, untrained_model, folder, max_steps=2, loss=clipped)
    again = ask_again(folder, 2)
    assert (again.differences, again.updates > 0) == ([], True)
    begun = stored(folder, lambda store: store.query_run_records("named", kind_in=["state"]))
    assert [record.data["settings"]["loss"] for record in begun] == [f"{__name__}:clipped"]
    (other := tmp_path / "dapo").mkdir()
    dapo = fit(GRPO, two_turns, untrained_model, other, max_steps=2)
    weights = [[line["weights"] for line in metrics_of(result)] for result in (own, dapo)]
    assert weights[0] == weights[1]
