"""The settings of a VERL run: VERL's own configuration, its fixed values, and our additional settings.

Nothing here loads torch or verl before a configuration is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.training.external import installed_version
from agentlightning.training.settings import GRPOSettings

VERSION: Final = "0.9.1"
"""Supported version of verl. Its V1 trainer is new, and a later version may call our code differently."""

OWN: Final = (
    *("step_timeout_seconds", "rollout_timeout_seconds", "late_rollouts", "refused_calls", "max_drift"),
    *("alarms", "resource_name", "progress", "output_dir", "max_completion_length", "record_tokens", "solved_above"),
    *("max_rows_per_rollout", "shuffle_dataset", "curriculum"),
)
"""Settings under `agentlightning` in the configuration, with the same meaning as in `agl.GRPO`. The default of
`max_completion_length` is `data.max_response_length`. `record_tokens`, by default `sample`, stores the values of each
token before VERL's loss."""

_NO_LEGACY = "the Trainer's store and gateway are always used"
_MERGED = "turns are merged if the tokens of one continue the other, and are separate rows otherwise; remove it"
_LENGTHS = "rows are limited by data.max_prompt_length and data.max_response_length"
GONE: Final = {
    "port": _NO_LEGACY,
    "trace_aggregator": _MERGED,
    "trajectory_max_prompt_length": _LENGTHS,
    "trajectory_max_response_length": _LENGTHS,
    "debug": "seams between turns are counted with their causes in every step; see agl runs ledger",
    "mismatch_log_dir": "seams between turns are counted with their causes in every step; see agl runs ledger",
    "reward_fillna_value": "a rollout without a reward is excluded and never counts as a low reward",
    "agl_base_url": _NO_LEGACY,
    "agl_key": "the Trainer's store has its own token",
    "hooks": "pass them to the Trainer: Trainer(hooks=[...])",
    "async_rollout": "rollouts of a step are collected before its update",
    "max_ppo_update_times": "set actor_rollout_ref.actor.ppo_mini_batch_size and ppo_epochs",
}
"""Settings of the older system under `agentlightning`, and their replacements."""

_OF_OTHERS: Final = ("ray_kwargs", "transfer_queue")
"""Parts of VERL's configuration that it passes to other packages."""
_REWARDS = "rewards come from the agent's rollouts"
_FIXED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "algorithm.adv_estimator": (
        ("grpo",),
        "other estimators treat each token row as a rollout, but a rollout may have several rows",
    ),
    "algorithm.use_kl_in_reward": ((False,), "VERL counts only the last row of a rollout; use actor.use_kl_loss"),
    "algorithm.rollout_correction.rollout_rs": ((None,), "VERL would exclude tokens recorded as trained"),
    "algorithm.filter_groups.enable": ((False, None), "VERL would request more rollouts than a step has"),
    "trainer.use_v1": ((True,), "the older trainer does not support agent loops with several rows"),
    "trainer.v1.trainer_mode": (("sync",), "rollouts of a step are collected before its update"),
    "trainer.critic_warmup": ((0,), "agl.VERL has no critic"),
    "trainer.val_only": ((False,), "Trainer.evaluate measures an agent without training"),
    "actor_rollout_ref.rollout.mode": (("async",), "agents call the model as a server"),
    "actor_rollout_ref.rollout.repetition_penalty": ((1.0, 1), "agl.VERL supports only top_p and top_k"),
    "actor_rollout_ref.rollout.val_kwargs.n": ((1,), "a held-out task has exactly one rollout"),
    "actor_rollout_ref.actor.use_dynamic_bsz": ((True,), "the number of rows per rollout varies"),
    "reward.reward_model.enable": ((False,), _REWARDS),
    "reward.custom_reward_function.path": ((None,), _REWARDS),
    "actor_rollout_ref.rollout.calculate_log_probs": ((True,), "each step compares sampler and learner"),
    "actor_rollout_ref.rollout.agent.default_agent_loop": (("agentlightning",), "the agent is passed to fit"),
    "trainer.v1.sampler.custom_sampler.path": ((None,), "rollouts of a step are collected before its update"),
    "data.gen_batch_size": ((None,), "a step always has data.train_batch_size tasks"),
    "data.train_files": (("train",), "tasks are passed to fit as train_dataset"),
    "data.val_files": (("val",), "held-out tasks are passed to fit as val_dataset"),
    "data.shuffle": ((False,), "the run shuffles the tasks itself; set agentlightning.shuffle_dataset"),
    "data.custom_cls.path": (
        ("pkg://agentlightning.training.external.verl.trainer",),
        "tasks are passed to the Trainer",
    ),
}
"""Required values of VERL's settings, the default first, and the reason."""
_DEFAULTS: Final[dict[str, object]] = {
    "model_engine": "dp",
    "agentlightning": {},
    "trainer.logger": ["console"],
    "trainer.total_epochs": 1,
    "trainer.val_before_train": True,
    "trainer.test_freq": 0,
    "trainer.save_freq": 10,
    "trainer.max_actor_ckpt_to_keep": 2,
    "data.custom_cls.name": "PlacesOfSteps",
    "data.validation_shuffle": False,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(Path(__file__).with_name("agents.yaml")),
}
"""Additional defaults that we set."""


