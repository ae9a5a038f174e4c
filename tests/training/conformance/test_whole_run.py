"""Records and files of a whole run, whatever its agent does: figures, ledger, evaluations, model, alarms."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentlightning as agl
from agentlightning.errors import GoneError
from agentlightning.training.ledger_records import check_ledger, numbers_of
from agentlightning.training.replay import replay
from agentlightning.training.result import GRPOResult
from tests.training.conformance.cases import (
    ALL,
    EXCLUDED,
    GRPO,
    HELD_OUT,
    PPO,
    RUN,
    SFT,
    STEPS,
    TASKS,
    TRL,
    Case,
    Digits,
    assert_complete,
    each,
    fit,
    read,
    stored,
)
from tests.training.conformance.conftest import Whole


@each(*ALL)
def test_every_step_is_in_metrics_result_and_store(case: Case, whole: Whole) -> None:
    books, result = whole.books, whole.result
    assert isinstance(result, GRPOResult)
    assert result.output_dir == whole.folder / "run"
    assert result.steps == STEPS
    assert_complete(books, STEPS)
    assert [record.data for record in books.of("step")] == books.lines
    assert books.run.algorithm == case.name.partition("-")[0]
    for line, figures in zip(books.lines, result.metrics, strict=True):
        assert (line["step"], line["calls_trained"]) == (figures.step, figures.calls_trained)
        assert set(line["seconds"]) == {"generate", "wait", "train"}
        assert line["cpu_seconds"]["store_and_gateway"] >= 0
        assert math.isfinite(line["update"]["loss"])
        assert line["update"]["steps"] > 0
        assert line["update"].get("first_ratio_error", 0.0) < 1e-3, "engine and learner are the same weights"


@each(*ALL)
def test_the_ledger_says_of_every_call_what_became_of_it(case: Case, whole: Whole) -> None:
    books, roles = whole.books, len(case.roles)
    counted = sum(line["calls_captured"] for line in books.lines) + sum(whole.result.late_calls.values())
    assert counted == len(books.calls) == STEPS * (15 * roles + 1)
    assert stored(whole.folder, lambda store: check_ledger(store, RUN)).adds_up
    for line in books.lines:
        excluded = line["rollouts_excluded"]
        assert {name: excluded[name] for name in EXCLUDED} == EXCLUDED
        assert set(excluded) - set(EXCLUDED) <= {"no_group", "equal_rewards", "not_chosen"}
        assert (line["rollouts_done"], line["rollouts_failed"]) == (12, 4)
        calls = line["calls_excluded"]
        assert calls["infrastructure_fault"] == 3 * roles
        assert calls.get("no_group", 0) == (roles if case.compares else 0), "one of its group is left"
        assert (calls["no_reward"], calls["refused_call"], calls["upstream_error"]) == (roles, roles, 1)
        assert ("not_chosen" in calls) == (case is SFT)
        assert line["calls_trained"] > 0


@each(*ALL)
def test_a_failed_rollout_is_no_low_reward(case: Case, whole: Whole) -> None:
    by_end: dict[str, set[tuple[Any, Any]]] = {}
    groups: dict[Any, list[Any]] = {}
    for record in whole.books.of("ledger"):
        entry = record.data
        by_end.setdefault(str(entry["verdict"]), set()).add((entry["reward"] is None, entry.get("advantage") is None))
        if entry["verdict"] is None and entry["calls"]:
            groups.setdefault((record.step, entry["group"]), []).append(entry)
    assert by_end["infrastructure_fault"] == by_end["no_reward"] == {(True, True)}
    rewards = [entry["reward"] for group in groups.values() for entry in group]
    assert rewards.count(-1.0) == STEPS, "a fault of the policy counts with the reward that was said"
    assert max(rewards) < 99.0, "what made no call teaches nothing"
    if not case.compares:
        return
    for group in groups.values():
        advantages = [(entry["reward"], call["advantage"]) for entry in group for call in entry["calls"][:1]]
        if all(advantage is None for _, advantage in advantages):
            continue  # alone, or of equal rewards
        assert sum(advantage for _, advantage in advantages) == pytest.approx(0, abs=1e-4), "they alone are compared"
        assert sorted(advantages) == sorted(advantages, key=lambda one: one[1])


@each(*ALL)
def test_a_call_is_stamped_with_the_weights_that_served_it(case: Case, whole: Whole) -> None:
    steps = {rollout.rollout_id: (rollout.metadata or {})["step"] for rollout in whole.books.rollouts}
    versions = {(steps[call.ref.rollout_id], call.weight_version) for call in whole.books.calls}
    assert versions - {(step, None) for step in steps.values()} == {
        (step, max(0, step - 1 - case.staleness)) for step in range(1, STEPS + 1)
    }
    trained = [call for call in whole.books.endings() if call["ending"] == "trained"]
    assert {call["step"] - 1 - call["weight_version"] for call in trained} <= {0, case.staleness}
    ahead = [line["flight"] for line in whole.books.lines]
    if case.staleness:
        assert [flight["in_flight"] for flight in ahead] == [8, 8, 8, 4]
        assert [flight["max_staleness"] for flight in ahead] == [0, 1, 1, 1]
        assert [flight["taken"] for flight in ahead] == [
            [[step, task, None] for task in range(4)] for step in range(1, 5)
        ]
    else:
        assert ahead == [{}] * STEPS


@each(*ALL)
def test_log_probabilities_are_those_of_a_forward_pass_of_the_weights(
    case: Case, whole: Whole, untrained_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(untrained_model).eval()
    calls = [call for call in whole.books.calls if call.weight_version == 0 and call.completion_token_ids]
    assert len(calls) >= 15 * len(case.roles)
    for call in calls:
        tokens = torch.tensor([[*call.prompt_token_ids, *call.completion_token_ids]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, len(call.prompt_token_ids) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(call.completion_token_ids)[:, None])[:, 0]
        assert call.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@each(*(case for case in ALL if case.records_tokens))
def test_a_recorded_token_is_that_of_its_call(case: Case, whole: Whole) -> None:
    calls = {call.ref: call for call in whole.books.calls}
    trained = 0
    for record in whole.books.of("ledger"):
        for row in record.data.get("rows", ()):
            refs = [
                (record.name, c["attempt_id"], c["call_id"]) for c in record.data["calls"] if c["row"] == row.get("row")
            ]
            own, numbers = [calls[ref] for ref in refs], numbers_of(row)
            tokens = [token for token, mask in zip(numbers["tokens"], numbers["mask"], strict=True) if mask]
            assert tokens == [token for call in own for token in call.completion_token_ids]
            logprobs = [logprob for call in own for logprob in call.logprobs or ()]
            assert list(numbers["engine_logprobs"]) == pytest.approx(logprobs, rel=1e-6)
            if not case.staleness:
                assert list(numbers["trainer_logprobs"]) == pytest.approx(logprobs, abs=1e-3)
            trained += len(own)
    assert trained == sum(line["calls_trained"] for line in whole.books.lines)


@each(*ALL)
def test_held_out_tasks_are_measured_before_between_and_after_and_never_trained(case: Case, whole: Whole) -> None:
    books, between = whole.books, [] if case.staleness else [(2, "sampled")]
    expected = [(0, "sampled"), (0, "greedy"), *between, (STEPS, "sampled"), (STEPS, "greedy")]
    evaluations = whole.result.evaluations
    assert [(e.step, e.sampling) for e in evaluations] == expected
    assert books.evaluations() == [
        (step, f"held_out_{sampling}", e.rewards) for (step, sampling), e in zip(expected, evaluations, strict=True)
    ]
    assert [rollout.input for rollout in books.held_out] == HELD_OUT * len(expected)
    assert {rollout.input for rollout in books.rollouts} == set(TASKS)
    assert not {call.ref for call in books.held_out_calls} & {call.ref for call in books.calls}
    sampled = [e.mean_reward for e in evaluations if e.sampling == "sampled"]
    assert (books.run.best.name, books.run.best.value) == ("held_out_sampled", max(sampled))
    held_out = [line["held_out"] for line in books.lines]
    assert held_out == [None, None if case.staleness else sampled[1], None, sampled[-1]]


@each(*ALL)
def test_the_limits_of_the_trainer_are_recorded_with_every_rollout(case: Case, whole: Whole) -> None:
    expected = agl.RolloutConfig(max_attempts=2, retry_condition=["unresponsive"], timeout_seconds=90.0)
    for rollouts in (whole.books.rollouts, whole.books.held_out):
        assert {rollout.config == expected for rollout in rollouts} == {True}


@each(*ALL)
def test_the_folder_holds_the_settings_and_a_model_of_transformers_that_has_learned(
    case: Case, whole: Whole, untrained_model: Path
) -> None:
    run = whole.folder / "run"
    config = json.loads((run / "config.json").read_text())
    assert case.section in config
    assert str(untrained_model) in json.dumps(config)
    assert {"python", "torch", "transformers"} <= set(config["versions"])
    assert whole.books.run.config["trainer"]["val_tasks"] == len(HELD_OUT)
    before = AutoModelForCausalLM.from_pretrained(untrained_model).state_dict()
    for folder in [run / "model" / role for role in case.roles] if len(case.roles) > 1 else [run / "model"]:
        prompt = [{"role": "user", "content": "one"}]
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template(prompt, tokenize=False) == "<user>one"
        after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before)
    checkpoints = {path.name for path in (run / "checkpoints").iterdir()}
    assert checkpoints == {"checkpoint-2", "checkpoint-4"}
    assert [record.step for record in whole.books.of("checkpoint")] == [2, 4]


@each(*ALL)
def test_an_alarm_is_recorded_once_with_the_settings_to_try_and_trackers_hear_of_everything(
    case: Case, whole: Whole
) -> None:
    alarms = [record for record in whole.books.of("alarm") if record.name == "policy_shift"]
    assert [record.data["state"] for record in alarms] == ["raised"]
    assert all(case.hint in record.data["what_to_try"] for record in alarms)
    tracker, steps = whole.tracker, range(1, STEPS + 1)
    assert [entry for entry in tracker.told if entry[0] == "step"] == [("step", step, "") for step in steps]
    counts = Counter(kind for kind, _, _ in tracker.told)
    assert counts["evaluation"] == len(whole.result.evaluations)
    assert counts["alarm"] == len(whole.books.of("alarm"))
    assert counts["ledger"] == 0
    assert tracker.endings[0].model_path == str(whole.folder / "run/model")
    assert tracker.runs[0].config["algorithm"]


@each(*ALL)
def test_a_step_that_is_taken_again_from_its_records_is_the_same_bit_for_bit(case: Case, whole: Whole) -> None:
    for step in (1, STEPS):
        if not case.replays:
            with pytest.raises(GoneError):
                stored(whole.folder, lambda store, step=step: replay(store, RUN, step))
            continue
        report = stored(whole.folder, lambda store, step=step: replay(store, RUN, step))
        assert report.differences == []
        assert report.tokens > 0


@each(GRPO, PPO, SFT, TRL)
def test_tasks_come_in_the_order_of_the_dataset_if_they_are_not_shuffled(
    case: Case, untrained_model: Path, tmp_path: Path
) -> None:
    tasks = [f"task {n}" for n in range(6)]
    fit(case, Digits, untrained_model, tmp_path, tasks=tasks, max_steps=3, shuffle_dataset=False)
    places = {((r.metadata or {})["step"], (r.metadata or {})["task"]): r.input for r in read(tmp_path).rollouts}
    assert [places[place] for place in sorted(places)] == [*tasks, *tasks]


@each(GRPO, PPO, TRL)
def test_a_curriculum_draws_by_what_the_steps_before_earned(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    tasks = [f"task {n}" for n in range(9)]
    fit(case, Digits, untrained_model, tmp_path, tasks=tasks, max_steps=3, curriculum="solve_rate", solved_above=0.1)
    books = read(tmp_path)
    figures = [line["curriculum"] for line in books.lines]
    assert figures[0] == {"solve_rate": 0.5, "seen": 4 / 9, "most_groups": 1}
    assert figures[2]["solve_rate"] != 0.5
    steps: list[set[str]] = [
        {str(r.input) for r in books.rollouts if (r.metadata or {})["step"] == n} for n in (1, 2, 3)
    ]
    assert [len(drawn) for drawn in steps] == [4, 4, 4]
    assert [each["seen"] for each in figures] == [len(set.union(*steps[:n])) / 9 for n in (1, 2, 3)]
