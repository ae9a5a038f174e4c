"""Losses, gradients and advantages are those of TRL and VERL, whose own numbers are in `golden/golden.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.losses.advantages import overlong_penalty, rollout_advantages, several_advantages
from agentlightning.training.losses.kl import kl_divergence
from tests.training.losses.batches import whole_loss

GOLDEN = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())
BATCHES: list[dict[str, Any]] = GOLDEN["batches"]


def rows_of(batch: dict[str, Any]) -> dict[str, Tensor]:
    rows = {name: torch.tensor(value) for name, value in batch["rows"].items()}
    return rows | {"mask": rows["mask"] > 0}


@pytest.mark.parametrize("batch", BATCHES, ids=["batch 0", "batch 1"])
@pytest.mark.parametrize("name", BATCHES[0]["losses"])
def test_the_loss_and_its_gradient_are_theirs(name: str, batch: dict[str, Any]) -> None:
    settings, loss, gradient = batch["losses"][name]
    result, own, _ = whole_loss(LossSettings(**settings), rows_of(batch), torch.arange(6))
    assert result.figures()["loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(own, torch.tensor(gradient), rtol=0, atol=1e-6)
    assert own.abs().max() > 1e-3


@pytest.mark.parametrize("batch", BATCHES, ids=["batch 0", "batch 1"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_and_its_gradient_are_theirs(estimator: Any, batch: dict[str, Any]) -> None:
    rows = rows_of(batch)
    values, gradient = (torch.tensor(each) for each in batch["kl"][estimator])
    logprobs = rows["logprobs"].requires_grad_()
    divergence = kl_divergence(logprobs, rows["reference_logprobs"], estimator)
    assert torch.allclose(divergence, values, rtol=0, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(divergence.sum(), logprobs)[0], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES, ids=["batch 0", "batch 1"])
@pytest.mark.parametrize("name", BATCHES[0]["advantages"])
def test_advantages_are_theirs(name: str, batch: dict[str, Any]) -> None:
    arguments, expected = batch["advantages"][name]
    tokens = rows_of(batch)["mask"].sum(dim=1).tolist()
    advantages = rollout_advantages(GOLDEN["rewards"], GOLDEN["groups"], tokens=tokens, **arguments)
    assert advantages == pytest.approx(expected, abs=1e-6)


def test_advantages_of_several_dimensions_are_theirs() -> None:
    several = GOLDEN["several"]
    rewards = [{"one": one, "two": two} for one, two in zip(*several["rewards"], strict=True)]
    weights = dict(zip(("one", "two"), several["weights"], strict=True))
    advantages = several_advantages(rewards, weights, GOLDEN["groups"], eps=1e-4)
    assert advantages == pytest.approx(several["trl"], abs=1e-6)


def test_the_penalty_of_long_completions_is_theirs() -> None:
    assert [overlong_penalty(length, 20, 4) for length in range(24)] == pytest.approx(GOLDEN["overlong"], abs=1e-6)
