"""The settings of the loss, of the advantages and of the critic, checked at construction. Does not import torch.

A setting that TRL 1.16's `GRPOConfig` also has keeps its name; VERL 0.9.1's name follows in brackets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import BadRequestError
from agentlightning.training.loss_types import LOSSES, Aggregation, Loss, LossType, RatioLimits
from agentlightning.utils.setting_checks import Bounds, check_fields, check_number, refuse_pairs

KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Advantage = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjective = Literal["sum_then_normalize", "normalize_then_sum"]

Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(at_least=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]

_SCALES: dict[Advantage, ScaleRewards] = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


@explain_fields
@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of an optimizer step; the formulas are in `losses/objective.py`."""

    loss_type: LossType = "dapo"
    """`grpo`, `dapo` and `dr_grpo` use the clipped loss of PPO and differ only in `aggregation`. `cispo` clips the
    ratio but keeps the gradient of every token (its limit is `epsilon_high` itself, such as 5.0). `gspo` clips one
    ratio per sequence; its papers use an `epsilon` of about 3e-4. [`actor.policy_loss.loss_mode`]"""
    aggregation: Aggregation | None = None
    """Unit that has equal weight in the loss of a step: each `token`, each `sequence` (row) or each `rollout` (all its
    rows together). With `constant` each token weighs 1 / (rollouts * `loss_scale_factor`). None uses the value of the
    `loss_type`'s paper: `rollout` for grpo and gspo, `token` for dapo and cispo, `constant` for dr_grpo.
    [`actor.loss_agg_mode`]"""
    loss_scale_factor: Count | None = None
    """Length for `constant` aggregation, in tokens; None is `max_completion_length`. [`actor.loss_scale_factor`]"""
    epsilon: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """Lower clip range: the ratio of new to old probability is clipped below 1 - `epsilon`. [`actor.clip_ratio_low`]"""
    epsilon_high: Positive | None = 0.28
    """Upper clip range: the ratio is clipped above 1 + `epsilon_high`; None is `epsilon`. With `cispo` it is the
    maximum ratio itself. [`actor.clip_ratio_high`]"""
    delta: Annotated[float, Bounds(above=1)] | None = None
    """Maximum ratio for tokens with a negative advantage (dual clip). It must be above 1 + `epsilon_high`. None is no
    limit. [`actor.clip_ratio_c`]"""
    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference, which is the model as loaded. [`actor.kl_loss_coef`, or
    `algorithm.kl_ctrl.kl_coef` in the reward]"""
    sync_ref_model: bool = False
    """Move the reference towards the policy: after every `ref_model_sync_steps` optimizer steps, each of its weights
    becomes `ref_model_mixup_alpha` times the policy's plus the rest of its own (TR-DPO, arXiv:2404.09656). With `lora`,
    these are the weights of the adapters. [none]"""
    ref_model_mixup_alpha: Annotated[float, Bounds(above=0, at_most=1)] = 0.6
    """Share of the policy in the moved reference. [none]"""
    ref_model_sync_steps: Count = 512
    """Optimizer steps of the run between two moves of the reference. [none]"""
    kl_estimator: KLEstimator = "k3"
    """KL estimator: `k1` is log p/q, `k2` half its square, `k3` q/p - 1 - log q/p. [`actor.kl_loss_type`]"""
    use_bias_correction_kl: bool = True
    """Multiply the penalty of a token by its ratio (with `k2`, by its ratio without gradient), so that its gradient is
    the gradient of the divergence."""
    use_kl_in_reward: bool = False
    """Subtract the penalty from the rollout's reward instead of using it in the loss. [`algorithm.use_kl_in_reward`]"""
    importance_sampling_correction: bool = False
    """False: ratios are relative to the engine's probabilities. True: they are relative to the learner's before the
    first optimizer step, and a separate weight corrects the difference, see `importance_sampling_mode`. TRL adds the
    prefix `vllm_` to this and the next three names. [`algorithm.rollout_correction.bypass_mode`, negated]"""
    importance_sampling_mode: CorrectionMode = "sequence_mask"
    """One weight per token, or one per sequence (the product of the weights of its tokens). A weight outside its limits
    is set to the limit (`truncate`), or its token or sequence is removed from the loss (`mask`; with both limits, as in
    IcePop). [`rollout_correction.rollout_is`]"""
    importance_sampling_clip_max: Positive | None = 3.0
    """Maximum of that weight; None is no limit. [`rollout_correction.rollout_is_threshold`]"""
    importance_sampling_clip_min: Positive | None = None
    """Minimum of that weight; None is no limit. [the first number of `rollout_is_threshold`]"""
    staleness_clip_max: Positive | None = 5.0
    """Maximum of the weight of a token that an older weight version sampled; None is no limit. The weight is the
    learner's probability before its first optimizer step divided by the probability at sampling. Only runs with
    `max_staleness` have such tokens. [no counterpart]"""
    entropy_coef: NotNegative = 0.0
    """Weight of the mean entropy per token (nats), which is subtracted from the loss. [`actor.entropy_coeff`]"""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_loss()

    def check_loss(self) -> None:
        """Raise BadRequestError if settings of the loss contradict each other."""
        low, high, by = self.importance_sampling_clip_min, self.importance_sampling_clip_max, self.aggregates_by
        loss, largest = self.chosen_loss, self.ratio_limits.high
        pairs = {
            f"loss_type={self.loss_type!r} and epsilon_high={self.epsilon_high}: with {self.loss_type} it is the "
            "maximum ratio itself; set at least 1, such as 5.0": loss.high_is_ratio and largest < 1,
            f"loss_type={self.loss_type!r} and delta={self.delta}: this loss does not support delta; omit it": (
                self.delta is not None and not loss.takes_delta
            ),
            f"delta={self.delta} and epsilon_high={self.epsilon_high}: delta must be above 1 + epsilon_high": (
                self.delta is not None and self.delta <= largest
            ),
            f"loss_scale_factor={self.loss_scale_factor} and aggregation={by!r}: only 'constant' uses it": (
                self.loss_scale_factor is not None and by != "constant"
            ),
            "use_kl_in_reward=True and beta=0: set beta, the weight of the penalty": (
                self.use_kl_in_reward and self.beta == 0
            ),
            "sync_ref_model=True and beta=0: set beta, the weight of the divergence from the reference": (
                self.sync_ref_model and self.beta == 0
            ),
            f"sync_ref_model=False with ref_model_mixup_alpha={self.ref_model_mixup_alpha} and ref_model_sync_steps="
            f"{self.ref_model_sync_steps}: only sync_ref_model=True uses them": not self.sync_ref_model
            and (self.ref_model_mixup_alpha, self.ref_model_sync_steps) != (0.6, 512),
            f"loss_type={self.loss_type!r} and use_bias_correction_kl=True (with beta={self.beta}): its ratio is that "
            "of a sequence, which makes the penalty of a token biased; set use_bias_correction_kl=False": (
                loss.ratio_of == "row" and self.has_kl_loss and self.use_bias_correction_kl
            ),
            f"kl_estimator='k1' and use_bias_correction_kl=False (with beta={self.beta}): the gradient of k1 alone is "
            "0 on average; set use_bias_correction_kl=True or use_kl_in_reward=True, or use 'k2' or 'k3'": (
                self.kl_estimator == "k1" and self.has_kl_loss and not self.use_bias_correction_kl
            ),
            f"importance_sampling_clip_min={low} and importance_sampling_clip_max={high}: the minimum must be below "
            "the maximum": low is not None and high is not None and low >= high,
        }
        refuse_pairs(pairs)

    @property
    def chosen_loss(self) -> Loss:
        """The loss of `loss_type`."""
        return LOSSES[self.loss_type]

    @property
    def aggregates_by(self) -> Aggregation:
        """The value of `aggregation`, or its default."""
        return self.aggregation or self.chosen_loss.aggregation

    @property
    def ratio_limits(self) -> RatioLimits:
        """The ratios that count."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return self.chosen_loss.limits(self.epsilon, high, self.delta)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.beta > 0

    @property
    def has_kl_loss(self) -> bool:
        """Whether the loss needs the reference's log-probabilities."""
        return self.beta > 0 and not self.use_kl_in_reward


