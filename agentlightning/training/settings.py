"""The settings of a GRPO run: checked when it is made, recorded with the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from agentlightning.engine.vllm_server import VLLMSettings
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.field_help import explain_fields
from agentlightning.training.alarms.alarms import AlarmSettings, make_rules
from agentlightning.training.collect import LatePolicy
from agentlightning.training.critic.critic_settings import CriticSettings
from agentlightning.training.flight.flight_settings import MOST_GROUPS, FlightSettings
from agentlightning.training.learner.learner_settings import LearnerSettings
from agentlightning.training.losses.loss_settings import LossSettings
from agentlightning.training.losses.reward_settings import RewardSettings
from agentlightning.training.policies.policy_settings import read_policies
from agentlightning.training.progress import Style
from agentlightning.utils.setting_checks import check_choice, check_flag, check_number, refuse_pairs

LRSchedulerType = Literal["constant", "linear"]
RefusedCalls = Literal["exclude", "train"]
RecordTokens = Literal["auto", "all", "sample", "none"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "lr_scheduler_type": get_args(LRSchedulerType),
    "progress": get_args(Style),
    "late_rollouts": get_args(LatePolicy),
    "refused_calls": get_args(RefusedCalls),
    "record_tokens": get_args(RecordTokens),
}
_CORRECTION = ("correction", "mode", "clip_max", "clip_min")
_OTHER_NAMES = {
    "steps": "max_steps",
    "group_size": "num_generations",
    "schedule": "lr_scheduler_type",
    "epochs": "num_iterations",
    "clip": "epsilon and epsilon_high",
    "max_new_tokens": "max_completion_length",
    "scale": "scale_rewards ('group' for 'std')",
    "eval_every": "eval_steps",
    "importance_sampling_level": "loss_type='gspo' for 'sequence'",
    "adv_estimator": "advantage",
    "max_refills": "max_num_gen_batches",
    "loss_agg_mode": "aggregation",
    "clip_ratio_c": "delta",
    "staleness_threshold": "max_staleness, which counts weight versions",
    "max_head_offpolicyness": "max_staleness",
    "kl_loss_type": "kl_estimator",
    **{f"vllm_importance_sampling_{name}": f"importance_sampling_{name}" for name in _CORRECTION},
}


@explain_fields
@dataclass(frozen=True, kw_only=True)
class GRPOSettings(LossSettings, RewardSettings, LearnerSettings, VLLMSettings, FlightSettings):
    """Every setting of `GRPO`, with its meaning and default.

    A setting that TRL 1.16's `GRPOConfig` has is named as there; what VERL 0.9.1 calls it stands in brackets.
    """

    model: str
    """Folder of a transformers causal model with tokenizer and chat template (or a name in the local cache).
    [`actor_rollout_ref.model.path`]"""
    max_steps: int = 100
    """Steps, each of which samples `batch_size` tasks and updates the weights. [`trainer.total_training_steps`]"""
    batch_size: int = 16
    """Tasks per step. [`data.train_batch_size`]"""
    num_generations: int = 8
    """Rollouts per task and step, G. [`rollout.n`]"""
    learning_rate: float = 1e-5
    """Of AdamW, in the first step. [`actor.optim.lr`]"""
    lr_scheduler_type: LRSchedulerType = "constant"
    """`linear` lowers the learning rate step by step, so that it would be 0 after the last one.
    [`actor.optim.lr_scheduler_type`]"""
    num_iterations: int = 1
    """Passes over the rows of a step. [`actor.ppo_epochs`]"""
    minibatch_rollouts: int | None = None
    """Rollouts per optimizer step; None takes the rows of the whole step at once. [`actor.ppo_mini_batch_size` times
    `rollout.n`]"""
    temperature: float = 1.0
    """Of sampling, in training and in the evaluation that is reported first. [`rollout.temperature`]"""
    max_completion_length: int = 512
    """Tokens per model call. [`data.max_response_length`, which is per rollout]"""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. [`actor.grad_clip`]"""
    lora: Mapping[str, object] | None = None
    """Arguments of `peft.LoraConfig`; None trains all weights. [`model.lora_rank`, `model.lora_alpha`]"""
    device: str = "cpu"
    """Where the model lies, as torch names it, such as `cuda`."""
    eval_steps: int = 0
    """Steps between evaluations on the validation set; 0 evaluates before and after only. [`trainer.test_freq`]"""
    solved_above: float | None = None
    """A task of the validation set counts as solved when its reward is above this: the share of those is shown beside
    the mean reward. None shows a share where all rewards are 0 or 1. [no counterpart]"""
    seed: int = 0
    """Of sampling, of the order of tasks and rows, and of the first weights of adapters."""
    output_dir: str | Path | None = None
    """Where model, checkpoints and metrics go; None makes `runs/<time>`."""
    save_steps: int = 10
    """Steps between checkpoints, beside the one at the end; 0 writes that one alone. [`trainer.save_freq`]"""
    save_total_limit: int | None = 2
    """So many checkpoints are kept, the newest ones; None keeps all. [`trainer.max_actor_ckpt_to_keep`]"""
    deterministic: bool = False
    """Whole runs are equal, whatever the number of runners and the timing: a reply depends on the weights, on step,
    task and sample of its rollout, and on what is asked. Each reply is then decoded alone, which takes longer."""
    step_timeout_seconds: float = 1800.0
    """A rollout that is not at its end by then is late; see `late_rollouts`."""
    late_rollouts: LatePolicy = "drop"
    """`drop`: it is cancelled and excluded, and the step goes on without it. `wait`: the time begins anew with each
    rollout that ends. `resubmit`: it is cancelled, and its task enqueued once more."""
    rollout_timeout_seconds: float | None = None
    """Largest age of one attempt, after which it is excluded; None is `step_timeout_seconds`."""
    refused_calls: RefusedCalls = "exclude"
    """What becomes of a scored rollout one of whose calls was refused for good (4xx, or an error that no retry got
    over): `exclude` leaves it out as `refused_call`, since its reward may tell of the refusal; `train` trains it."""
    engine_batch: int = 64
    """Model calls that are generated at once."""
    max_drift: float | None = None
    """Largest share of turns that template or tokenizer may bring back in other tokens; beyond it the run ends. None is
    no limit."""
    record_tokens: RecordTokens = "auto"
    """Of which trained tokens the store keeps the figures that the loss used: `all`, a `sample` of whole rollouts with
    about 65,000 tokens per step, or `none`. `auto` is `all` for a model below 10 million parameters, else `sample`."""
    alarms: AlarmSettings = "default"
    """Which conditions of the run are told of, and when: `default`, `none`, or thresholds by rule, such as
    `{"entropy_collapse": {"share": 0.05}, "token_drift": None}`; None switches a rule off. The rules are in
    `agentlightning.training.alarms`."""
    resource_name: str = "main_llm"
    """Name under which the agent gets the policy."""
    policies: Mapping[str, Mapping[str, object]] | None = None
    """Several policies that learn in one run, each from its own calls: their names, or for each name the settings in
    which it differs (`model`, `lora`, `learning_rate`, `lr_scheduler_type`, `max_grad_norm`, `bf16`). The agent gets
    each under its name. Those with `lora` on one model share its weights. None is one policy. [no counterpart]"""
    progress: Style = "auto"
    """How steps are shown: `live` is a table that changes in place, `plain` a line each; `auto` chooses by terminal."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", read_policies(self.policies))
        self.check_learner()
        for name in ("max_steps", "batch_size", "num_iterations", "max_completion_length", "engine_batch"):
            check_number(name, getattr(self, name), int, at_least=1)
        check_number("num_generations", self.num_generations, int, at_least=1)
        for name in ("learning_rate", "step_timeout_seconds", "max_grad_norm"):
            check_number(name, getattr(self, name), float, above=0)
        if self.minibatch_rollouts is not None:
            check_number("minibatch_rollouts", self.minibatch_rollouts, int, at_least=1)
        if self.rollout_timeout_seconds is not None:
            check_number("rollout_timeout_seconds", self.rollout_timeout_seconds, float, above=0)
        check_number("temperature", self.temperature, float, at_least=0.01, at_most=2)
        if self.max_drift is not None:
            check_number("max_drift", self.max_drift, float, at_least=0, at_most=1)
        check_number("eval_steps", self.eval_steps, int, at_least=0)
        if self.solved_above is not None:
            check_number("solved_above", self.solved_above, float)
        check_number("save_steps", self.save_steps, int, at_least=0)
        if self.save_total_limit is not None:
            check_number("save_total_limit", self.save_total_limit, int, at_least=1)
        check_flag("deterministic", self.deterministic)
        check_number("seed", self.seed, int)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("model", "device", "resource_name"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise BadRequestError(f"{name} must be a text that is not empty; got {getattr(self, name)!r}")
        if self.lora is not None and not isinstance(self.lora, Mapping):
            raise BadRequestError(f"lora holds arguments of peft.LoraConfig, such as {{'r': 16}}; got {self.lora!r}")
        make_rules(self.alarms)
        self.check_rewards()
        self.check_loss()
        self.check_vllm(has_adapters=self.lora is not None)
        self.check_flight()
        refuse_pairs(self._pairs_of_flight())
        self._check_pairs_of_groups()
        self.by_policy()

    def _check_pairs_of_groups(self) -> None:
        cache, length = self.soft_punish_cache, self.max_completion_length
        pairs = {
            f"num_generations=1 and advantage={self.advantage!r}: one rollout has nothing to be compared with; only "
            "'reinforce_plus_plus' compares with the whole step": self.num_generations == 1 and self.compares_in_groups,
            "use_kl_in_reward=True and advantage='reinforce_plus_plus': its penalty is a return per token; leave "
            "use_kl_in_reward out": self.use_kl_in_reward and self.advantage == "reinforce_plus_plus",
            "use_kl_in_reward=True and multi_objective_aggregation='normalize_then_sum': it has no dimension": (
                self.use_kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum"
            ),
            f"soft_punish_cache={cache} and max_completion_length={length}: the reward cannot begin to fall before the "
            "first token": cache is not None and cache > length,
            "use_vllm=True and policies: one vLLM server serves one policy": self.use_vllm
            and self.policies is not None,
            "use_vllm=True and deterministic=True: what vLLM samples depends on what else is in flight": (
                self.use_vllm and self.deterministic
            ),
            "max_num_gen_batches and advantage='reinforce_plus_plus': it compares with the whole step, and groups of "
            "equal rewards teach it as well": (self.max_num_gen_batches > 1 and not self.compares_in_groups),
        }
        refuse_pairs(pairs)

    def _pairs_of_flight(self) -> dict[str, bool]:
        ahead, groups = self.max_staleness > 0, (self.max_staleness + 1) * self.batch_size
        given = f"max_staleness={self.max_staleness} and "
        return {
            given + "deterministic=True: which weights answer a call depends on the timing; leave one of them out": (
                ahead and self.deterministic
            ),
            given + f"batch_size={self.batch_size}: {groups} groups would be in flight, of which at most {MOST_GROUPS} "
            "may be; take a smaller one": ahead and groups > MOST_GROUPS,
            given + "use_kl_in_reward=True: the divergences of a group would stop the others; give beta without it": (
                ahead and self.use_kl_in_reward
            ),
            given
            + f"max_num_gen_batches={self.max_num_gen_batches}: a step does not wait for groups in place of those "
            "of equal rewards; leave it out": ahead and self.max_num_gen_batches > 1,
            given + f"importance_sampling_mode={self.importance_sampling_mode!r} with importance_sampling_correction="
            "True: a row may have been sampled by several versions of the weights; take 'token_truncate' or "
            "'token_mask'": ahead
            and self.importance_sampling_correction
            and self.importance_sampling_mode.startswith("sequence"),
        }

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the critic that gives each token its advantage; None where a rollout has one."""
        return None

    @property
    def other_names(self) -> Mapping[str, str]:
        """What settings are called where they are not called as here."""
        return {}

    @property
    def penalizes_rollouts(self) -> bool:
        """Whether the divergence from the reference is taken from the reward of a rollout as one number."""
        return self.use_kl_in_reward and self.critic is None

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, 1 being the first."""
        return self.learning_rate * (1 - (step - 1) / self.max_steps if self.lr_scheduler_type == "linear" else 1.0)

    def by_policy(self) -> dict[str | None, GRPOSettings]:
        """Return the settings that each policy learns by; under None those of a run with one policy.

        Raises:
            BadRequestError: a setting of a policy is out of its range; names the policy.
        """
        if self.policies is None:
            return {None: self}
        found: dict[str | None, GRPOSettings] = {}
        for name, own in self.policies.items():
            changes: dict[str, Any] = dict(own)
            try:
                found[name] = dataclasses.replace(self, policies=None, **changes)
            except BadRequestError as error:
                raise BadRequestError(f"policies[{name!r}]: {error}") from None
        return found

    def as_json(self) -> dict[str, object]:
        """Return the settings as JSON data."""
        output_dir = None if self.output_dir is None else str(self.output_dir)
        return {**dataclasses.asdict(self), "output_dir": output_dir}


def make_settings(model: str | Path | None, settings: Mapping[str, Any]) -> GRPOSettings:
    """Return checked settings.

    Raises:
        TypeError: an unknown setting; names it and the nearest right one.
        BadRequestError: a value out of its range.
    """
    known = [field.name for field in dataclasses.fields(GRPOSettings)]
    for name in settings:
        if name in _OTHER_NAMES:
            raise TypeError(f"GRPO has no setting {name!r}. Its name is {_OTHER_NAMES[name]}")
        if name not in known:
            near = closest_name(name, known)
            hint = f"Did you mean {near!r}?" if near else f"The settings are: {', '.join(known)}"
            raise TypeError(f"GRPO has no setting {name!r}. {hint}")
    if model is None:
        named = [own.get("model") for own in (read_policies(settings.get("policies")) or {}).values()]
        if not named or None in named:
            raise BadRequestError(
                "model must be a text, the folder of a transformers model, or each of policies must name one; got None"
            )
        model = str(named[0])
    return GRPOSettings(model=str(model) if isinstance(model, Path) else model, **settings)
