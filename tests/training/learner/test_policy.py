"""The policy learns from its rows, takes no step that is not finite, and writes files that transformers reads."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.batch import make_batch
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.policy_files import digest_of


def row(policy: Policy, rollout: str, tokens: list[int]) -> Sample:
    """A row whose log-probabilities are those of the present weights."""
    prompt = [11, 12, 13]
    mask = [0] * len(prompt) + [1] * len(tokens)
    bare = Sample(rollout, "a", prompt + tokens, mask, [0.0] * len(mask), [], [])
    with torch.no_grad():
        logprobs = policy.logprobs(make_batch([bare], [0.0]))[0].tolist()
    return Sample(rollout, "a", prompt + tokens, mask, logprobs, [], [])


def probability(policy: Policy, sample: Sample) -> float:
    with torch.no_grad():
        return float(policy.logprobs(make_batch([sample], [0.0])).sum())


def test_an_update_makes_the_better_likelier_and_the_worse_less(policy: Policy) -> None:
    better, worse = row(policy, "better", [20, 21]), row(policy, "worse", [30, 31])
    before = probability(policy, better), probability(policy, worse)
    figures = policy.update([better, worse], [1.0, -1.0], UpdateSettings(num_iterations=2)).figures
    assert probability(policy, better) > before[0]
    assert probability(policy, worse) < before[1]
    assert policy.weight_version == 1
    assert figures["first_ratio_error"] < 1e-4
    assert (figures["steps"], figures["skipped_steps"], figures["rows"], figures["tokens"]) == (2, 0, 2, 4)


def test_the_update_does_not_depend_on_how_many_rows_go_through_at_once(model_folder: Path) -> None:
    probabilities = []
    for tokens in (1, 64, 4096):
        policy = Policy.load(model_folder, learning_rate=1e-3, max_tokens_per_forward=tokens)
        rows = [row(policy, str(n), [20 + n, 21, 22][: 1 + n % 3]) for n in range(5)]
        policy.update(rows, [1.0, -1.0, 0.5, -0.5, 0.0])
        probabilities.append(probability(policy, rows[0]))
    assert probabilities[1:] == pytest.approx([probabilities[0]] * 2, abs=1e-5)


def test_a_step_that_is_not_finite_is_left_out_and_counted(policy: Policy) -> None:
    sample = row(policy, "r", [20])
    with torch.no_grad():
        next(policy.model.parameters())[20] = math.nan
    before = digest_of(policy)
    figures = policy.update([sample], [1.0]).figures
    assert (figures["steps"], figures["skipped_steps"], policy.weight_version) == (0, 1, 0)
    assert digest_of(policy) == before


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_what_was_learned_is_saved_with_its_adapters_merged_as_transformers_loads_it(
    model_folder: Path, tmp_path: Path, lora: Any
) -> None:
    policy = Policy.load(model_folder, learning_rate=1e-2, lora=lora)
    sample = row(policy, "r", [20, 21])
    before = probability(policy, sample)
    policy.update([sample], [1.0], UpdateSettings(num_iterations=3))
    assert probability(policy, sample) > before
    policy.save(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == policy.tokenizer.chat_template
    tokens = torch.tensor([sample.token_ids])
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, policy.model(tokens).logits, atol=1e-4)


PROGRAM = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path("ran").touch()
class Own(PretrainedConfig):
    model_type = "own"
"""


LOADS = """
import sys
from agentlightning.training.learner.policy import Policy, load_model
for load in (Policy.load, load_model):
    try:
        load(sys.argv[1])
    except ValueError as error:
        print(load.__name__, "trust_remote_code" in str(error))
"""


def test_a_program_in_the_folder_of_a_model_is_not_run_whoever_says_yes(tmp_path: Path) -> None:
    names = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": names}))
    (tmp_path / "own.py").write_text(PROGRAM)
    command = [sys.executable, "-c", LOADS, str(tmp_path)]
    settings = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        command, input="y\n" * 9, capture_output=True, text=True, cwd=tmp_path, env=settings, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("load")]
    assert lines == ["load True", "load_model True"], done.stdout
    assert not (tmp_path / "ran").exists()
