"""Whole runs of SFT: real store, gateway, runner, engine and model; choosing, learning, recording and refusing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import agentlightning as agl
from agentlightning.engine.served import load_model
from agentlightning.errors import BadRequestError, NoScoredRolloutError, NotFoundError
from agentlightning.training.ledger_records import numbers_of
from agentlightning.training.records import RunLog
from agentlightning.training.replay import replay
from tests.algorithm.parts import needs_bfloat16, two_turns, wants_digits
from tests.training.conformance.cases import StoppingStore, read, stored

TASKS = [f"task {number}" for number in range(8)]


def run(model: Path, folder: Path, agent: Any = wants_digits, *, run_id: str = "sft", **settings: Any) -> Any:
    """Run SFT with a store in the folder, and return the result."""
    tasks, held_out = settings.pop("tasks", None), settings.pop("val_dataset", None)
    store = settings.pop("store", None) or agl.SQLiteLightningStore(folder / "store.db")
    arguments: Any = {"max_steps": 2, "batch_size": 4, "learning_rate": 1e-3, "max_completion_length": 4, **settings}
    trainer = agl.Trainer(
        algorithm=agl.SFT(**{"model": model, "progress": "none", "output_dir": folder / run_id, **arguments}),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        strategy="shm",
        store=store,
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=held_out, run_id=run_id)
    return trainer.result


def ledger_of(folder: Path, run_id: str = "sft") -> list[Any]:
    return stored(folder, lambda store: RunLog(store, run_id).records("ledger"))


@pytest.fixture(scope="module")
def sampled(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with the 32 rollouts of a run that changed nothing, 4 of each task."""
    folder = tmp_path_factory.mktemp("sampled")
    settings: Any = {"num_generations": 4, "batch_size": 8, "max_steps": 1, "learning_rate": 1e-12}
    run(untrained_model, folder, run_id="sampled", tasks=TASKS, top_share=1.0, **settings)
    return folder


@pytest.fixture
def folder(sampled: Path, tmp_path: Path) -> Path:
    """A folder with a copy of that store."""
    for file in sampled.glob("store.db*"):
        shutil.copy(file, tmp_path)
    return tmp_path


async def rewards_of(store: Any) -> dict[str, Any]:
    rollouts = [r for r in await store.query_rollouts(run_id="sampled") if r.mode == "train"]
    return {r.rollout_id: agl.find_final_reward(await store.query_spans(r.rollout_id)) for r in rollouts}


def trained_in(records: Sequence[Any]) -> set[str]:
    return {record.name for record in records if any(call["ending"] == "trained" for call in record.data["calls"])}


def test_the_held_out_reward_rises_after_training_on_the_best_rollouts_of_the_store(
    untrained_model: Path, folder: Path
) -> None:
    held_out = [f"held out {number}" for number in range(40)]
    settings: Any = {"rollouts": "stored", "top_share": 0.25, "max_steps": 8, "batch_size": 8, "learning_rate": 5e-3}
    result = run(untrained_model, folder, val_dataset=held_out, **settings)
    first, last = result.evaluations[0], result.evaluations[-2]
    assert (first.sampling, last.sampling) == ("sampled", "sampled")
    assert sum(last.rewards) > sum(first.rewards) + 4


def test_the_best_of_each_task_are_trained_with_weight_one_and_the_others_are_accounted_for(
    untrained_model: Path, folder: Path
) -> None:
    rewards = stored(folder, rewards_of)
    run(untrained_model, folder, rollouts="stored", from_run="sampled", best_per_task=1, batch_size=8, max_steps=1)
    trained = trained_in(ledger_of(folder))
    assert len(trained) == 8
    choice = stored(folder, lambda store: RunLog(store, "sft").latest("state", "chosen")).data
    assert set(choice["chosen"]) == trained
    assert set(choice["left_out"].values()) == {"not_best_of_task"}
    assert trained | choice["left_out"].keys() == rewards.keys()
    assert min(rewards[one] for one in trained) >= 0
    for record in ledger_of(folder):
        assert [call["advantage"] for call in record.data["calls"]] == [1.0]
        [row] = record.data["rows"]
        assert sum(numbers_of(row)["weight"]) > 0


def test_rollouts_are_chosen_by_hand(untrained_model: Path, folder: Path) -> None:
    rewards = stored(folder, rewards_of)
    two = sorted(rewards)[:2]
    run(untrained_model, folder, rollouts=two, max_steps=1)
    assert trained_in(ledger_of(folder)) == set(two)
    best = max(rewards.values())

    def is_best(rollout: agl.Rollout, reward: float) -> bool:
        return reward == best

    run(untrained_model, folder, run_id="by", rollouts="stored", choose=is_best, max_steps=1)
    assert {rewards[one] for one in trained_in(ledger_of(folder, "by"))} == {best}


def test_the_loss_is_the_mean_cross_entropy_of_the_trained_tokens(untrained_model: Path, folder: Path) -> None:
    result = run(untrained_model, folder, rollouts="stored", top_share=1.0, batch_size=32, max_steps=1)
    logprobs = [
        value
        for record in ledger_of(folder)
        for row in record.data["rows"]
        for value in numbers_of(row)["trainer_logprobs"]
    ]
    assert result.metrics[0].update["loss"] == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-4)
    assert result.metrics[0].update["clip_fraction"] == 0


def test_the_tokens_of_every_turn_are_trained_and_those_between_are_not(untrained_model: Path, tmp_path: Path) -> None:
    run(untrained_model, tmp_path, two_turns, tasks=["one", "two"], top_share=1.0, max_steps=1, num_generations=1)
    for record in ledger_of(tmp_path):
        rows = [numbers_of(row) for row in record.data["rows"]]
        tokens = sum(call["tokens"] for call in record.data["calls"])
        assert sum(sum(row["mask"]) for row in rows) == tokens
        assert sum(len(row["tokens"]) for row in rows) > tokens


