"""The same rows make the same update, and the numbers used for each token are returned."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.batch import make_batch
from agentlightning.training.learner import figures as update_figures
from agentlightning.training.learner.figures import UpdateResult
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import Optimizer, UpdateSettings
from tests.training.learner.rows import make_advantages, make_rows

VOCABULARY = 80
SETTINGS = {"num_iterations": 2, "minibatch_rollouts": 3, "temperature": 0.8}


def digest(policy: Policy) -> str:
    """A hash of every bit of the weights and of the optimizer's state."""
    state = policy.state()
    whole = hashlib.sha256()
    for name, value in sorted({**state.weights, **state.optimizer}.items()):
        whole.update(name.encode())
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()


def learn(policy: Policy, *, seed: int = 0, order: random.Random | None = None) -> UpdateResult:
    rows, advantages = make_rows(12, VOCABULARY, seed=seed), make_advantages(12)
    numbers = list(range(12))
    if order is not None:
        order.shuffle(numbers)
    result = policy.update([rows[n] for n in numbers], [advantages[n] for n in numbers], UpdateSettings(**SETTINGS))
    rows_by_number = dict(zip(numbers, result.rows, strict=True))
    return UpdateResult(result.figures, [rows_by_number[n] for n in range(12)], result.notes)


def distribution(policy: Policy, row: Sample, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of all tokens at each place, without padding, packing or a mask: (T - 1, V)."""
    with torch.no_grad():
        return (policy.model(torch.tensor([row.token_ids])).logits[0, :-1] / temperature).log_softmax(dim=-1)


def test_the_figures_of_each_token_are_those_of_the_loss(policy: Policy) -> None:
    rows, advantages = make_rows(8, VOCABULARY), make_advantages(8)
    distributions = [distribution(policy, row, 0.8) for row in rows]
    result = policy.update(rows, advantages, UpdateSettings(temperature=0.8))
    loss = 0.0
    for number, (row, trace) in enumerate(zip(rows, result.rows, strict=True)):
        trained = [position for position, bit in enumerate(row.mask) if bit]
        every = distributions[number]
        own = torch.stack([every[position - 1, row.token_ids[position]] for position in trained])
        entropy = -(every.exp() * every).sum(dim=-1)[[position - 1 for position in trained]]
        engine = np.float32([row.logprobs[position] for position in trained])
        assert trace["engine_logprobs"].tobytes() == engine.tobytes()  # bit for bit
        assert trace["trainer_logprobs"] == pytest.approx(own.numpy(), abs=1e-5)
        assert trace["entropy"] == pytest.approx(entropy.numpy(), abs=1e-5)
        assert trace["ratio"] == pytest.approx(np.exp(trace["trainer_logprobs"] - trace["engine_logprobs"]), rel=1e-5)
        gains = trace["ratio"] * trace["advantage"], np.clip(trace["ratio"], 0.8, 1.28) * trace["advantage"]
        assert (trace["clipped"] > 0).tolist() == (gains[1] < gains[0]).tolist()
        assert (trace["advantage"] == np.float32(advantages[number])).all()
        loss -= float((trace["weight"] * np.minimum(*gains)).sum())
        for array in (trace["trainer_logprobs"], trace["entropy"], trace["ratio"], trace["weight"], trace["advantage"]):
            assert array.dtype == np.float32
    assert any(trace["clipped"].any() for trace in result.rows)
    assert sum(float(trace["weight"].sum()) for trace in result.rows) == pytest.approx(1.0)
    assert result.figures["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_order_of_the_rows_and_the_names_of_rollouts_do_not_change_a_bit(model_folder: Path) -> None:
    def learned(**settings: Any) -> tuple[str, list[bytes]]:
        policy = Policy.load(model_folder, learning_rate=1e-3)
        result = learn(policy, **settings)
        return digest(policy), [row["trainer_logprobs"].tobytes() for row in result.rows]

    assert learned() == learned(order=random.Random(1)) == learned(order=random.Random(2))
    assert learned()[0] != learned(seed=1)[0]


def test_a_state_of_another_model_is_refused_and_changes_nothing(policy: Policy, model_folder: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"]}
    before = digest(policy)
    with pytest.raises(ValueError, match=r"another model or other adapters: .*lora_A"):
        policy.restore(Policy.load(model_folder, lora=lora).state())
    assert digest(policy) == before


@pytest.mark.parametrize("steps", [0, 1])
def test_an_update_that_fails_leaves_another_version_if_a_step_was_taken_before(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    before, descend, counter = digest(policy), Optimizer._gradient, itertools.count()

    def fails_after(self: Optimizer, *arguments: Any) -> Any:
        if next(counter) < steps:
            return descend(self, *arguments)
        raise RuntimeError("here")

    monkeypatch.setattr(Optimizer, "_gradient", fails_after)
    with pytest.raises(RuntimeError, match="here"):
        learn(policy)
    assert (digest(policy) != before, policy.weight_version) == (steps > 0, steps)


def test_a_smaller_last_mini_batch_has_the_gradient_that_it_has_alone(model_folder: Path) -> None:
    """Four rollouts in mini-batches of three: the fourth is neither excluded nor counted for less."""

    def figures_of(rollouts: list[int], **settings: int) -> tuple[float, float]:
        rows, advantages = make_rows(8, VOCABULARY), make_advantages(8)
        chosen = [number for number in range(8) if number // 2 in rollouts]
        policy = Policy.load(model_folder, learning_rate=1e-20)  # so that every step starts from the same weights
        figures = policy.update(
            [rows[n] for n in chosen], [advantages[n] for n in chosen], UpdateSettings(**settings)
        ).figures
        return figures["loss"], figures["grad_norm"]

    every = [0, 1, 2, 3]
    means = [
        tuple((one + other) / 2 for one, other in zip(figures_of([last]), figures_of(rest), strict=True))
        for last in every
        for rest in [[number for number in every if number != last]]
    ]
    expected = figures_of(every, minibatch_rollouts=3)
    assert [mean == pytest.approx(expected, rel=1e-4) for mean in means].count(True) == 1, (expected, means)


@pytest.mark.parametrize("settings", [{}, SETTINGS])
def test_what_the_update_moved_is_measured_after_its_last_step_on_rows_of_the_first(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    rows, advantages = make_rows(12, VOCABULARY), make_advantages(12)
    versions: list[tuple[float, str, object]] = []
    for most in (1, 40, 10_000):
        monkeypatch.setattr(update_figures, "MEASURED_TOKENS", most)
        policy = Policy.load(model_folder, learning_rate=3e-2)
        before = _of_each_row(policy, rows)
        torch.manual_seed(5)
        figures = policy.update(rows, advantages, UpdateSettings(**settings)).figures
        assert torch.initial_seed() == 5
        versions.append((figures["update_kl"], digest(policy), policy.state().random))
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
        if not settings:  # all rows are of the first optimizer step
            moved = [math.exp(b - a) - 1 - (b - a) for a, b in zip(before, _of_each_row(policy, rows), strict=True)]
            assert (most < 10_000) or figures["update_kl"] == pytest.approx(sum(moved) / len(moved), rel=1e-3)
            assert figures["approx_kl"] != pytest.approx(figures["update_kl"], rel=0.1)
    assert len({state for _, state, _ in versions}) == 1, "it changes no weight"
    assert versions[0][2] == versions[1][2] == versions[2][2], "and draws no number"
    assert all(kl > 0 for kl, _, _ in versions)


def _of_each_row(policy: Policy, rows: list[Sample]) -> list[float]:
    """Return the log-probability of each trained token, one row at a time."""
    logprobs: list[float] = []
    for row in rows:
        every = distribution(policy, row, 1.0)
        logprobs += [float(every[at - 1, row.token_ids[at]]) for at, bit in enumerate(row.mask) if bit]
    return logprobs


def test_age_is_neither_a_difference_of_engine_and_learner_nor_a_shift_of_the_update(model_folder: Path) -> None:
    policy = Policy.load(model_folder, learning_rate=1e-6)
    rows = [replace(row, logprobs=[0.0] * len(row.mask)) for row in make_rows(6, VOCABULARY)]
    logprobs = policy.logprobs(make_batch(rows, [0.0] * 6)).detach()
    fresh = [
        replace(row, logprobs=logprobs[number, : len(row.mask)].tolist(), weight_versions=[7])
        for number, row in enumerate(rows)
    ]
    stale = [
        replace(row, logprobs=[value - 2.0 * bit for value, bit in zip(row.logprobs, row.mask, strict=True)],
                weight_versions=[6])
        for row in fresh
    ]  # fmt: skip
    mixed = policy.update([*fresh[:4], *stale[4:]], make_advantages(6), UpdateSettings(weight_version=7)).figures
    assert mixed["first_ratio_error"] < 1e-4
    assert mixed["first_stale_kl"] == pytest.approx(math.exp(2) - 1 - 2, rel=1e-3)
    assert mixed["update_kl"] < 1e-3
    share = sum(sum(row.mask) for row in rows[4:]) / sum(sum(row.mask) for row in rows)
    assert mixed["stale_share"] == pytest.approx(share)
    assert mixed["stale_kl"] == pytest.approx(mixed["first_stale_kl"] * share, rel=1e-3)
    old = policy.update(stale, make_advantages(6), UpdateSettings(weight_version=7)).figures
    assert "first_ratio_error" not in old, "no token tells what engine and learner differ in"
    assert old["update_kl"] < 1e-3
    now = policy.update(fresh, make_advantages(6), UpdateSettings(weight_version=7)).figures
    assert now["first_ratio_error"] < 0.05
    assert "first_stale_kl" not in now
