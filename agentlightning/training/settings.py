"""The settings of a GRPO run: checked when it is made, recorded with the run. Needs no torch.

A setting that TRL 1.16's `GRPOConfig` has is named as there; what VERL 0.9.1 calls it stands in brackets.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_type_hints,
)

from agentlightning.engine.vllm_server import VLLMSettings
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.field_help import explain_fields
from agentlightning.training.alarms import AlarmSettings, make_rules
from agentlightning.training.progress import Style
from agentlightning.training.rollouts import LatePolicy
from agentlightning.types import Rollout
from agentlightning.utils.setting_checks import Bounds, check_fields, check_names, check_number, refuse_pairs

LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gspo"]
Aggregation = Literal["token", "sequence", "rollout", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Advantage = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjective = Literal["sum_then_normalize", "normalize_then_sum"]
LRSchedulerType = Literal["constant", "linear"]
RefusedCalls = Literal["exclude", "train"]
RecordTokens = Literal["auto", "all", "sample", "none"]
Pick: TypeAlias = Callable[[Rollout, float], bool]
"""Says of a rollout and its reward whether it may be trained, in supervised fine-tuning."""

P = ParamSpec("P")
S = TypeVar("S", bound="GRPOSettings")
Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(at_least=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]

MOST_GROUPS: Final = 512
"""Groups in progress at a time; each waits for its end by a request of its own, which a store on another machine holds
open."""
OWN_SETTINGS: Final = ("model", "lora", "learning_rate", "lr_scheduler_type", "max_grad_norm", "bf16")
"""Settings that a policy of `policies=` may have of its own."""

_AGGREGATIONS: dict[LossType, Aggregation] = {
    "grpo": "rollout",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
    "gspo": "rollout",
}
_SCALES: dict[Advantage, ScaleRewards] = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}
_OTHER_NAMES: Final[Mapping[str, str]] = {
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
    **{
        f"vllm_importance_sampling_{name}": f"importance_sampling_{name}"
        for name in ("correction", "mode", "clip_max", "clip_min")
    },
}
"""Settings by names that they have elsewhere."""
_WITHOUT_MEANING: Final[Mapping[str, str]] = {}
"""Settings of GRPO that an algorithm does not have, and why."""
_POLICY_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


@explain_fields
@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of an optimizer step; the formulas are in `losses/objective.py`."""

    loss_type: LossType = "dapo"
    """`grpo`, `dapo` and `dr_grpo` have the clipped loss of PPO and differ in `aggregation` alone. `cispo` bounds the
    ratio and leaves every token its gradient (its bound is `epsilon_high` itself, such as 5.0). `gspo` clips one ratio
    per sequence; its papers take an `epsilon` of some 3e-4. [`actor.policy_loss.loss_mode`]"""
    aggregation: Aggregation | None = None
    """What has the same weight in the loss of a step: each `token`, each `sequence` (row), each `rollout` (all its
    rows together); or `constant`, where each token weighs 1 / (rollouts * `loss_scale_factor`). None is what the
    `loss_type` has in its paper: `rollout` for grpo and gspo, `token` for dapo and cispo, `constant` for dr_grpo.
    [`actor.loss_agg_mode`]"""
    loss_scale_factor: Count | None = None
    """The constant length, in tokens; None is `max_completion_length`. [`actor.loss_scale_factor`]"""
    epsilon: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """How far below one the ratio of new to old probability counts. [`actor.clip_ratio_low`]"""
    epsilon_high: Positive | None = 0.28
    """How far above one it counts; None is `epsilon`. With `cispo` the largest ratio itself.
    [`actor.clip_ratio_high`]"""
    delta: Annotated[float, Bounds(above=1)] | None = None
    """Largest ratio that counts where the advantage is negative (dual clip); above 1 + `epsilon_high`. None is no
    bound. [`actor.clip_ratio_c`]"""
    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference, which is the model as it was loaded. [`actor.kl_loss_coef`, or
    `algorithm.kl_ctrl.kl_coef` in the reward]"""
    kl_estimator: KLEstimator = "k3"
    """`k1` is log p/q, `k2` half its square, `k3` q/p - 1 - log q/p. [`actor.kl_loss_type`]"""
    use_bias_correction_kl: bool = True
    """Multiply the penalty of a token by its ratio (with `k2`, by its ratio without gradient), so that its gradient is
    that of the divergence."""
    use_kl_in_reward: bool = False
    """Take the penalty from the rollout's reward, not into the loss. [`algorithm.use_kl_in_reward`]"""
    importance_sampling_correction: bool = False
    """False: ratios are to the probabilities that the engine recorded. True: ratios are to the learner's own before the
    first optimizer step, and how engine and learner differ is a weight of its own, see `importance_sampling_mode`.
    TRL has a `vllm_` before this and the next three names. [`algorithm.rollout_correction.bypass_mode`, negated]"""
    importance_sampling_mode: CorrectionMode = "sequence_mask"
    """A weight per token, or one per sequence (the product of its tokens'); a weight beyond its bounds is held at the
    bound (`truncate`) or takes what it weighs out of the loss (`mask`; with both bounds, the band of IcePop).
    [`rollout_correction.rollout_is`]"""
    importance_sampling_clip_max: Positive | None = 3.0
    """Upper bound of that weight; None is none. [`rollout_correction.rollout_is_threshold`]"""
    importance_sampling_clip_min: Positive | None = None
    """Lower bound of that weight; None is none. [the first number of `rollout_is_threshold`]"""
    staleness_clip_max: Positive | None = 5.0
    """Upper bound of the weight of a token that older weights sampled, which is what the probability of the learner
    before its first optimizer step is over that of sampling; None is none. Such tokens are there with `max_staleness`
    alone. [no counterpart]"""
    entropy_coef: NotNegative = 0.0
    """Weight of the mean entropy per token, in nats, which the loss is lowered by. [`actor.entropy_coeff`]"""

    def __post_init__(self) -> None:
        check_fields(self)
        low, high, by = self.importance_sampling_clip_min, self.importance_sampling_clip_max, self.aggregates_by
        pairs = {
            f"loss_type='cispo' and epsilon_high={self.epsilon_high}: with cispo it is the largest ratio itself; give "
            "one of at least 1, such as 5.0": self.loss_type == "cispo" and self.ratio_bounds[1] < 1,
            f"loss_type={self.loss_type!r} and delta={self.delta}: it bounds no ratio by the sign of the advantage; "
            "leave delta out": self.delta is not None and self.loss_type in ("cispo", "gspo"),
            f"delta={self.delta} and epsilon_high={self.epsilon_high}: delta must be above 1 + epsilon_high": (
                self.delta is not None and self.loss_type != "cispo" and self.delta <= self.ratio_bounds[1]
            ),
            f"loss_scale_factor={self.loss_scale_factor} and aggregation={by!r}: only 'constant' has a constant "
            "length": self.loss_scale_factor is not None and by != "constant",
            "use_kl_in_reward=True and beta=0: give beta, the weight of the penalty": (
                self.use_kl_in_reward and self.beta == 0
            ),
            f"loss_type='gspo' and use_bias_correction_kl=True (with beta={self.beta}): its ratio is that of a "
            "sequence, with which the penalty of a token is not unbiased; set use_bias_correction_kl=False": (
                self.loss_type == "gspo" and self.has_kl_loss and self.use_bias_correction_kl
            ),
            f"kl_estimator='k1' and use_bias_correction_kl=False (with beta={self.beta}): the gradient of k1 alone is "
            "0 in the mean; set use_bias_correction_kl=True or use_kl_in_reward=True, or take 'k2' or 'k3'": (
                self.kl_estimator == "k1" and self.has_kl_loss and not self.use_bias_correction_kl
            ),
            f"importance_sampling_clip_min={low} and importance_sampling_clip_max={high}: the lower bound must be "
            "below the upper one": low is not None and high is not None and low >= high,
        }
        refuse_pairs(pairs)

    @property
    def aggregates_by(self) -> Aggregation:
        """The value of `aggregation`, or its default."""
        return self.aggregation or _AGGREGATIONS[self.loss_type]

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The least and the greatest ratio that count, before `delta`."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return (0.0, high) if self.loss_type == "cispo" else (1 - self.epsilon, 1 + high)

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the policy's part of the loss is the negative log-probability, as in supervised fine-tuning."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the model as it was loaded is needed."""
        return self.beta > 0

    @property
    def has_kl_loss(self) -> bool:
        """Whether the loss needs the reference's log-probabilities."""
        return self.beta > 0 and not self.use_kl_in_reward