@explain_fields
@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Settings that turn rewards into advantages; the formulas are in `losses/advantages.py`."""

    advantage: Advantage = "grpo"
    """Baseline of a reward: the mean of its group (`grpo`, `reinforce_plus_plus_baseline`), the mean of the other
    rollouts of its group (`rloo`), or the mean of the step (`reinforce_plus_plus`). [`algorithm.adv_estimator`]"""
    scale_rewards: ScaleRewards | None = None
    """Divisor of advantages: `group` is the standard deviation of the group (GRPO), `batch` that of the step's rewards,
    `none` does not divide (Dr. GRPO). None uses the value of the `advantage`'s paper: `group` for grpo, `none` for
    rloo, `batch` for the other two. [`algorithm.norm_adv_by_std_in_grpo`]"""
    reward_weights: Mapping[str, float] | None = None
    """Weight of each reward dimension by name, for rewards with several dimensions. A dimension without a weight does
    not count. None uses only the primary reward. [none; in the reward function]"""
    multi_objective_aggregation: MultiObjective = "sum_then_normalize"
    """`sum_then_normalize` adds the weighted dimensions into one reward and computes its advantage.
    `normalize_then_sum` computes an advantage per dimension and scales their weighted sum over the step (GDPO).
    [`adv_estimator: gdpo`]"""
    soft_punish_cache: Count | None = None
    """Number of tokens before `max_completion_length` at which the length of a rollout's longest call begins to lower
    its reward; None disables it. In TRL: `get_soft_overlong_punishment(soft_punish_cache=)`.
    [`overlong_buffer_cfg.len`]"""
    overlong_penalty_factor: Positive = 1.0
    """Penalty of a call with the maximum length, with `soft_punish_cache`. [`overlong_buffer_cfg.penalty_factor`]"""
    max_num_gen_batches: Count = 1
    """Maximum number of times that a step samples: groups whose rewards are all equal are excluded and replaced by
    groups of other tasks (DAPO). With 1, no group is replaced. [`algorithm.filter_groups.max_num_gen_batches`]"""

    def check_rewards(self) -> None:
        """Raise BadRequestError if a weight is out of range or settings of rewards contradict each other."""
        weights = self.reward_weights
        if weights is not None and (
            not isinstance(weights, Mapping) or not weights or not all(isinstance(name, str) for name in weights)
        ):
            raise BadRequestError(
                "reward_weights must be a dict with the weight of each reward dimension, such as "
                f"{{'right': 1.0, 'short': 0.2}}; got {weights!r}"
            )
        for name, weight in (weights or {}).items():
            check_number(f"reward_weights[{name!r}]", weight, float, Bounds(at_least=-1e30, at_most=1e30))
        natural, several = _SCALES[self.advantage], self.multi_objective_aggregation == "normalize_then_sum"
        pairs = {
            f"advantage={self.advantage!r} and scale_rewards={self.scale_rewards!r}: it is scaled by {natural!r}; "
            "omit scale_rewards": self.advantage != "grpo" and self.scale_rewards not in (None, natural),
            "multi_objective_aggregation='normalize_then_sum' and reward_weights=None: set reward_weights": (
                several and weights is None
            ),
            f"multi_objective_aggregation='normalize_then_sum' and advantage={self.advantage!r}: it requires 'grpo'": (
                several and self.advantage != "grpo"
            ),
            f"multi_objective_aggregation='normalize_then_sum' and scale_rewards={self.scale_rewards!r}: it scales by "
            "group and by batch; omit scale_rewards": several and self.scales_by != "group",
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
        """Whether a group with one rollout or with equal rewards has no advantages."""
        return self.advantage != "reinforce_plus_plus"


@explain_fields
@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings of the critic and its values; the formulas are in `losses/critic.py`."""

    gamma: Share = 1.0
    """Discount factor: weight of the value of the next token, between 0 and 1. [`algorithm.gamma`]"""
    lam: Share = 0.95
    """Lambda of GAE, between 0 (advantages use only the next value) and 1 (they use the full return).
    [`algorithm.lam`]"""
    vf_coef: NotNegative = 0.1
    """Weight of the value loss. It also trains the layers below the value head. [none; VERL's critic is a separate
    model]"""
    cliprange_value: Positive = 0.2
    """Clip range of the value loss: the change of a value from its value before the step is clipped to this.
    [`critic.cliprange_value`, 0.5]"""
    value_learning_rate: Positive = 1e-3
    """Learning rate of the value head in the first step; it follows the schedule of `learning_rate`.
    [`critic.optim.lr`]"""
    whiten_advantages: bool = True
    """Subtract the mean of a step's token advantages and divide by their deviation, as TRL and VERL always do."""
