"""Whole runs with the members of the GRPO family: dimensions, refilled groups, cut replies, penalties."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import ask, fit, metrics_of, rollouts_of, say, two_turns, wants_digits

BASE: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "num_generations": 4}


@agl.rollout
def two_dimensions(task: str, llm: agl.LLM) -> dict[str, float]:
    """The primary reward is always the same; the other one has a spread."""
    reply = ask(llm, [say(task)])["content"]
    return {"said": 1.0, "digits": float(sum(map(str.isdigit, reply))) + len(reply) / 100}


@pytest.mark.parametrize(
    ("weights", "options", "trains"),
    [
        (None, {}, False),
        ({"said": 1.0}, {}, False),
        ({"digits": 1.0}, {}, True),
        ({"said": 1.0, "digits": -0.5}, {"multi_objective_aggregation": "normalize_then_sum"}, True),
    ],
)
def test_dimensions_of_a_reward_count_by_their_weights(
    weights: dict[str, float] | None, options: dict[str, Any], trains: bool, untrained_model: Path, tmp_path: Path
) -> None:
    runner = {"type": "agentlightning.LitAgentRunner", "reward_dimensions": ["said", "digits"], "concurrency": 4}
    settings = {"reward_weights": weights, "trainer_runner": runner, "model": untrained_model, **BASE, **options}
    [line] = metrics_of(fit(two_dimensions, ["a", "b"], output_dir=tmp_path / "run", **settings))
    assert (line["calls_trained"] > 0) == trains
    assert line["mean_reward"] == 1.0
    assert trains or line["calls_excluded"] == {"equal_rewards": 8}


def test_a_weight_of_a_dimension_that_no_rollout_has_ends_the_run_by_name(
    untrained_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(agl.BadRequestError, match=r"\['colour'\]; rollout ro-\w+ has"):
        fit(
            wants_digits, ["a"], model=untrained_model, output_dir=tmp_path, **{**BASE, "reward_weights": {"colour": 1}}
        )


@pytest.mark.parametrize("curriculum", ["none", "solve_rate"])
async def test_groups_of_equal_rewards_are_replaced_up_to_the_bound_and_stay_in_the_ledger(
    untrained_model: Path, tmp_path: Path, curriculum: str
) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        reply = ask(llm, [say(task)])["content"]
        return 1.0 if task.startswith("same") else float(len(reply)) + sum(map(ord, reply)) / 1e6

    store = agl.InMemoryLightningStore()
    tasks = [f"same {i}" for i in range(5)] + ["other"]
    settings = {**BASE, "max_num_gen_batches": 4, "seed": 1, "curriculum": curriculum}
    result = fit(agent, tasks, model=untrained_model, output_dir=tmp_path / "run", store=store, **settings)
    [line] = metrics_of(result)
    rollouts = await rollouts_of(store)
    sampled = Counter(str(rollout.input) for rollout in rollouts)
    assert set(sampled.values()) == {4}  # no task twice within the step
    assert len(sampled) > 2
    places = [(rollout.metadata or {})["task"] for rollout in rollouts]
    assert sorted(places) == sorted([*range(len(sampled))] * 4)
    assert line["calls_captured"] == len(rollouts) == line["calls_trained"] + line["calls_excluded"]["equal_rewards"]
    assert len(sampled) >= 5  # two at first, and one or two in each of three rounds
    figures = {"solve_rate": 0.5, "seen": len(sampled) / 6, "most_groups": 1}
    assert line["curriculum"] == (figures if curriculum == "solve_rate" else {})
    again = fit(agent, tasks, model=untrained_model, output_dir=tmp_path / "again", **{**settings, "seed": 1})
    assert metrics_of(again)[0]["calls_captured"] == line["calls_captured"]  # the same tasks in their place


def test_a_rollout_with_a_cut_reply_is_left_out_of_the_loss_and_stays_in_its_group(
    untrained_model: Path, tmp_path: Path
) -> None:
    settings = {**BASE, "max_completion_length": 2, "model": untrained_model}
    [plain] = metrics_of(fit(two_turns, ["a", "b"], output_dir=tmp_path / "plain", **settings))
    assert "over_length" not in plain["calls_excluded"]
    masked = fit(two_turns, ["a", "b"], output_dir=tmp_path / "run", mask_truncated_completions=True, **settings)
    [line] = metrics_of(masked)
    assert line["calls_excluded"]["over_length"] > 0
    assert line["calls_captured"] == line["calls_trained"] + sum(line["calls_excluded"].values())


def test_tokens_of_low_entropy_are_left_out_of_the_loss_of_a_run(untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**BASE, "model": untrained_model, "top_entropy_quantile": 0.2}
    [line] = metrics_of(fit(wants_digits, ["a", "b"], output_dir=tmp_path / "run", **settings))
    assert 0.7 < line["update"]["masked_fraction"] < 0.85


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "gspo", "advantage": "rloo"},
        {"loss_type": "cispo", "epsilon_high": 5.0, "advantage": "reinforce_plus_plus", "num_generations": 1},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.1, "lora": {"r": 4}},
        {"loss_type": "grpo", "beta": 0.1, "use_kl_in_reward": True, "scale_rewards": "batch"},
        {"importance_sampling_correction": True, "entropy_coef": 0.01, "soft_punish_cache": 2},
        {"loss_type": "sapo", "advantage": "maxrl"},
        {"loss_type": "luspo", "top_entropy_quantile": 0.5, "minibatch_rollouts": 6},
        {"loss_type": "vespo", "max_staleness": 1},
        {"loss_type": "dppo", "kl_tau": 1e-3, "off_policy_mask_threshold": 0.5},
        {"loss_type": "ipo", "max_tokens_per_forward": 40},
    ],
    ids=lambda case: " ".join(map(str, case.values())),
)
def test_members_of_the_family_train(options: dict[str, Any], untrained_model: Path, tmp_path: Path) -> None:
    settings = {**BASE, "max_steps": 2, "batch_size": 4, "num_iterations": 2, **options}
    result = fit(wants_digits, list("abcd"), model=untrained_model, output_dir=tmp_path / "run", **settings)
    assert result.steps == 2
    lines = metrics_of(result)
    assert [line["update"]["skipped_steps"] for line in lines] == [0, 0]
    assert ("beta" in options and "use_kl_in_reward" not in options) == (lines[1]["update"]["kl"] > 0)
