"""The settings of GRPO are checked when they are given; a wrong one is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("learning_rte", "Did you mean 'learning_rate'"),
        ("numgenerations", "Did you mean 'num_generations'"),
        ("max_completion", "Did you mean 'max_completion_length'"),
        ("steps", "Use max_steps"),
        ("group_size", "Use num_generations"),
        ("epochs", "Use num_iterations"),
        ("clip", "Use epsilon and epsilon_high"),
        ("schedule", "Use lr_scheduler_type"),
        ("scale", "Use scale_rewards"),
        ("max_new_tokens", "Use max_completion_length"),
        ("eval_every", "Use eval_steps"),
        ("importance_sampling_level", "Use loss_type='gspo'"),
        ("vllm_importance_sampling_mode", "Use importance_sampling_mode"),
        ("generation_kwargs", "Use top_p, top_k, min_p and repetition_penalty"),
        ("sampler", "Use curriculum"),
        ("zzz", "The settings are: .*model, max_steps, batch_size"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_right_name(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=f"GRPO has no setting '{name}'. {text}"):
        agl.GRPO(model="m", **{name: 1})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_steps", 2.5, "a whole number of at least 1; got 2.5"),
        ("max_steps", True, "a whole number"),
        ("batch_size", "16", "a whole number of at least 1; got '16'"),
        ("learning_rate", 0, "a number above 0; got 0"),
        ("learning_rate", float("nan"), "a number above 0; got nan"),
        ("learning_rate", float("inf"), "a number above 0; got inf"),
        ("temperature", 0, "a number of at least 0.01 and at most 2; got 0"),
        ("temperature", 2.5, "a number of at least 0.01 and at most 2; got 2.5"),
        ("top_p", 0, "a number above 0 and at most 1; got 0"),
        ("top_p", "0.9", "a number above 0 and at most 1; got '0.9'"),
        ("top_k", -1, "a whole number of at least 0; got -1"),
        ("top_k", 1.5, "a whole number"),
        ("min_p", 1.5, "a number of at least 0 and at most 1"),
        ("min_p", float("nan"), "a number of at least 0 and at most 1"),
        ("repetition_penalty", 0, "a number of at least 0.01 and at most 10; got 0"),
        ("repetition_penalty", None, "a number of at least 0.01"),
        ("eval_steps", -1, "a whole number of at least 0; got -1"),
        ("seed", 1.5, "a whole number; got 1.5"),
        ("epsilon", 1.0, "a number above 0 and below 1; got 1.0"),
        ("epsilon", (0.2, 0.28), "a number above 0 and below 1"),
        ("scale_rewards", "grop", "one of 'group', 'batch', 'none'; got 'grop'. Did you mean 'group'"),
        ("aggregation", "tokens", "one of 'token', .*; got 'tokens'. Did you mean 'token'"),
        ("lr_scheduler_type", "linaer", "one of 'constant', .*; got 'linaer'. Did you mean 'linear'"),
        ("progress", "fancy", "one of 'auto', 'live', 'plain', 'none'; got 'fancy'"),
        ("shuffle_dataset", 1, ""),
        ("curriculum", "solverate", "one of 'none', 'solve_rate'; got 'solverate'. Did you mean 'solve_rate'"),
        ("resource_name", "", "a non-empty string"),
        ("device", None, "a non-empty string"),
        ("model", 3, "a non-empty string"),
        ("model", "", "a non-empty string"),
        *((name, 0, "") for name in ("max_steps", "num_generations", "num_iterations", "minibatch_rollouts")),
        *((name, 0, "") for name in ("max_completion_length", "engine_batch", "epsilon", "epsilon_high")),
        *((name, -1, "") for name in ("max_grad_norm", "step_timeout_seconds", "rollout_timeout_seconds")),
        ("staleness_clip_max", 0, "a number above 0; got 0"),
        *(("max_drift", value, "a number of at least 0 and at most 1; got") for value in (-0.1, 1.5, "much")),
        *(("max_rows_per_rollout", value, f"a whole number of at least 1; got {value!r}") for value in (0, -1, "x")),
        *(("max_staleness", value, "a whole number of at least 0 and at most 64") for value in (-1, 65, 0.5, True)),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, text: str) -> None:
    with pytest.raises(agl.BadRequestError, match=f"^{name} must be {text}"):
        agl.GRPO(**{"model": "m", name: value})


_GDPO = {"multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        ({"num_generations": 1}, "num_generations=1 and advantage='grpo': a group needs at least 2 rollouts"),
        ({"loss_type": "cispo"}, "loss_type='cispo' and epsilon_high=0.28: .* such as 5.0"),
        ({"loss_type": "gspo", "delta": 3.0}, "loss_type='gspo' and delta=3.0"),
        ({"delta": 1.1}, "delta=1.1 and epsilon_high=0.28"),
        ({"loss_scale_factor": 9}, "loss_scale_factor=9 and aggregation='token'"),
        ({"use_kl_in_reward": True}, "use_kl_in_reward=True and beta=0"),
        ({"activation_offloading": True}, "activation_offloading=True and device='cpu'"),
        ({"load_in_4bit": True}, "load_in_4bit=True and lora=None"),
        (
            {"load_in_4bit": True, "lora": {"r": 4}, "use_vllm": True, "device": "cuda"},
            "load_in_4bit=True and use_vllm",
        ),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4': set load_in_4bit"),
        ({"sync_ref_model": True}, "sync_ref_model=True and beta=0"),
        ({"beta": 0.1, "ref_model_sync_steps": 8}, "only sync_ref_model=True uses them"),
        ({"loss_type": "gspo", "beta": 0.1}, r"loss_type='gspo' and use_bias_correction_kl=True \(with beta=0.1\)"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "kl_estimator='k1' and use_bias"),
        ({"importance_sampling_clip_min": 4.0}, "sampling_clip_min=4.0 and importance_sampling_clip_max=3.0"),
        ({"advantage": "rloo", "scale_rewards": "group"}, "advantage='rloo' and scale_rewards='group'"),
        ({"advantage": "maxrl", "scale_rewards": True}, "advantage='maxrl' and scale_rewards='group'"),
        ({"advantage": "maxrl", "soft_punish_cache": 2}, "advantage='maxrl' and soft_punish_cache"),
        ({"advantage": "maxrl", "beta": 0.1, "use_kl_in_reward": True}, "use_kl_in_reward=True and advantage='maxrl'"),
        (_GDPO, "'normalize_then_sum' and reward_weights=None"),
        (
            {"advantage": "reinforce_plus_plus", "beta": 0.1, "use_kl_in_reward": True},
            "use_kl_in_reward=True and advantage='reinforce_plus_plus'",
        ),
        ({"soft_punish_cache": 600}, "soft_punish_cache=600 and max_completion_length=512"),
        (
            {"advantage": "reinforce_plus_plus", "max_num_gen_batches": 2},
            "max_num_gen_batches and advantage='reinforce_plus_plus'",
        ),
        ({"max_staleness": 1, "deterministic": True}, "max_staleness=1 and deterministic=True: the weights that serve"),
        ({"max_staleness": 1, "use_kl_in_reward": True, "beta": 0.1}, "max_staleness=1 and use_kl_in_reward=True"),
        ({"max_staleness": 1, "max_num_gen_batches": 2}, "max_staleness=1 and max_num_gen_batches=2"),
        (
            {"max_staleness": 1, "importance_sampling_correction": True},
            "importance_sampling_mode='sequence_mask' .* use 'token_truncate'",
        ),
        (
            {"max_staleness": 1, "batch_size": 257},
            "max_staleness=1 and batch_size=257: 514 groups would be in progress, .* at most 512",
        ),
        ({"max_staleness": 1, "curriculum": "solve_rate"}, "max_staleness=1 and curriculum='solve_rate'"),
        ({"shuffle_dataset": False, "curriculum": "solve_rate"}, "curriculum='solve_rate' and shuffle_dataset=False"),
        ({"use_vllm": True, "policies": ["a", "b"]}, ".*one vLLM server serves one policy"),
    ],
)
def test_a_pair_that_does_not_go_together_is_refused_by_name(settings: dict[str, Any], pair: str) -> None:
    with pytest.raises(agl.BadRequestError, match=f"cannot be combined: .*{pair}"):
        agl.GRPO(model="m", **settings)


def test_scale_rewards_takes_the_two_values_that_trl_takes() -> None:
    assert [agl.GRPO(model="m", scale_rewards=value).settings.scale_rewards for value in (True, False)] == [
        "group",
        "none",
    ]


def test_token_wise_correction_several_policies_and_a_penalty_in_the_loss_go_together_with_staleness() -> None:
    agl.GRPO(model="m", max_staleness=2, importance_sampling_correction=True, importance_sampling_mode="token_mask")
    agl.GRPO(model="m", max_staleness=2, beta=0.1, policies=["planner", "solver"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        *(({"reward_weights": weights}, "reward_weights") for weights in ({}, ["a"], {"a": "b"}, {"a": float("nan")})),
        (
            {"curriculum": "solve_rate", "group_reward": agl.RankingReward(lambda messages: "")},
            "a group_reward that ranks cannot be combined",
        ),
        ({"lora": 16}, "lora must be a dict for peft.LoraConfig"),
        ({"model": None}, "model must be the folder"),
        ({"model": None, "policies": {"a": {"model": "n"}, "b": {}}}, "or each of policies must have a model"),
        ({"policies": "ab"}, "policies must be a list of names"),
        ({"policies": []}, "policies must be a list of names"),
        ({"policies": ["a b"]}, "'a b' is not a valid name"),
        ({"policies": [3]}, "3 is not a valid name"),
        ({"policies": {"a": None}}, r"policies\['a'\] must be a dict"),
        (
            {"policies": {"a": {"lerning_rate": 1}}},
            "'lerning_rate': did you mean 'learning_rate'",
        ),
        ({"policies": {"a": {"batch_size": 1}}}, "valid settings are model, lora"),
        ({"policies": {"a": {"learning_rate": -1.0}}}, r"policies\['a'\]: learning_rate must be a number above 0"),
    ],
)
def test_what_is_no_mapping_of_names_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(agl.BadRequestError, match=text):
        agl.GRPO(**{"model": "m", **settings})


def test_each_policy_has_what_it_names_and_else_what_the_run_has() -> None:
    policies = {"a": {"model": Path("n")}, "b": {"learning_rate": 1e-4}}
    own = agl.GRPO(model="m", learning_rate=1e-3, policies=policies).settings.by_policy()
    assert [(name, one.model, one.learning_rate) for name, one in own.items()] == [("a", "n", 1e-3), ("b", "m", 1e-4)]
    assert agl.GRPO(model="m").settings.by_policy().keys() == {None}
    assert agl.GRPO(policies={"a": {"model": "n"}, "b": {"model": "o"}}).settings.model == "n"


def test_paths_may_be_given_as_paths_and_the_settings_are_json() -> None:
    settings = agl.GRPO(model=Path("m"), output_dir=Path("out"), lora={"r": 4}).settings
    assert settings.model == "m"
    assert json.loads(json.dumps(settings.as_json()))["output_dir"] == "out"


def test_a_linear_schedule_falls_from_the_learning_rate_towards_zero() -> None:
    settings = agl.GRPO(model="m", learning_rate=0.4, max_steps=4, lr_scheduler_type="linear").settings
    assert [settings.learning_rate_at(step) for step in (1, 2, 3, 4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert agl.GRPO(model="m", learning_rate=0.4).settings.learning_rate_at(99) == 0.4


def test_the_signature_names_every_setting_with_its_default() -> None:
    parameters = inspect.signature(agl.GRPO).parameters
    assert next(iter(parameters)) == "model"
    assert parameters["num_generations"].default == 8
    assert parameters["epsilon"].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_trainer_takes_the_short_name_with_settings_and_refuses_an_unknown_one() -> None:
    trainer = agl.Trainer(algorithm={"type": "grpo", "model": "m", "max_steps": 3})
    assert isinstance(trainer.algorithm, agl.GRPO)
    assert trainer.algorithm.settings.max_steps == 3
    with pytest.raises(TypeError, match="num_generations"):
        agl.Trainer(algorithm={"type": "grpo", "model": "m", "numgenerations": 3})
