"""Features of PPO alone: values and returns per token, the value head in its files, the place of the divergence."""

from __future__ import annotations

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
from tests.algorithm.parts import needs_bfloat16, two_turns
from tests.training.conformance.cases import PPO, RUN, fit, stored


def run(model: Path, folder: Path, **settings: Any) -> Any:
    """Run PPO with one rollout per task."""
    return fit(PPO, two_turns, model, folder, **{"num_generations": 1, "num_ppo_epochs": 2, **settings})


@pytest.fixture(scope="module")
def played(untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of four steps, and its result."""
    folder = tmp_path_factory.mktemp("played")
    return folder, run(untrained_model, folder)


def test_every_trained_token_has_its_value_return_and_advantage_in_the_ledger(played: tuple[Path, Any]) -> None:
    folder, result = played
    records = stored(folder, lambda store: RunLog(store, RUN).records("ledger", step_from=2, step_to=2))
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
    expected = whitened(torch.tensor(raw), torch.ones(len(raw), dtype=torch.bool))
    assert advantages == pytest.approx(expected.tolist(), abs=1e-4)
    assert {"value_loss", "explained_variance"} <= result.metrics[1].update.keys()


def test_the_value_head_is_in_the_checkpoint_and_not_in_an_export(played: tuple[Path, Any], tmp_path: Path) -> None:
    trained = trained_in(played[0] / "run")
    tensors = load_file(trained.path / "optimizer.safetensors")
    assert tensors["value_head.weight"].abs().max() > 0
    assert tensors["exp_avg/value_head.weight"].abs().max() > 0
    export(trained, "merged", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "value" in name.replace("v_proj", "")]  # noqa: SIM118


def test_a_setting_without_a_meaning_is_refused_with_what_to_give(untrained_model: Path) -> None:
    with pytest.raises(TypeError, match="Use num_ppo_epochs"):
        agl.PPO(untrained_model, num_iterations=2)
    with pytest.raises(TypeError, match="collects synchronously"):
        agl.PPO(untrained_model, max_staleness=1)
    with pytest.raises(TypeError, match="Did you mean 'vf_coef'"):
        agl.PPO(untrained_model, vf_coeff=2)
    with pytest.raises(BadRequestError, match="lam must be a number of at least 0 and at most 1"):
        agl.PPO(untrained_model, lam=2)
    with pytest.raises(BadRequestError, match="kl_coef"):
        agl.PPO(untrained_model, use_kl_in_reward=True)


@needs_bfloat16
def test_adapters_in_bfloat16_learn_beside_the_value_head(untrained_model: Path, tmp_path: Path) -> None:
    settings = {"lora": {"r": 4, "target_modules": "all-linear"}, "bf16": True, "learning_rate": 1e-2}
    result = run(untrained_model, tmp_path, **settings)
    tensors = load_file(trained_in(tmp_path / "run").path / "optimizer.safetensors")
    assert tensors["value_head.weight"].abs().max() > 0
    assert result.steps == 4
    assert stored(tmp_path, lambda store: replay(store, RUN, 4)).differences == []


@pytest.mark.parametrize("in_reward", [True, False])
def test_the_divergence_counts_in_reward_or_in_loss(untrained_model: Path, tmp_path: Path, in_reward: bool) -> None:
    settings = {"kl_coef": 0.5, "use_kl_in_reward": in_reward, "learning_rate": 1e-2, "max_steps": 2}
    result = run(untrained_model, tmp_path, **settings)
    assert result.steps == 2
    assert (result.metrics[1].update["kl"] > 0) is not in_reward
