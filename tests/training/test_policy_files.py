"""A policy that is read from files continues bit for bit like the one that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.checkpoint import BrokenCheckpointError
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import ADAPTER, digest_of, fingerprint_of, restore_policy, save_policy
from tests.training.test_run_folder import full_disk

_ROWS = [Sample(str(n), "a", [11, 12, 20 + n], [0, 0, 1], [0.0, 0.0, -3.0], [], []) for n in range(6)]
_ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]


def learn(policy: Policy) -> dict[str, float]:
    return policy.update(_ROWS, _ADVANTAGES, UpdateSettings(num_iterations=2, minibatch_rollouts=2)).figures


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_the_next_updates_are_the_same_bit_for_bit(model_folder: Path, tmp_path: Path, lora: Any) -> None:
    policy = Policy.load(model_folder, learning_rate=1e-2, lora=lora, seed=3)
    untrained = digest_of(policy)
    learn(policy)
    digest = digest_of(policy)
    assert digest != untrained
    save_policy(policy, tmp_path)
    saved = {name: value.clone() for name, value in policy.model.state_dict().items()}
    figures = learn(policy)

    torch.rand(3)
    source = model_folder if (tmp_path / ADAPTER).is_file() else tmp_path
    again = Policy.load(source, learning_rate=1e-2, lora=lora, seed=3)
    restore_policy(again, tmp_path, weight_version=1, digest=digest)
    assert digest_of(again) == digest
    assert learn(again) == figures
    assert digest_of(again) == digest_of(policy)
    assert again.weight_version == policy.weight_version == 2
    if lora is None:  # transformers reads the folder as a model
        read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, read[name]) for name, value in saved.items())


def test_a_full_disk_is_an_error_of_the_system(model_folder: Path, tmp_path: Path) -> None:
    with full_disk(10_000), pytest.raises(OSError, match="too large"):
        save_policy(Policy.load(model_folder), tmp_path)


def test_other_weights_than_were_written_are_refused(model_folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(model_folder)
    save_policy(policy, tmp_path)
    with pytest.raises(BrokenCheckpointError, match="not 1234"):
        restore_policy(policy, tmp_path, weight_version=1, digest="1234")


def test_a_changed_file_changes_the_fingerprint_of_a_model(model_folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(model_folder)
    policy.save(tmp_path / "one")
    before = fingerprint_of(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert fingerprint_of(tmp_path / "two") == before
    with (tmp_path / "two" / "config.json").open("a") as file:
        file.write(" ")
    assert fingerprint_of(tmp_path / "two") != before
