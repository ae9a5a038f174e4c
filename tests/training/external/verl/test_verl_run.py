"""Features of agl.VERL alone, on the processor: rollouts of several rows, adapters, processes: `make test-verl`.

The platform and the engine over transformers are test code (`cpu_platform.py`); VERL's trainer, agent loops, transfer
of weights, FSDP workers, validation and checkpoints are its own.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.ledger_records import numbers_of
from tests.algorithm.parts import ask, say
from tests.training.conformance.cases import HELD_OUT, SMALL, STEPS, TASKS, VERL, assert_complete, fit, make_verl, read

pytest.importorskip("verl", reason="verl is in an environment of its own: make test-verl")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600)]

_PATIENCE = 1200
"""Seconds for a run on a busy machine, where it takes ten times as long as on a quiet one."""


def digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def test_rows_advantages_and_probabilities_are_exact_where_a_rollout_has_several_rows(
    untrained_model: Path, tmp_path: Path
) -> None:
    """Rollouts of two calls with rows of their own, one that crashes in each step."""
    turns = itertools.count()

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        place = rollout.metadata or {}
        if (place["task"], place["sample"]) == (1, 2):
            raise RuntimeError("the tool broke")
        first = ask(llm, [say(task)])["content"]
        second = ask(llm, [say(f"{task} {next(turns)}")])["content"]
        return digits(first + second)

    settings: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "learning_rate": 5e-3}
    result = fit(VERL, agent, untrained_model, tmp_path, **settings)
    books = read(tmp_path)
    assert_complete(books, 2)
    for step in result.metrics:
        assert step.update["sampler_difference"] < 1e-4
        assert step.update["steps"] == math.ceil(step.update["rows"] / 16)  # mini-batches of 4 tasks of 4 rollouts
    entries = {record.name: record.data for record in books.of("ledger")}
    groups: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for rollout in books.rollouts:
        entry, place = entries[rollout.rollout_id], rollout.metadata or {}
        if entry["reward"] is not None:
            groups.setdefault((place["step"], place["task"]), []).append(entry)
    learned = 0
    for group in groups.values():  # GRPO's advantage (arXiv:2402.03300, section 4.1.2), once per rollout
        rewards = [entry["reward"] for entry in group]
        middle, spread = statistics.mean(rewards), statistics.stdev(rewards)
        for entry in group:
            for call in entry["calls"]:
                if call["ending"] == "trained":
                    learned += 1
                    assert call["advantage"] == pytest.approx((entry["reward"] - middle) / (spread + 1e-6), abs=1e-5)
    assert learned == sum(step.calls_trained for step in result.metrics) > 0
    for entry in entries.values():
        _check_tokens(entry)
    saved = tmp_path / "run" / "verl" / "global_step_1" / "actor" / "huggingface"
    first = [entries[rollout.rollout_id] for rollout in books.rollouts if (rollout.metadata or {})["step"] == 1]
    update = result.metrics[0].update
    assert update["update_kl"] == pytest.approx(_moved(first, saved), rel=1e-2)
    assert update["update_kl"] != pytest.approx(update["approx_kl"], rel=0.1)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "verl.json").exists()


def _moved(entries: list[dict[str, Any]], saved: Path) -> float:
    """Return the estimated divergence of the weights before an update from those after it, over all trained tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    moved: list[float] = []
    for row in (numbers_of(row) for entry in entries for row in entry.get("rows", [])):
        tokens = torch.tensor([row["tokens"]])
        with torch.no_grad():
            every = model(tokens).logits[0].log_softmax(dim=-1)
        places = [place for place, trained in enumerate(row["mask"]) if trained]
        after = [float(every[place - 1, tokens[0, place]]) for place in places]
        moved += [math.exp(b - a) - 1 - (b - a) for a, b in zip(row["trainer_logprobs"], after, strict=True)]
    return statistics.mean(moved)


