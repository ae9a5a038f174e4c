"""A whole run of PPO: real store, gateway, runner, engine and model; what it learns, records and leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.errors import BadRequestError
from agentlightning.training.ledger_records import numbers_of
from agentlightning.training.losses.critic import whitened
from agentlightning.training.model_export import export, trained_in
from agentlightning.training.records import RunLog
from agentlightning.training.replay import replay
from tests.algorithm.parts import ask, needs_bfloat16, say, two_turns, wants_digits
from tests.training.test_grpo_interrupted import curve, interrupt_in

TASKS = ["one", "two", "three", "four"]


def run(model: Path, folder: Path, agent: Any = two_turns, **settings: Any) -> Any:
    """Run PPO under one name with a store in the folder."""
    tasks = settings.pop("tasks", TASKS)
    given = {"max_steps": 4, "batch_size": 4, "save_steps": 2, "deterministic": True, "num_ppo_epochs": 2, **settings}
    rest = {"learning_rate": 1e-3, "max_completion_length": 4, "progress": "none", "output_dir": folder / "run"}
    trainer = agl.Trainer(
        algorithm=agl.PPO(**{"model": model, **rest, **given}),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        strategy="shm",
        store=agl.SQLiteLightningStore(folder / "store.db"),
    )
    trainer.fit(agent, train_dataset=tasks, run_id="named")
    return trainer.result


def stored(folder: Path, use: Any) -> Any:
    async def opened() -> Any:
        store = agl.SQLiteLightningStore(folder / "store.db")
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(opened())


@pytest.fixture(scope="module")
def played(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of four steps, and its result."""
    folder = tmp_path_factory.mktemp("played")
    return folder, run(untrained_model, folder)


def test_the_reward_rises_with_one_rollout_per_task(untrained_model: Path, tmp_path: Path) -> None:
    tasks = [f"task {number}" for number in range(24)]
    settings = {"max_steps": 8, "batch_size": 24, "num_ppo_epochs": 4, "learning_rate": 5e-3, "deterministic": False}
    result = run(untrained_model, tmp_path, wants_digits, tasks=tasks, **settings)
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    assert all(figures.calls_trained == 24 for figures in result.metrics)


def test_every_trained_token_has_its_value_return_and_advantage_in_the_ledger(played: tuple[Path, Any]) -> None:
    folder, result = played
    records = stored(folder, lambda store: RunLog(store, "named").records("ledger", step_from=2, step_to=2))
    advantages: list[float] = []
    raw: list[float] = []
    for record in records:
        [row] = record.data["rows"]
        numbers = {name: np.array(column) for name, column in numbers_of(row).items()}
        value, returns = numbers["value"], numbers["returns"]
        assert len(value) == len(returns) == sum(numbers["mask"])
        own, after = [], 0.0
        for t in reversed(range(len(value))):  # gamma 1, lam 0.95
            following = value[t + 1] if t + 1 < len(value) else record.data["reward"]
            after = following - value[t] + 0.95 * after
            own.append(after)
        assert returns == pytest.approx(np.array(own[::-1]) + value, abs=1e-5)
        raw += own[::-1]
        advantages += list(numbers["advantage"])
    wanted = whitened(torch.tensor(raw), torch.ones(len(raw), dtype=torch.bool))
    assert advantages == pytest.approx(wanted.tolist(), abs=1e-4)
    assert {"value_loss", "explained_variance"} <= result.metrics[1].update.keys()


def test_a_run_that_was_interrupted_goes_on_with_the_same_curve(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: tuple[Path, Any]
) -> None:
    with monkeypatch.context() as patched:
        interrupt_in(patched, 4, RuntimeError("stopped"))
        with pytest.raises(RuntimeError, match="stopped"):
            run(untrained_model, tmp_path)
    assert curve(run(untrained_model, tmp_path)) == curve(played[1])


