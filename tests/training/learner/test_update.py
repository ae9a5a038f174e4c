"""The same rows make the same update, and what it used of each token comes back."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.batch import make_batch
from agentlightning.training.learner import update
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import Optimizer, UpdateResult
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
    result = policy.update([rows[n] for n in numbers], [advantages[n] for n in numbers], **SETTINGS)
    rows_by_number = dict(zip(numbers, result.rows, strict=True))
    return UpdateResult(result.figures, [rows_by_number[n] for n in range(12)], result.notes)


def test_the_figures_of_each_token_are_those_of_the_loss(policy: Policy) -> None:
    rows, advantages = make_rows(8, VOCABULARY), make_advantages(8)
    logits = {}
    with torch.no_grad():
        for number, row in enumerate(rows):  # one row at a time, without padding, packing or a mask
            logits[number] = policy.model(torch.tensor([row.token_ids])).logits[0, :-1] / 0.8
    result = policy.update(rows, advantages, temperature=0.8)
    loss = 0.0
    for number, (row, found) in enumerate(zip(rows, result.rows, strict=True)):
        trained = [position for position, bit in enumerate(row.mask) if bit]
        every = logits[number].log_softmax(dim=-1)
        own = torch.stack([every[position - 1, row.token_ids[position]] for position in trained])
        entropy = -(every.exp() * every).sum(dim=-1)[[position - 1 for position in trained]]
        engine = np.float32([row.logprobs[position] for position in trained])
        assert found.engine_logprobs.tobytes() == engine.tobytes()  # bit for bit
        assert found.trainer_logprobs == pytest.approx(own.numpy(), abs=1e-5)
        assert found.entropy == pytest.approx(entropy.numpy(), abs=1e-5)
        assert found.ratio == pytest.approx(np.exp(found.trainer_logprobs - found.engine_logprobs), rel=1e-5)
        gains = found.ratio * found.advantage, np.clip(found.ratio, 0.8, 1.28) * found.advantage
        assert (found.clipped > 0).tolist() == (gains[1] < gains[0]).tolist()
        assert (found.advantage == np.float32(advantages[number])).all()
        loss -= float((found.weight * np.minimum(*gains)).sum())
        for array in (found.trainer_logprobs, found.entropy, found.ratio, found.weight, found.advantage):
            assert array.dtype == np.float32
    assert any(found.clipped.any() for found in result.rows)
    assert sum(float(found.weight.sum()) for found in result.rows) == pytest.approx(1.0)
    assert result.figures["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_order_of_the_rows_and_the_names_of_rollouts_do_not_change_a_bit(model_folder: Path) -> None:
    found: list[tuple[str, list[bytes]]] = []
    for order in (None, random.Random(1), random.Random(2)):
        policy = Policy.load(model_folder, learning_rate=1e-3)
        result = learn(policy, order=order)
        found.append((digest(policy), [row.trainer_logprobs.tobytes() for row in result.rows]))
    assert found[1] == found[0]
    assert found[2] == found[0]
    policy = Policy.load(model_folder, learning_rate=1e-3)
    assert digest(policy) != found[0][0]
    learn(policy, seed=1)
    assert digest(policy) != found[0][0]


def test_a_restored_policy_goes_on_with_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from agentlightning.training.learner.policy import PolicyState

    straight = Policy.load(model_folder, learning_rate=1e-3, seed=3)
    learn(straight)
    state = straight.state()
    save_file({name: value.clone() for name, value in state.weights.items()}, tmp_path / "weights.safetensors")
    save_file({name: value.clone() for name, value in state.optimizer.items()}, tmp_path / "optimizer.safetensors")
    random_state = json.loads(json.dumps(state.random))
    learn(straight, seed=1)
    resumed = Policy.load(model_folder, learning_rate=1e-3, seed=99)
    weights, optimizer = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "optimizer.safetensors")
    resumed.restore(PolicyState(weights, optimizer, random_state, 1, 4096))
    assert resumed.weight_version == 1
    learn(resumed, seed=1)
    assert digest(resumed) == digest(straight)


def test_a_state_of_another_model_is_refused_and_changes_nothing(policy: Policy, model_folder: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"]}
    before = digest(policy)
    with pytest.raises(ValueError, match=r"not that of this model.*lora_A"):
        policy.restore(Policy.load(model_folder, lora=lora).state())
    assert digest(policy) == before


def test_an_update_that_fails_after_its_first_step_leaves_another_version(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(policy)
    descend, steps = Optimizer._descend, iter([True, False])

    def fails_the_second_time(self: Optimizer, *arguments: Any) -> Any:
        if next(steps):
            return descend(self, *arguments)
        raise RuntimeError("here")

    monkeypatch.setattr(Optimizer, "_descend", fails_the_second_time)
    with pytest.raises(RuntimeError, match="here"):
        learn(policy)
    assert (digest(policy) != before, policy.weight_version) == (True, 1)


def test_an_update_that_fails_in_its_first_step_leaves_the_version_that_was(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(policy)

    def fails(*_: Any) -> Any:
        raise RuntimeError("here")

    monkeypatch.setattr(Optimizer, "_descend", fails)
    with pytest.raises(RuntimeError, match="here"):
        learn(policy)
    assert (digest(policy) == before, policy.weight_version) == (True, 0)


_CHILD = """
import sys, torch
from agentlightning.training.learner.policy import Policy
from tests.training.learner.test_update import digest, learn
policy = Policy.load(sys.argv[1], learning_rate=1e-3)
learn(policy)
learn(policy, seed=1)
print(digest(policy))
"""


@pytest.mark.heavy
def test_another_process_makes_the_same_bits(model_folder: Path) -> None:
    def child(hash_seed: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(model_folder)]
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    policy = Policy.load(model_folder, learning_rate=1e-3)
    learn(policy, order=random.Random(5))
    learn(policy, seed=1, order=random.Random(6))
    assert {child("1"), child("2")} == {digest(policy)}


def test_a_smaller_last_mini_batch_has_the_gradient_that_it_has_alone(model_folder: Path) -> None:
    """Four rollouts in mini-batches of three: the fourth is neither left out nor counted for less."""

    def figures_of(rollouts: list[int], **settings: int) -> tuple[float, float]:
        rows, advantages = make_rows(8, VOCABULARY), make_advantages(8)
        chosen = [number for number in range(8) if number // 2 in rollouts]
        policy = Policy.load(model_folder, learning_rate=1e-20)  # so that every step starts from the same weights
        found = policy.update([rows[n] for n in chosen], [advantages[n] for n in chosen], **settings).figures
        return found["loss"], found["grad_norm"]

    every = [0, 1, 2, 3]
    means = [
        tuple((one + other) / 2 for one, other in zip(figures_of([last]), figures_of(rest), strict=True))
        for last in every
        for rest in [[number for number in every if number != last]]
    ]
    found = figures_of(every, minibatch_rollouts=3)
    assert [mean == pytest.approx(found, rel=1e-4) for mean in means].count(True) == 1, (found, means)


@pytest.mark.parametrize("settings", [{}, SETTINGS])
def test_what_the_update_moved_is_measured_after_its_last_step_on_rows_of_the_first(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    rows, advantages = make_rows(12, VOCABULARY), make_advantages(12)
    found: list[tuple[float, str, object]] = []
    for most in (1, 40, 10_000):
        monkeypatch.setattr(update, "MEASURED_TOKENS", most)
        policy = Policy.load(model_folder, learning_rate=3e-2)
        before = _of_each_row(policy, rows, settings)
        torch.manual_seed(5)
        figures = policy.update(rows, advantages, **settings).figures
        assert torch.initial_seed() == 5
        found.append((figures["update_kl"], digest(policy), policy.state().random))
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
        if not settings:  # all rows are of the first optimizer step
            moved = [math.exp(b - a) - 1 - (b - a) for a, b in zip(before, _of_each_row(policy, rows, {}), strict=True)]
            assert (most < 10_000) or figures["update_kl"] == pytest.approx(sum(moved) / len(moved), rel=1e-3)
            assert figures["approx_kl"] != pytest.approx(figures["update_kl"], rel=0.1)
    assert len({state for _, state, _ in found}) == 1, "it changes no weight"
    assert found[0][2] == found[1][2] == found[2][2], "and draws no number"
    assert all(kl > 0 for kl, _, _ in found)


def _of_each_row(policy: Policy, rows: list[Sample], settings: dict[str, Any]) -> list[float]:
    """Return the log-probability of each trained token, one row at a time."""
    told: list[float] = []
    for row in rows:
        with torch.no_grad():
            logits = policy.model(torch.tensor([row.token_ids])).logits[0, :-1] / settings.get("temperature", 1.0)
        every = logits.log_softmax(dim=-1)
        told += [float(every[at - 1, row.token_ids[at]]) for at, bit in enumerate(row.mask) if bit]
    return told


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
    mixed = policy.update([*fresh[:4], *stale[4:]], make_advantages(6), weight_version=7).figures
    assert mixed["first_ratio_error"] < 1e-4
    assert mixed["first_stale_kl"] == pytest.approx(math.exp(2) - 1 - 2, rel=1e-3)
    assert mixed["update_kl"] < 1e-3
    share = sum(sum(row.mask) for row in rows[4:]) / sum(sum(row.mask) for row in rows)
    assert mixed["stale_share"] == pytest.approx(share)
    assert mixed["stale_kl"] == pytest.approx(mixed["first_stale_kl"] * share, rel=1e-3)
    old = policy.update(stale, make_advantages(6), weight_version=7).figures
    assert "first_ratio_error" not in old, "no token tells what engine and learner differ in"
    assert old["update_kl"] < 1e-3
    now = policy.update(fresh, make_advantages(6), weight_version=7).figures
    assert now["first_ratio_error"] < 0.05
    assert "first_stale_kl" not in now