def _check_tokens(entry: dict[str, Any]) -> None:
    """The record holds the inputs of VERL's loss for each trained token, and nothing of its internals."""
    trained = [call for call in entry["calls"] if call["ending"] == "trained"]
    rows = [(row, numbers_of(row)) for row in entry.get("rows", [])]
    assert {row["row"] for row, _ in rows} == {call["row"] for call in trained}
    assert sum(len(columns["advantage"]) for _, columns in rows) == sum(call["tokens"] for call in trained)
    for _, columns in rows:
        assert set(columns) == {"tokens", "mask", "engine_logprobs", "trainer_logprobs", "entropy", "advantage"}
        assert list(columns["trainer_logprobs"]) == pytest.approx(list(columns["engine_logprobs"]), abs=1e-4)
        assert list(columns["advantage"]) == pytest.approx([trained[0]["advantage"]] * sum(columns["mask"]), abs=1e-6)
        assert all(0 < value < 12 for value in columns["entropy"])
        assert all(value < 0 for value in columns["engine_logprobs"])


def test_what_teaches_nothing_moves_no_weights_and_several_workers_serve(untrained_model: Path, tmp_path: Path) -> None:
    """Step 1 leaves one task a lone rollout; in step 2 all rewards are equal."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        place = rollout.metadata or {}
        if place["step"] == 1 and place["task"] == 0 and place["sample"]:
            raise RuntimeError("the tool broke")
        reply = ask(llm, [say(task)])["content"]
        return 0.9 if place["step"] == 2 else digits(reply) + place["sample"] / 10

    settings: dict[str, Any] = {"max_steps": 3, "workers": 2, "record_tokens": "none"}
    result = fit(VERL, agent, untrained_model, tmp_path, **settings)
    first, second, third = result.metrics
    assert (first.calls_trained, first.calls_excluded) == (12, {"no_group": 1})
    assert (second.calls_trained, second.calls_excluded) == (0, {"equal_rewards": 16})
    assert [step.update["steps"] for step in result.metrics] == [1, 0, 1]
    assert third.calls_trained == 16
    assert result.steps == 2
    books = read(tmp_path)
    assert {call.weight_version for call in books.calls} == {0, 1}
    assert not any("rows" in record.data for record in books.of("ledger"))


def test_adapters_learn_are_served_and_are_in_the_model_that_is_left(untrained_model: Path, tmp_path: Path) -> None:
    """LoRA, with a validation after each step: VERL hands the engine the adapters alone."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        return digits(ask(llm, [say(task)])["content"]) + ((rollout.metadata or {}).get("sample") or 0) / 10

    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    settings: dict[str, Any] = {"max_steps": 2, "eval_steps": 1, "learning_rate": 5e-3}
    settings["verl"] = {f"actor_rollout_ref.model.{name}": value for name, value in lora.items()}
    result = fit(VERL, agent, untrained_model, tmp_path, held_out=HELD_OUT, **settings)
    assert [step.update["sampler_difference"] < 1e-4 for step in result.metrics] == [True, True]
    measured = [(each.step, each.sampling) for each in result.evaluations]
    assert measured == [(0, "sampled"), (0, "greedy"), (1, "sampled"), (2, "sampled"), (2, "greedy")]

    from transformers import AutoModelForCausalLM

    model, loading_info = AutoModelForCausalLM.from_pretrained(result.model_path, output_loading_info=True)
    assert (set(loading_info["missing_keys"]), set(loading_info["unexpected_keys"])) == (set(), set())
    before = AutoModelForCausalLM.from_pretrained(untrained_model).state_dict()
    changed = {name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])}
    assert any(".q_proj." in name for name in changed)