def test_a_step_that_is_taken_again_is_the_same_bit_for_bit(played: tuple[Path, Any]) -> None:
    last = stored(played[0], lambda store: replay(store, "named", 4))
    first = stored(played[0], lambda store: replay(store, "named", 1))
    assert (last.differences, first.differences) == ([], [])
    assert last.tokens > 0


def test_the_value_head_is_in_the_checkpoint_and_not_in_an_export(played: tuple[Path, Any], tmp_path: Path) -> None:
    trained = trained_in(played[0] / "run")
    kept = load_file(trained.path / "optimizer.safetensors")
    assert kept["value_head.weight"].abs().max() > 0
    assert kept["exp_avg/value_head.weight"].abs().max() > 0
    export(trained, "merged", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "value" in name.replace("v_proj", "")]  # noqa: SIM118


def test_rollouts_without_a_reward_change_nothing(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def graded(task: str, llm: agl.LLM) -> float | None:
        reply = ask(llm, [say(task)])["content"]
        return None if task == "broken" else float(len(reply))

    settings = {"max_steps": 1, "num_generations": 2}
    with_it = run(untrained_model, tmp_path, graded, tasks=["a", "broken"], batch_size=2, **settings)
    [figures] = with_it.metrics
    assert (figures.calls_trained, figures.calls_excluded) == (2, {"no_reward": 2})
    assert figures.update["rollouts"] == 2


def test_a_setting_without_a_meaning_is_refused_with_what_to_give(untrained_model: Path) -> None:
    with pytest.raises(TypeError, match="Its name is num_ppo_epochs"):
        agl.PPO(untrained_model, num_iterations=2)
    with pytest.raises(TypeError, match="collects synchronously"):
        agl.PPO(untrained_model, max_staleness=1)
    with pytest.raises(TypeError, match="Did you mean 'vf_coef'"):
        agl.PPO(untrained_model, vf_coeff=2)
    with pytest.raises(BadRequestError, match="lam must be a number of at least 0 and at most 1"):
        agl.PPO(untrained_model, lam=2)
    with pytest.raises(BadRequestError, match="kl_coef"):
        agl.PPO(untrained_model, use_kl_in_reward=True)


def test_an_alarm_names_the_settings_as_ppo_does(untrained_model: Path, tmp_path: Path) -> None:
    alarms = {"policy_shift": {"limit": 1e-12}}
    run(untrained_model, tmp_path, max_steps=4, learning_rate=1e-2, alarms=alarms)
    told = stored(tmp_path, lambda store: RunLog(store, "named").records("alarm"))
    [hint] = {
        record.data["what_to_try"] for record in told if record.name == "policy_shift" and record.data["what_to_try"]
    }
    assert "fewer num_ppo_epochs; smaller cliprange; a smaller max_grad_norm" in hint


@needs_bfloat16
def test_adapters_in_bfloat16_learn_beside_the_value_head(untrained_model: Path, tmp_path: Path) -> None:
    given = {"lora": {"r": 4, "target_modules": "all-linear"}, "bf16": True, "learning_rate": 1e-2}
    result = run(untrained_model, tmp_path, **given)
    kept = load_file(trained_in(tmp_path / "run").path / "optimizer.safetensors")
    assert kept["value_head.weight"].abs().max() > 0
    assert result.steps == 4
    assert stored(tmp_path, lambda store: replay(store, "named", 4)).differences == []


def test_a_bare_name_says_which_setting_is_missing() -> None:
    with pytest.raises(TypeError, match="PPO needs settings that are missing: model"):
        agl.Trainer(algorithm="ppo")


@pytest.mark.parametrize("in_reward", [True, False])
def test_the_divergence_counts_in_reward_or_in_loss(untrained_model: Path, tmp_path: Path, in_reward: bool) -> None:
    settings = {"kl_coef": 0.5, "use_kl_in_reward": in_reward, "learning_rate": 1e-2, "max_steps": 2}
    result = run(untrained_model, tmp_path, **settings)
    assert result.steps == 2
    assert (result.metrics[1].update["kl"] > 0) is not in_reward