@dataclass(frozen=True, kw_only=True)
class VERLSettings:
    """The settings of `agl.VERL`, checked as far as they can be without the tasks."""

    config: Any
    """VERL's full configuration, an `omegaconf.DictConfig`, including `agentlightning`."""
    user_settings: Mapping[str, Any]
    """The settings of the user, without the defaults."""

    @property
    def own(self) -> dict[str, Any]:
        """Our settings, which are under `agentlightning`."""
        from omegaconf import OmegaConf

        return cast("dict[str, Any]", OmegaConf.to_container(self.config.agentlightning, resolve=True))

    def steps(self, tasks: int) -> int:
        """Return the number of steps for this number of tasks."""
        if self.config.trainer.total_training_steps is not None:
            return int(self.config.trainer.total_training_steps)
        return max(1, tasks // self.config.data.train_batch_size) * int(self.config.trainer.total_epochs)

    def as_grpo(self, tasks: int) -> GRPOSettings:
        """Return the settings for collecting, reading and recording rollouts."""
        config, own = self.config, self.own
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        own.setdefault("max_completion_length", config.data.max_response_length)
        return GRPOSettings(
            model=str(config.actor_rollout_ref.model.path),
            max_steps=self.steps(tasks),
            batch_size=config.data.train_batch_size,
            num_generations=rollout.n,
            learning_rate=actor.optim.lr,
            num_iterations=actor.ppo_epochs,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=max(0, rollout.top_k or 0),
            scale_rewards="group" if config.algorithm.norm_adv_by_std_in_grpo else "none",
            eval_steps=max(0, config.trainer.test_freq),
            save_steps=max(0, config.trainer.save_freq),
            save_total_limit=config.trainer.max_actor_ckpt_to_keep,
            seed=int(config.data.get("seed") or 0),
            **own,
        )

    def recorded(self) -> dict[str, object]:
        """Return the settings of the user, as JSON data."""
        return {"verl": VERSION, **self.user_settings}


def make_settings(settings: object) -> VERLSettings:
    """Return checked settings.

    Raises:
        ImportError: verl is not installed, or its version is unsupported.
        TypeError: the configuration is not a mapping with strings as keys.
        BadRequestError: a setting under `agentlightning` is unknown, or a setting is not supported here.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(f"VERL requires a dict of VERL's settings, such as {{'trainer': {{...}}}}; got {settings!r}")
    _check_own(settings.get("agentlightning") or {})
    check_version()
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    user = OmegaConf.create()
    try:
        _merge(user, settings)
    except OmegaConfBaseException as error:
        raise BadRequestError(f"Cannot read the configuration of VERL: {error}") from None
    if not OmegaConf.select(user, "actor_rollout_ref.model.path"):
        raise BadRequestError(
            "VERL requires a model: {'actor_rollout_ref': {'model': {'path': 'folder of a transformers model'}}}"
        )
    defaults = _defaults()
    _check_names(defaults, user, "")
    config: Any = OmegaConf.merge(defaults, user)
    if config.actor_rollout_ref.rollout.n < 2:
        raise BadRequestError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n} must be at least 2, because "
            "advantages compare the rollouts of a task"
        )
    for name, (allowed, why) in _FIXED.items():
        value = OmegaConf.select(config, name)
        if value not in allowed:
            raise BadRequestError(f"{name}={value!r} is not supported by agl.VERL: {why}. It must be {allowed[0]!r}")
    checked = VERLSettings(config=config, user_settings=dict(settings))
    rollout = config.actor_rollout_ref.rollout
    if checked.as_grpo(1).reshaping:  # also checks ours
        if rollout.temperature != 1:
            raise BadRequestError(
                f"actor_rollout_ref.rollout.temperature={rollout.temperature!r} and top_p={rollout.top_p!r}, "
                f"top_k={rollout.top_k!r}: vLLM returns probabilities either with all of these settings or with none "
                "of them; set temperature to 1"
            )
        rollout.logprobs_mode = "raw_logprobs"
    return checked


def _merge(config: Any, settings: Mapping[str, Any], path: str = "") -> None:
    """Add settings to a configuration: nested, or with dots in their names as on VERL's command line."""
    from omegaconf import OmegaConf

    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            _merge(config, cast("Mapping[str, Any]", value), f"{path}{name}.")
        else:
            OmegaConf.update(config, f"{path}{name}", value)


def check_version() -> None:
    """Raise ImportError unless the supported version of verl is installed."""
    version = installed_version("verl", "VERL")
    if version != VERSION:
        raise ImportError(f"agl.VERL requires verl {VERSION}; {version} is installed: pip install verl=={VERSION}")


def _defaults() -> Any:
    """Return VERL's defaults, overridden by ours."""
    from omegaconf import OmegaConf

    with resources.as_file(resources.files("verl.trainer.config") / "_generated_ppo_trainer.yaml") as path:
        config = OmegaConf.load(path)
    _merge(config, {name: allowed[0] for name, (allowed, _) in _FIXED.items()} | _DEFAULTS)
    return config


def _check_own(own: object) -> None:
    if not isinstance(own, Mapping):
        raise TypeError(f"'agentlightning' of VERL's configuration must be a dict; got {own!r}")
    for name in cast("Mapping[str, object]", own):
        if name in GONE:
            raise BadRequestError(f"agentlightning.{name} has no effect: {GONE[name]}")
        if name not in OWN:
            near = closest_name(str(name), list(OWN))
            hint = f"Did you mean {near!r}?" if near else f"Valid settings: {', '.join(OWN)}"
            raise BadRequestError(f"agentlightning has no setting {name!r} in VERL's configuration. {hint}")


def _check_names(defaults: Any, user: Any, place: str) -> None:
    """Refuse a name that is similar to one of VERL's; other unknown names pass: VERL accepts more than its defaults."""
    from omegaconf import DictConfig, OmegaConf

    names = [str(each) for each in defaults.keys()]  # noqa: SIM118 -- `in` leaves out those without a value
    for name in user:
        if str(name) not in names:
            near = closest_name(str(name), names)
            if near is not None:
                raise BadRequestError(f"VERL has no setting {place}{name}. Did you mean {place}{near}?")
            continue
        inner, value = None if OmegaConf.is_missing(defaults, name) else defaults.get(name), user.get(name)
        if isinstance(inner, DictConfig) and isinstance(value, DictConfig) and f"{place}{name}" not in _OF_OTHERS:
            _check_names(inner, value, f"{place}{name}.")