@explain_fields
@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """From rewards to advantages; the formulas are in `losses/advantages.py`."""

    advantage: Advantage = "grpo"
    """What a reward is compared with: the mean of its group (`grpo`, `reinforce_plus_plus_baseline`), that of the
    others of its group (`rloo`), or that of the whole step (`reinforce_plus_plus`). [`algorithm.adv_estimator`]"""
    scale_rewards: ScaleRewards | None = None
    """`group` divides by the standard deviation of the group (GRPO), `batch` by that of the step's rewards, `none` does
    not (Dr. GRPO). None is what the `advantage` has in its paper: `group` for grpo, `none` for rloo, `batch` for the
    two others. [`algorithm.norm_adv_by_std_in_grpo`]"""
    reward_weights: Mapping[str, float] | None = None
    """The weight of each reward dimension by its name, where an agent's rewards have several; those that are not named
    do not count. None takes the primary reward alone. [none; in the reward function]"""
    multi_objective_aggregation: MultiObjective = "sum_then_normalize"
    """`sum_then_normalize` makes one reward of the dimensions and an advantage of that; `normalize_then_sum` an
    advantage of each dimension, whose weighted sum is scaled over the step (GDPO). [`adv_estimator: gdpo`]"""
    mask_truncated_completions: bool = False
    """Leave the tokens of a rollout out of the loss, as `over_length`, if one of its calls was cut at
    `max_completion_length`; its reward stays in its group. [none]"""
    soft_punish_cache: Count | None = None
    """Tokens before `max_completion_length` in which the reward of a rollout begins to fall with its longest call; None
    is off. TRL has it as `get_soft_overlong_punishment(soft_punish_cache=)`. [`overlong_buffer_cfg.len`]"""
    overlong_penalty_factor: Positive = 1.0
    """What a call of full length costs. [`overlong_buffer_cfg.penalty_factor`]"""
    max_num_gen_batches: Count = 1
    """How many times a step may sample: groups whose rewards are all equal are replaced by groups of other tasks, and
    stay excluded (DAPO). 1 takes the groups as they are. [`algorithm.filter_groups.max_num_gen_batches`]"""

    def check_rewards(self) -> None:
        """Raise BadRequestError if a weight is out of its range, or settings of rewards do not go together."""
        weights = self.reward_weights
        if weights is not None and (
            not isinstance(weights, Mapping) or not weights or not all(isinstance(name, str) for name in weights)
        ):
            raise BadRequestError(
                f"reward_weights holds the weight of each reward dimension by its name, such as "
                f"{{'right': 1.0, 'short': 0.2}}; got {weights!r}"
            )
        for name, weight in (weights or {}).items():
            check_number(f"reward_weights[{name!r}]", weight, float, Bounds(at_least=-1e30, at_most=1e30))
        natural, several = _SCALES[self.advantage], self.multi_objective_aggregation == "normalize_then_sum"
        pairs = {
            f"advantage={self.advantage!r} and scale_rewards={self.scale_rewards!r}: it is scaled by {natural!r}; "
            "leave scale_rewards out": self.advantage != "grpo" and self.scale_rewards not in (None, natural),
            "multi_objective_aggregation='normalize_then_sum' and reward_weights=None: name the reward dimensions": (
                several and weights is None
            ),
            f"multi_objective_aggregation='normalize_then_sum' and advantage={self.advantage!r}: it is defined for "
            "'grpo'": several and self.advantage != "grpo",
            f"multi_objective_aggregation='normalize_then_sum' and scale_rewards={self.scale_rewards!r}: it scales by "
            "group and by batch; leave scale_rewards out": several and self.scales_by != "group",
            "multi_objective_aggregation='normalize_then_sum' and soft_punish_cache: the penalty has no dimension": (
                several and self.soft_punish_cache is not None
            ),
        }
        refuse_pairs(pairs)

    @property
    def scales_by(self) -> ScaleRewards:
        """The value of `scale_rewards`, or its default."""
        return self.scale_rewards or _SCALES[self.advantage]

    @property
    def compares_in_groups(self) -> bool:
        """Whether a group of one, or one of equal rewards, has nothing to teach."""
        return self.advantage != "reinforce_plus_plus"


