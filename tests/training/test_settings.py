"""The settings of GRPO are checked when they are given; a wrong one is refused by name."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("learning_rte", "learning_rate"),
        ("numgenerations", "num_generations"),
        ("max_completion", "max_completion_length"),
        ("maxstep", "max_steps"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_right_name(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"GRPO has no setting '{name}'. Did you mean '{nearest}'"):
        agl.GRPO(model="m", **{name: 1})


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("steps", "max_steps"),
        ("group_size", "num_generations"),
        ("epochs", "num_iterations"),
        ("clip", "epsilon and epsilon_high"),
        ("schedule", "lr_scheduler_type"),
        ("scale", "scale_rewards"),
        ("max_new_tokens", "max_completion_length"),
        ("eval_every", "eval_steps"),
        ("importance_sampling_level", "loss_type='gspo'"),
        ("vllm_importance_sampling_mode", "importance_sampling_mode"),
    ],
)
def test_an_old_name_is_refused_with_the_one_that_took_its_place(old: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"GRPO has no setting '{old}'. Its name is {name}"):
        agl.GRPO(model="m", **{old: 1})


def test_an_unknown_setting_that_is_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(TypeError, match=r"GRPO has no setting 'zzz'. The settings are: .*model, max_steps, batch_size"):
        agl.GRPO(model="m", zzz=1)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_steps", 0, "max_steps must be a whole number of at least 1; got 0"),
        ("max_steps", -3, "got -3"),
        ("max_steps", 2.5, "max_steps must be a whole number of at least 1; got 2.5"),
        ("max_steps", True, "max_steps must be a whole number"),
        ("batch_size", "16", "batch_size must be a whole number of at least 1; got '16'"),
        ("num_generations", 0, "num_generations must be a whole number of at least 1; got 0"),
        ("num_generations", 1, "num_generations=1 and advantage='grpo': one rollout has nothing to be compared"),
        ("num_iterations", 0, "num_iterations must be"),
        ("minibatch_rollouts", 0, "minibatch_rollouts must be a whole number of at least 1"),
        ("max_completion_length", 0, "max_completion_length must be"),
        ("engine_batch", 0, "engine_batch must be"),
        ("learning_rate", 0, "learning_rate must be a number above 0; got 0"),
        ("learning_rate", float("nan"), "learning_rate must be a number above 0; got nan"),
        ("learning_rate", float("inf"), "learning_rate must be"),
        ("temperature", 0, "temperature must be a number of at least 0.01 and at most 2; got 0"),
        ("temperature", 2.5, "temperature must be"),
        ("max_grad_norm", -1, "max_grad_norm must be"),
        ("step_timeout_seconds", 0, "step_timeout_seconds must be"),
        ("rollout_timeout_seconds", -1, "rollout_timeout_seconds must be"),
        ("eval_steps", -1, "eval_steps must be a whole number of at least 0; got -1"),
        ("eval_steps", "2", "eval_steps must be"),
        ("seed", 1.5, "seed must be a whole number; got 1.5"),
        ("epsilon", 0, "epsilon must be a number above 0 and below 1; got 0"),
        ("epsilon", 1.0, "epsilon must be a number above 0 and below 1; got 1.0"),
        ("epsilon", (0.2, 0.28), "epsilon must be"),
        ("epsilon_high", 0, "epsilon_high must be a number above 0; got 0"),
        ("epsilon_high", "a", "epsilon_high must be"),
        (
            "scale_rewards",
            "grop",
            "scale_rewards must be one of 'group', 'batch', 'none'; got 'grop'. Did you mean 'group'",
        ),
        ("aggregation", "tokens", "aggregation must be one of 'token', .*; got 'tokens'. Did you mean 'token'"),
        (
            "lr_scheduler_type",
            "linaer",
            "lr_scheduler_type must be one of 'constant', 'linear'; got 'linaer'. Did you mean 'linear'",
        ),
        ("progress", "fancy", "progress must be one of 'auto', 'live', 'plain', 'none'; got 'fancy'"),
        ("lora", 16, "lora holds arguments of peft.LoraConfig"),
        ("resource_name", "", "resource_name must be a text that is not empty"),
        ("device", None, "device must be a text"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, text: str) -> None:
    with pytest.raises(agl.BadRequestError, match=text):
        agl.GRPO(model="m", **{name: value})


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo' and epsilon_high=0.28: .* such as 5.0"),
        ({"loss_type": "gspo", "delta": 3.0}, "loss_type='gspo' and delta=3.0"),
        ({"delta": 1.1}, "delta=1.1 and epsilon_high=0.28"),
        ({"loss_scale_factor": 9}, "loss_scale_factor=9 and aggregation='token'"),
        ({"use_kl_in_reward": True}, "use_kl_in_reward=True and beta=0"),
        ({"loss_type": "gspo", "beta": 0.1}, r"loss_type='gspo' and use_bias_correction_kl=True \(with beta=0.1\)"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "kl_estimator='k1' and use_bias"),
        (
            {"importance_sampling_clip_min": 4.0},
            "importance_sampling_clip_min=4.0 and importance_sampling_clip_max=3.0",
        ),
        ({"advantage": "rloo", "scale_rewards": "group"}, "advantage='rloo' and scale_rewards='group'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "'normalize_then_sum' and reward_weights=None"),
        (
            {"advantage": "reinforce_plus_plus", "beta": 0.1, "use_kl_in_reward": True},
            "use_kl_in_reward=True and advantage='reinforce_plus_plus'",
        ),
        ({"soft_punish_cache": 600}, "soft_punish_cache=600 and max_completion_length=512"),
        (
            {"advantage": "reinforce_plus_plus", "max_num_gen_batches": 2},
            "max_num_gen_batches and advantage='reinforce_plus_plus'",
        ),
    ],
)
def test_a_pair_that_does_not_go_together_is_refused_by_name(given: dict[str, Any], pair: str) -> None:
    with pytest.raises(agl.BadRequestError, match=f"do not go together: .*{pair}"):
        agl.GRPO(model="m", **given)


@pytest.mark.parametrize("weights", [{}, ["a"], {"a": "b"}, {"a": float("nan")}])
def test_weights_of_rewards_that_are_no_numbers_by_name_are_refused(weights: Any) -> None:
    with pytest.raises(agl.BadRequestError, match="reward_weights"):
        agl.GRPO(model="m", reward_weights=weights)


@pytest.mark.parametrize("model", ["", None, 3])
def test_a_model_that_is_no_path_is_refused(model: Any) -> None:
    with pytest.raises(agl.BadRequestError, match="model must be a text"):
        agl.GRPO(model=model)


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


def test_the_trainer_takes_the_short_name_with_settings() -> None:
    trainer = agl.Trainer(algorithm={"type": "grpo", "model": "m", "max_steps": 3})
    assert isinstance(trainer.algorithm, agl.GRPO)
    assert trainer.algorithm.settings.max_steps == 3


def test_the_trainer_refuses_an_unknown_setting_of_the_algorithm() -> None:
    with pytest.raises(TypeError, match="num_generations"):
        agl.Trainer(algorithm={"type": "grpo", "model": "m", "numgenerations": 3})