def test_gradients_that_are_not_finite_change_nothing_and_end_the_run_after_three(
    untrained_model: Path, tmp_path: Path
) -> None:
    """VERL then takes no step of its optimizer; the records say so."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        return digits(ask(llm, [say(task)])["content"]) + (rollout.metadata or {})["sample"] / 10

    infinite = {"actor_rollout_ref.actor.entropy_coeff": 1e39}  # in float32
    with pytest.raises(agl.NonFiniteLossError, match="in 3 steps in a row"):
        fit(VERL, agent, untrained_model, tmp_path, max_steps=5, verl=infinite)
    books = read(tmp_path)
    updates = [(line["update"]["steps"], line["update"]["skipped_steps"]) for line in books.lines]
    assert updates == [(0, 1)] * 3
    assert {call["reason"] for call in books.endings()} == {"step_skipped"}
    assert {call.weight_version for call in books.calls} == {0}


def test_ctrl_c_leaves_no_process_and_the_run_goes_on_from_verls_checkpoint(
    untrained_model: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.training.conformance.program", "VERL", str(untrained_model)]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*command, str(tmp_path)], **streams)

    first, end = start(), time.monotonic() + _PATIENCE
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):  # another process writes the file
        assert first.poll() is None, first.stdout and first.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGINT)
    output, _ = first.communicate(timeout=_PATIENCE)
    assert first.returncode != 0, output
    assert 2 <= len(read(tmp_path).lines) < STEPS, output
    assert _are_gone(), _processes_of_ray()
    for starts in (2, 3):  # the third start has nothing left to do: the same result, and no Ray
        again = start()
        output, _ = again.communicate(timeout=_PATIENCE)
        assert again.returncode == 0, output
        assert_complete(read(tmp_path), STEPS, starts=starts)
        assert _are_gone(), _processes_of_ray()


def _are_gone() -> bool:
    """Return whether all processes of a program's Ray end within the time that Ray takes for it."""
    end = time.monotonic() + 120
    while _processes_of_ray():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _processes_of_ray() -> list[str]:
    """Return the processes of Ray that run VERL on the processor."""
    commands: list[str] = []
    for place in Path("/proc").iterdir():
        try:
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (place / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if b"VERL_PLATFORM=cpu" in environment and ("ray" in command or "gcs" in command):
            commands.append(command[:200])
    return commands


def test_an_error_in_verls_processes_ends_the_run_with_its_words(untrained_model: Path, tmp_path: Path) -> None:
    settings = {"verl": {"actor_rollout_ref.rollout.name": "no_such_engine"}}
    with pytest.raises(RuntimeError, match=r"VERL ended with an error: .*no_such_engine"):
        fit(VERL, lambda task: 0.0, untrained_model, tmp_path, **settings)
    assert _are_gone(), _processes_of_ray()


def test_iterations_are_steps(untrained_model: Path, tmp_path: Path) -> None:
    algorithm = make_verl(**{**SMALL, "model": untrained_model, "output_dir": tmp_path, "max_steps": 2})
    assert (algorithm.settings.steps(len(TASKS)), algorithm.with_iterations(5).settings.steps(len(TASKS))) == (2, 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"'actor_rollout_ref': \{'model': \{'path'"),
        ({"algorithm.adv_estimator": "gae"}, r"adv_estimator='gae' is not supported by agl.VERL: .*must be 'grpo'"),
        ({"actor_rollout_ref.rollout": {"top_p": 0.9, "temperature": 0.7}}, r"set temperature to 1"),
        ({"actor_rollout_ref.rollout.top_p": 0}, r"top_p must be a number above 0"),
        ({"actor_rollout_ref.rollout.repetition_penalty": 1.5}, r"supports only top_p and top_k"),
        ({"trainer": {"use_v1": False}}, r"use_v1=False is not supported by agl.VERL"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(agl.BadRequestError, match=says):
        agl.VERL({"actor_rollout_ref.model.path": "m", **settings} if settings else {})


def test_truncation_is_published_and_the_probabilities_are_those_before_it() -> None:
    plain = agl.VERL({"actor_rollout_ref.model.path": "m"})
    cut = agl.VERL({"actor_rollout_ref.model.path": "m", "actor_rollout_ref.rollout": {"top_p": 0.9, "top_k": 20}})
    assert (plain.settings.as_grpo(1).reshaping, plain.config.actor_rollout_ref.rollout.logprobs_mode) == (
        {}, "processed_logprobs",
    )  # fmt: skip
    assert (cut.settings.as_grpo(1).reshaping, cut.config.actor_rollout_ref.rollout.logprobs_mode) == (
        {"top_p": 0.9, "top_k": 20}, "raw_logprobs",
    )  # fmt: skip


def test_the_settings_of_the_script_for_a_gpu_are_taken(untrained_model: Path, tmp_path: Path) -> None:
    from bench.pretrained.on_gpu import verl_settings

    settings = agl.VERL(verl_settings(untrained_model, tmp_path, seed=3)).config
    assert settings.actor_rollout_ref.model.lora_rank == 16
    assert (settings.data.seed, settings.trainer.total_training_steps) == (3, 6)