@explain_fields
@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How values are learned and used; the formulas are in `losses/critic.py`."""

    gamma: Share = 1.0
    """What the value of the next token counts, between 0 and 1. [`algorithm.gamma`]"""
    lam: Share = 0.95
    """Between 0 (advantages by the next value alone) and 1 (by the whole return), the lambda of GAE.
    [`algorithm.lam`]"""
    vf_coef: NotNegative = 0.1
    """Weight of the value loss. It moves the layers below the value head as well. [none; VERL's critic is a model of
    its own]"""
    cliprange_value: Positive = 0.2
    """How far a value may go from what it was before the step, before its gain no longer counts.
    [`critic.cliprange_value`, 0.5]"""
    value_learning_rate: Positive = 1e-3
    """Of AdamW on the value head, in the first step; it falls as `learning_rate` does. [`critic.optim.lr`]"""
    whiten_advantages: bool = True
    """Take the mean of all token advantages of a step off and divide by their deviation. TRL and VERL always do."""


@explain_fields
@dataclass(frozen=True, kw_only=True)
class GRPOSettings(LossSettings, RewardSettings, VLLMSettings):
    """Every setting of `GRPO`, with its meaning and default.

    A setting that TRL 1.16's `GRPOConfig` has is named as there; what VERL 0.9.1 calls it stands in brackets.
    """

    # of the algorithm; without annotations, by which they would be fields
    algorithm = "GRPO"
    names_elsewhere = _OTHER_NAMES
    without_meaning = _WITHOUT_MEANING
    model_missing = "model must be a text, the folder of a transformers model, or each of policies must name one"

    model: str
    """Folder of a transformers causal model with tokenizer and chat template (or a name in the local cache).
    [`actor_rollout_ref.model.path`]"""
    max_steps: Count = 100
    """Steps, each of which samples `batch_size` tasks and updates the weights. [`trainer.total_training_steps`]"""
    batch_size: Count = 16
    """Tasks per step. [`data.train_batch_size`]"""
    num_generations: Count = 8
    """Rollouts per task and step, G. [`rollout.n`]"""
    learning_rate: Positive = 1e-5
    """Of AdamW, in the first step. [`actor.optim.lr`]"""
    lr_scheduler_type: LRSchedulerType = "constant"
    """`linear` lowers the learning rate step by step, so that it would be 0 after the last one.
    [`actor.optim.lr_scheduler_type`]"""
    num_iterations: Count = 1
    """Passes over the rows of a step. [`actor.ppo_epochs`]"""
    minibatch_rollouts: Count | None = None
    """Rollouts per optimizer step; None takes the rows of the whole step at once. [`actor.ppo_mini_batch_size` times
    `rollout.n`]"""
    temperature: Annotated[float, Bounds(at_least=0.01, at_most=2)] = 1.0
    """Of sampling, in training and in the evaluation that is reported first. [`rollout.temperature`]"""
    max_completion_length: Count = 512
    """Tokens per model call. [`data.max_response_length`, which is per rollout]"""
    max_grad_norm: Positive = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. [`actor.grad_clip`]"""
    lora: Mapping[str, object] | None = None
    """Arguments of `peft.LoraConfig`; None trains all weights. [`model.lora_rank`, `model.lora_alpha`]"""
    device: str = "cpu"
    """Where the model lies, as torch names it, such as `cuda`."""
    max_model_length: Annotated[int, Bounds(at_least=2)] | None = None
    """Most tokens of prompt and reply together; a longer call is refused. None is the context of the model.
    [`rollout.max_model_len`]"""
    max_tokens_per_forward: Count = 4096
    """Most tokens of rows that go through the model at once; a longer row goes alone. The gradient is summed over the
    forwards of an optimizer step, so this bounds the memory and changes the result by rounding alone.
    [`actor.ppo_max_token_len_per_gpu`]"""
    padding_free: bool = True
    """The rows of a forward stand in one sequence, without padding, and do not see each other; a model that cannot do
    it is padded. [`model.use_remove_padding`]"""
    gradient_checkpointing: bool = False
    """Keep the inputs of the layers alone for the backward pass, and compute the rest anew: less memory, a third more
    time. [`model.enable_gradient_checkpointing`]"""
    bf16: bool = False
    """The model computes in bfloat16; weights that learn are kept in float32 beside it, as are probabilities.
    [`actor.fsdp_config.dtype`]"""
    eval_steps: CountOrZero = 0
    """Steps between evaluations on the validation set; 0 evaluates before and after only. [`trainer.test_freq`]"""
    solved_above: float | None = None
    """A task of the validation set counts as solved when its reward is above this: the share of those is shown beside
    the mean reward. None shows a share where all rewards are 0 or 1. [no counterpart]"""
    seed: int = 0
    """Of sampling, of the order of tasks and rows, and of the first weights of adapters."""
    output_dir: str | Path | None = None
    """Where model, checkpoints and metrics go; None makes `runs/<time>`."""
    save_steps: CountOrZero = 10
    """Steps between checkpoints, beside the one at the end; 0 writes that one alone. [`trainer.save_freq`]"""
    save_total_limit: Count | None = 2
    """So many checkpoints are kept, the newest ones; None keeps all. [`trainer.max_actor_ckpt_to_keep`]"""
    deterministic: bool = False
    """Whole runs are equal, whatever the number of runners and the timing: a reply depends on the weights, on step,
    task and sample of its rollout, and on what is asked. Each reply is then decoded alone, which takes longer."""
    max_staleness: Annotated[int, Bounds(at_least=0, at_most=64)] = 0
    """How many weight versions the weights of a reply may be behind those that learn from it. 0 collects synchronously:
    a step waits for all its rollouts. With n, rollouts go on while the weights are updated, at most n + 1 times
    `batch_size` groups at a time; a group that is older when it ends is dropped as `too_stale`, and stale tokens of the
    others are corrected (`staleness_clip_max`). [no counterpart: `async_training.staleness_threshold` is a share of
    samples]"""
    step_timeout_seconds: Positive = 1800.0
    """A rollout that is not at its end by then is late; see `late_rollouts`."""
    late_rollouts: LatePolicy = "drop"
    """`drop`: it is cancelled and excluded, and the step goes on without it. `wait`: the time begins anew with each
    rollout that ends. `resubmit`: it is cancelled, and its task enqueued once more."""
    rollout_timeout_seconds: Positive | None = None
    """Largest age of one attempt, after which it is excluded; None is `step_timeout_seconds`."""
    refused_calls: RefusedCalls = "exclude"
    """What becomes of a scored rollout one of whose calls was refused for good (4xx, or an error that no retry got
    over): `exclude` leaves it out as `refused_call`, since its reward may tell of the refusal; `train` trains it."""
    engine_batch: Count = 64
    """Model calls that are generated at once."""
    max_drift: Share | None = None
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
        super().__post_init__()
        if self.lora is not None and not isinstance(self.lora, Mapping):
            raise BadRequestError(f"lora holds arguments of peft.LoraConfig, such as {{'r': 16}}; got {self.lora!r}")
        make_rules(self.alarms)
        self.check_rewards()
        self.check_vllm(has_adapters=self.lora is not None)
        self._check_pairs()
        self.by_policy()

    def _check_pairs(self) -> None:
        cache, length = self.soft_punish_cache, self.max_completion_length
        ahead, groups = self.max_staleness > 0, (self.max_staleness + 1) * self.batch_size
        stale = f"max_staleness={self.max_staleness} and "
        pairs = {
            f"{stale}deterministic=True: which weights answer a call depends on the timing; leave one of them out": (
                ahead and self.deterministic
            ),
            f"{stale}batch_size={self.batch_size}: {groups} groups would be in flight, of which at most {MOST_GROUPS} "
            "may be; take a smaller one": ahead and groups > MOST_GROUPS,
            f"{stale}use_kl_in_reward=True: the divergences of a group would stop the others; give beta without it": (
                ahead and self.use_kl_in_reward
            ),
            f"{stale}max_num_gen_batches={self.max_num_gen_batches}: a step does not wait for groups in place of those "
            "of equal rewards; leave it out": ahead and self.max_num_gen_batches > 1,
            f"{stale}importance_sampling_mode={self.importance_sampling_mode!r} with importance_sampling_correction="
            "True: a row may have been sampled by several versions of the weights; take 'token_truncate' or "
            "'token_mask'": ahead
            and self.importance_sampling_correction
            and self.importance_sampling_mode.startswith("sequence"),
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

    @property
    def critic(self) -> CriticSettings | None:
        """The settings of the critic that gives each token its advantage; None where a rollout has one."""
        return None

    @property
    def other_names(self) -> Mapping[str, str]:
        """Settings by the names that they have here, and those that the algorithm gives them."""
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
        settings: dict[str | None, GRPOSettings] = {}
        for name, own in self.policies.items():
            changes: dict[str, Any] = dict(own)
            try:
                settings[name] = dataclasses.replace(self, policies=None, **changes)
            except BadRequestError as error:
                raise BadRequestError(f"policies[{name!r}]: {error}") from None
        return settings

    def as_json(self) -> dict[str, object]:
        """Return the settings as JSON data."""
        output_dir = None if self.output_dir is None else str(self.output_dir)
        return {**dataclasses.asdict(self), "output_dir": output_dir}


def setting_names(cls: type[GRPOSettings]) -> list[str]:
    """Return the settings that an algorithm takes."""
    refused = {*cls.names_elsewhere, *cls.without_meaning}
    return [field.name for field in dataclasses.fields(cls) if field.name not in refused]


def make_settings(cls: type[S], model: str | Path | None, settings: Mapping[str, Any]) -> S:
    """Return checked settings of an algorithm.

    Raises:
        TypeError: a setting that is unknown or has no meaning for the algorithm; names it and the nearest right one.
        BadRequestError: a value out of its range, or no model.
    """
    names, elsewhere = setting_names(cls), cls.names_elsewhere
    check_names(cls.algorithm, list(settings), names, other_names=elsewhere, without_meaning=cls.without_meaning)
    if model is None:
        named = [own.get("model") for own in (read_policies(settings.get("policies")) or {}).values()]
        if not named or None in named:
            raise BadRequestError(f"{cls.model_missing}; got None")
        model = str(named[0])
    return cls(model=str(model) if isinstance(model, Path) else model, **settings)


def read_policies(policies: object) -> dict[str, dict[str, object]] | None:
    """Return the settings of each policy of `policies=` by name; None for one policy without a name.

    A list of names is policies that differ in nothing but what they learn.

    Raises:
        BadRequestError: it is neither, a name cannot stand in a URL, or a policy has a setting that is the run's.
    """
    if policies is None:
        return None
    if isinstance(policies, (list, tuple)):
        policies = {name: dict[str, object]() for name in cast("list[object]", policies)}
    if not isinstance(policies, Mapping) or not policies:
        raise BadRequestError(
            "policies must name the policies that learn, such as ['planner', 'solver'] or "
            f"{{'planner': {{'model': 'folder'}}, 'solver': {{}}}}; got {policies!r}"
        )
    by_name: dict[str, dict[str, object]] = {}
    for name, own in cast("Mapping[object, object]", policies).items():
        if not isinstance(name, str) or not _POLICY_NAME.fullmatch(name):
            raise BadRequestError(f"policies: {name!r} is no name: 1 to 128 letters, digits, '-' and '_'")
        if not isinstance(own, Mapping):
            raise BadRequestError(f"policies[{name!r}] must be a dict of settings, such as {{}}; got {own!r}")
        fields = cast("Mapping[str, object]", own)
        for field in fields:
            if field not in OWN_SETTINGS:
                near = closest_name(str(field), OWN_SETTINGS)
                hint = f"did you mean {near!r}?" if near else f"its own can be {', '.join(OWN_SETTINGS)}"
                raise BadRequestError(f"policies[{name!r}] has no setting {field!r} of its own: {hint}")
        by_name[name] = {key: str(value) if key == "model" else value for key, value in fields.items()}
    return by_name


def accepts(arguments: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Let type checkers and editors see which settings a constructor takes: those of the dataclass `arguments`."""
    del arguments
    return lambda constructor: constructor


def signature_of(
    settings: type[GRPOSettings], *more: inspect.Parameter, names: Sequence[str] | None = None
) -> inspect.Signature:
    """Return the signature of a constructor that takes the model, settings by name (all that the algorithm takes, or
    `names`) and `more` parameters, for help texts and command lines."""
    fields, hints = {field.name: field for field in dataclasses.fields(settings)}, get_type_hints(settings)
    own = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | Path")]
    own += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=hints[name])
        for name in names or setting_names(settings)
        if name != "model"
    ]
    return inspect.Signature([*own, *more])