def test_a_run_that_was_interrupted_goes_on_with_what_it_had_chosen(
    untrained_model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("whole")
    for file in folder.glob("store.db*"):
        shutil.copy(file, other)
    settings: Any = {"rollouts": "stored", "top_share": 0.5, "max_steps": 4, "save_steps": 1, "deterministic": True}
    run(untrained_model, other, **settings)

    def stop() -> None:
        raise RuntimeError("stopped")

    store = StoppingStore(folder / "store.db", "before ledger 3", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        run(untrained_model, folder, store=store, **settings)
    run(untrained_model, folder, run_id="more", tasks=["new"], top_share=1.0, max_steps=1, num_generations=2)
    run(untrained_model, folder, **settings)
    assert read(folder, "sft", output="sft").curve() == read(other, "sft", output="sft").curve()
    assert stored(folder, lambda store: replay(store, "sft", 4)).differences == []


@needs_bfloat16
def test_adapters_in_bfloat16_learn_from_stored_rollouts(untrained_model: Path, folder: Path) -> None:
    settings: Any = {"lora": {"r": 4, "target_modules": "all-linear"}, "bf16": True, "gradient_checkpointing": True}
    held: Any = {"rollouts": "stored", "top_share": 0.25, "batch_size": 8, "max_steps": 6, "learning_rate": 2e-2}
    result = run(untrained_model, folder, **settings, **held)
    assert result.metrics[-1].update["loss"] < result.metrics[0].update["loss"] - 0.1


def test_ids_that_the_store_does_not_have_are_named(untrained_model: Path, folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no rollout ro-none.*1 of 1 ids"):
        run(untrained_model, folder, rollouts=["ro-none"])


def test_a_choice_that_finds_nothing_says_why(untrained_model: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"out of 32 .*32 below_min_reward; the best"):
        run(untrained_model, folder, rollouts="stored", min_reward=2.0)
    with pytest.raises(BadRequestError, match=r"out of 0 ended training rollouts of run 'other' .*store has none"):
        run(untrained_model, folder, run_id="b", rollouts="stored", from_run="other", min_reward=2.0)
    with pytest.raises(NoScoredRolloutError, match=r"chose no rollout to learn from: the best reward was"):
        run(untrained_model, folder, run_id="c", tasks=["one"], min_reward=2.0, num_generations=2, max_steps=1)


def test_rollouts_without_token_ids_are_refused_with_the_reason(untrained_model: Path, folder: Path) -> None:
    @agl.rollout
    def silent(task: str) -> float:
        return 1.0

    trainer = agl.Trainer(
        algorithm=agl.Baseline(), strategy="shm", store=agl.SQLiteLightningStore(folder / "store.db"), n_runners=1
    )
    trainer.fit(silent, train_dataset=["one"], run_id="silent")
    [rollout] = stored(folder, lambda store: store.query_rollouts(run_id="silent"))
    with pytest.raises(BadRequestError, match=rf"cannot be used for training: {rollout.rollout_id} \(no_call\)"):
        run(untrained_model, folder, rollouts=[rollout.rollout_id])


def test_rollouts_of_another_tokenizer_are_refused(untrained_model: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(untrained_model, other)
    own = Tokenizer.from_file(str(other / "tokenizer.json"))
    text, vocabulary = (other / "tokenizer.json").read_text(), own.get_vocab()
    fields = json.loads(text)
    plain = [token for token in fields["model"]["vocab"] if not token.startswith("<")]
    ids = [vocabulary[token] for token in plain]
    fields["model"]["vocab"] |= dict(zip(plain, ids[1:] + ids[:1], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(BadRequestError, match="was sampled with a different tokenizer: its reply is"):
        run(other, folder, rollouts="stored", top_share=1.0)
    shutil.copy(untrained_model / "tokenizer.json", other)
    model: Any = load_model(other)
    model.resize_token_embeddings(8)
    model.save_pretrained(other)
    with pytest.raises(BadRequestError, match="vocabulary of the model ends at 7"):
        run(other, folder, run_id="small", rollouts="stored", top_share=1.0)


def test_wrong_settings_are_refused_with_what_to_give(untrained_model: Path) -> None:
    with pytest.raises(BadRequestError, match="a setting that selects rollouts: min_reward"):
        agl.SFT(untrained_model)
    with pytest.raises(TypeError, match="rewards choose rollouts"):
        agl.SFT(untrained_model, min_reward=1, advantage="grpo")
    with pytest.raises(TypeError, match="Use best_per_task"):
        agl.SFT(untrained_model, best_of=2)
    with pytest.raises(BadRequestError, match="top_share must be a number above 0 and at most 1"):
        agl.SFT(untrained_model, top_share=2)
    with pytest.raises(BadRequestError, match="lists ids more than once: a"):
        agl.SFT(untrained_model, rollouts=["a", "a"])
    with pytest.raises(BadRequestError, match="must be the id of a run"):
        agl.SFT(untrained_model, from_run="x", min_reward=1)
    with pytest.raises(TypeError, match="choose must be a function"):
        agl.SFT(untrained_model, choose="best")  # pyright: ignore[reportArgumentType]


def test_tasks_beside_stored_rollouts_are_refused(untrained_model: Path, folder: Path) -> None:
    with pytest.raises(BadRequestError, match="Remove train_dataset"):
        run(untrained_model, folder, rollouts="stored", min_reward=0, tasks=["one"])
