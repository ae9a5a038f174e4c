"""The settings of the loss: which formula, its bounds, its penalty towards a reference, its corrections.

Pairs that do not go together are refused here, so that a run cannot begin with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from agentlightning.field_help import explain_fields
from agentlightning.utils.setting_checks import check_choice, check_flag, check_number, refuse_pairs

LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gspo"]
Aggregation = Literal["token", "sequence", "rollout", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_AGGREGATIONS: dict[LossType, Aggregation] = {
    "grpo": "rollout",
    "dapo": "token",
    "dr_grpo": "constant",
    "cispo": "token",
    "gspo": "rollout",
}


@explain_fields
@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss of an optimizer step is made of; the formulas are in `objective.py`."""

    loss_type: LossType = "dapo"
    """`grpo`, `dapo` and `dr_grpo` have the clipped loss of PPO and differ in `aggregation` alone. `cispo` bounds the
    ratio and leaves every token its gradient (its bound is `epsilon_high` itself, such as 5.0). `gspo` clips one ratio
    per sequence; its papers take an `epsilon` of some 3e-4. [`actor.policy_loss.loss_mode`]"""
    aggregation: Aggregation | None = None
    """What has the same weight in the loss of a step: each `token`, each `sequence` (row), each `rollout` (all its
    rows together); or `constant`, where each token weighs 1 / (rollouts * `loss_scale_factor`). None is what the
    `loss_type` has in its paper: `rollout` for grpo and gspo, `token` for dapo and cispo, `constant` for dr_grpo.
    [`actor.loss_agg_mode`]"""
    loss_scale_factor: int | None = None
    """The constant length, in tokens; None is `max_completion_length`. [`actor.loss_scale_factor`]"""
    epsilon: float = 0.2
    """How far below one the ratio of new to old probability counts. [`actor.clip_ratio_low`]"""
    epsilon_high: float | None = 0.28
    """How far above one it counts; None is `epsilon`. With `cispo` the largest ratio itself.
    [`actor.clip_ratio_high`]"""
    delta: float | None = None
    """Largest ratio that counts where the advantage is negative (dual clip); above 1 + `epsilon_high`. None is no
    bound. [`actor.clip_ratio_c`]"""
    beta: float = 0.0
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
    importance_sampling_clip_max: float | None = 3.0
    """Upper bound of that weight; None is none. [`rollout_correction.rollout_is_threshold`]"""
    importance_sampling_clip_min: float | None = None
    """Lower bound of that weight; None is none. [the first number of `rollout_is_threshold`]"""
    staleness_clip_max: float | None = 5.0
    """Upper bound of the weight of a token that older weights sampled, which is what the probability of the learner
    before its first optimizer step is over that of sampling; None is none. Such tokens are there with `max_staleness`
    alone. [no counterpart]"""
    entropy_coef: float = 0.0
    """Weight of the mean entropy per token, in nats, which the loss is lowered by. [`actor.entropy_coeff`]"""

    def __post_init__(self) -> None:
        self.check_loss()

    def check_loss(self) -> None:
        """Return if every setting is in its range and all of them go together.

        Raises:
            BadRequestError: one is not, or a pair does not; they are named.
        """
        check_choice("loss_type", self.loss_type, get_args(LossType))
        if self.aggregation is not None:
            check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_choice("importance_sampling_mode", self.importance_sampling_mode, get_args(CorrectionMode))
        for name in ("use_bias_correction_kl", "use_kl_in_reward", "importance_sampling_correction"):
            check_flag(name, getattr(self, name))
        if self.loss_scale_factor is not None:
            check_number("loss_scale_factor", self.loss_scale_factor, int, at_least=1)
        check_number("epsilon", self.epsilon, float, above=0, below=1)
        if self.epsilon_high is not None:
            check_number("epsilon_high", self.epsilon_high, float, above=0)
        if self.delta is not None:
            check_number("delta", self.delta, float, above=1)
        check_number("beta", self.beta, float, at_least=0)
        check_number("entropy_coef", self.entropy_coef, float, at_least=0)
        for name in ("importance_sampling_clip_max", "importance_sampling_clip_min", "staleness_clip_max"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), float, above=0)
        self._check_pairs()

    def _check_pairs(self) -> None:
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        pairs = {
            "loss_type='cispo' and epsilon_high={epsilon_high}: with cispo it is the largest ratio itself; give one of "
            "at least 1, such as 5.0": self.loss_type == "cispo" and self.ratio_bounds[1] < 1,
            "loss_type={loss_type!r} and delta={delta}: it bounds no ratio by the sign of the advantage; leave delta "
            "out": self.delta is not None and self.loss_type in ("cispo", "gspo"),
            "delta={delta} and epsilon_high={epsilon_high}: delta must be above 1 + epsilon_high": (
                self.delta is not None and self.loss_type != "cispo" and self.delta <= self.ratio_bounds[1]
            ),
            "loss_scale_factor={loss_scale_factor} and aggregation={by!r}: only 'constant' has a constant length": (
                self.loss_scale_factor is not None and self.aggregates_by != "constant"
            ),
            "use_kl_in_reward=True and beta=0: give beta, the weight of the penalty": (
                self.use_kl_in_reward and self.beta == 0
            ),
            "loss_type='gspo' and use_bias_correction_kl=True (with beta={beta}): its ratio is that of a sequence, "
            "with which the penalty of a token is not unbiased; set use_bias_correction_kl=False": (
                self.loss_type == "gspo" and self.has_kl_loss and self.use_bias_correction_kl
            ),
            "kl_estimator='k1' and use_bias_correction_kl=False (with beta={beta}): the gradient of k1 alone is 0 in "
            "the mean; set use_bias_correction_kl=True or use_kl_in_reward=True, or take 'k2' or 'k3'": (
                self.kl_estimator == "k1" and self.has_kl_loss and not self.use_bias_correction_kl
            ),
            "importance_sampling_clip_min={low} and importance_sampling_clip_max={high}: the lower bound must be below "
            "the upper one": low is not None and high is not None and low >= high,
        }
        values = {**vars(self), "by": self.aggregates_by, "low": low, "high": high}
        refuse_pairs({text.format(**values): is_refused for text, is_refused in pairs.items()})

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
