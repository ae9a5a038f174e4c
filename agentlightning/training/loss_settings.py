"""The settings of the loss, of the advantages and of the critic, checked at construction. Does not import torch.

The losses of the policy are in one table, `LOSSES`, from which settings and objective read all differences.

A setting that TRL 1.16's `GRPOConfig` also has keeps its name; VERL 0.9.1's name follows in brackets.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import BadRequestError
from agentlightning.utils.setting_checks import Bounds, check_fields, check_number, refuse_pairs

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Advantage = Literal["grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ScaleRewards = Literal["group", "batch", "none"]
TurnGroup = Literal["turn", "state"]
MultiObjective = Literal["sum_then_normalize", "normalize_then_sum"]
LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gspo", "sapo", "luspo", "vespo", "dppo", "ipo"]
Aggregation = Literal["token", "sequence", "rollout", "constant"]
FormulaName = Literal[
    "clipped_ratio", "weighted_gradient", "soft_gate", "gamma_weight", "masked_ratio", "cross_entropy", "custom"
]
Count = Annotated[int, Bounds(at_least=1)]
CountOrZero = Annotated[int, Bounds(at_least=0)]
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(at_least=0)]
Share = Annotated[float, Bounds(at_least=0, at_most=1)]

_SCALES: dict[Advantage, ScaleRewards] = {
    "grpo": "group",
    "rloo": "none",
    "maxrl": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


class RatioLimits(NamedTuple):
    """The ratios that count."""

    low: float
    """Smallest ratio that counts."""
    high: float
    """Largest ratio that counts."""
    delta: float | None
    """Largest ratio that counts if the advantage is negative; None is no limit."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The properties that distinguish one loss from the others."""

    formula: FormulaName = "clipped_ratio"
    """Its function in `losses/formulas.py`."""
    aggregation: Aggregation
    """Default of the setting `aggregation`."""
    scale_factor: int | None = None
    """Default of `loss_scale_factor`; None is `max_completion_length`."""
    ratio_of: Literal["token", "row"] = "token"
    """`row`: each token has the ratio of its row (the geometric mean of the ratios of its tokens) and its own gradient.
    A penalty per token is then biased, so `use_bias_correction_kl` is rejected."""
    limits_of: Literal["ratio", "largest ratio", "probability"] = "ratio"
    """`ratio`: ratios from 1 - `epsilon` to 1 + `epsilon_high` count. `largest ratio`: those from 0 to `epsilon_high`
    (at least 1). `probability`: `epsilon` and `epsilon_high` limit the change of the probability itself."""
    takes_delta: bool = False
    """Whether `delta` is supported."""
    uses_correction: bool = False
    """Whether the formula contains the correction, which is then not multiplied with its result."""

    def limits(self, epsilon: float, epsilon_high: float, delta: float | None) -> RatioLimits:
        """Return the ratios that count, or the changes of the probability."""
        if self.limits_of == "probability":
            return RatioLimits(epsilon, epsilon_high, delta)
        low, high = (0.0, epsilon_high) if self.limits_of == "largest ratio" else (1 - epsilon, 1 + epsilon_high)
        return RatioLimits(low, high, delta)


LOSSES: Final[Mapping[LossType, Loss]] = {
    "grpo": Loss(aggregation="rollout", takes_delta=True),
    "dapo": Loss(aggregation="token", takes_delta=True),
    "dr_grpo": Loss(aggregation="constant", takes_delta=True),
    "cispo": Loss(aggregation="token", formula="weighted_gradient", limits_of="largest ratio"),
    # arXiv:2507.18071, equations 5 and 7, and the section on GSPO-token
    "gspo": Loss(aggregation="rollout", ratio_of="row"),
    "sapo": Loss(aggregation="rollout", formula="soft_gate"),
    # GSPO with each row weighted by its length, arXiv:2602.05261
    "luspo": Loss(aggregation="constant", scale_factor=1, ratio_of="row"),
    "vespo": Loss(aggregation="token", formula="gamma_weight", uses_correction=True),
    "dppo": Loss(aggregation="token", formula="masked_ratio", limits_of="probability"),
    "ipo": Loss(aggregation="token", formula="masked_ratio", limits_of="probability"),
}
CROSS_ENTROPY: Final = Loss(aggregation="token", formula="cross_entropy")
"""The loss of supervised fine-tuning, which no `loss_type` names."""


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss for B rows of at most T tokens. Only the values of tokens in `mask` have a meaning."""

    logprobs: Tensor
    """(B, T) natural log-probability of each token under the weights that learn, with gradient."""
    old_logprobs: Tensor
    """(B, T) the log-probability with which `ratio` compares: the engine's, or with `importance_sampling_correction`
    (and for tokens that older weights sampled) that of the learner before its first optimizer step."""
    sampler_logprobs: Tensor
    """(B, T) the engine's log-probability of each token when it was sampled."""
    reference_logprobs: Tensor | None
    """(B, T) of the reference; None if the loss has no penalty."""
    ratio: Tensor
    """(B, T) exp(logprobs - old_logprobs), with gradient; 1 outside `mask`."""
    advantages: Tensor
    """(B, 1) of each row's rollout, or (B, T) of each token."""
    entropy: Tensor
    """(B, T) entropy of the distribution of each token in nats; with gradient if `entropy_coef` is not 0."""
    mask: Tensor
    """(B, T) bool, true exactly on the tokens to train."""
    correction: Tensor
    """(B, T) importance weight that is multiplied with the result, without gradient."""
    settings: LossSettings
    """The settings of the run, such as `settings.epsilon`."""


CustomLoss: TypeAlias = Callable[[LossInputs], Any]
"""A function that returns the loss of each token, (B, T), to be minimized. The result is multiplied by `correction`,
the KL penalty is added, and tokens are weighted by `aggregation`; values outside `mask` do not count."""


def custom_loss(loss: CustomLoss | str) -> CustomLoss:
    """Return the function of the setting `loss`. An import path is also searched from the working folder.

    Raises:
        BadRequestError: it is neither a function nor the import path of one.
    """
    found: object = loss
    if isinstance(loss, str):
        module = loss.partition(":")[0]
        if "<" in loss or module == "__main__":
            raise BadRequestError(
                f"loss={loss!r} is a lambda, a function inside another one, or a function of the program that was "
                "started, which other programs cannot import. Define it in a module"
            )
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
        try:
            found = pkgutil.resolve_name(loss)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadRequestError(
                f"loss={loss!r} cannot be imported: {error}. Pass a function, or its import path such as "
                "'my_package.losses:my_loss', where the package is in the working folder or installed"
            ) from None
    if not inspect.isfunction(found):
        raise BadRequestError(
            f"loss must be a function of an agl.LossInputs, or its import path; got {found!r}. Put the parameters of a "
            "partial function, of an object or of a method into a function of its own"
        )
    return cast("CustomLoss", found)


def name_of(loss: CustomLoss | str | None) -> str:
    """Return the import path of the setting `loss` for records; empty for None."""
    if loss is None or isinstance(loss, str):
        return loss or ""
    return f"{loss.__module__}:{getattr(loss, '__qualname__', loss)}"


@explain_fields
@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of an optimizer step; the formulas are in `losses/objective.py`."""

    loss_type: LossType = "dapo"
    """`grpo`, `dapo` and `dr_grpo` use the clipped loss of PPO and differ only in `aggregation`. `cispo` clips the
    ratio but keeps the gradient of every token (its limit is `epsilon_high` itself, such as 5.0). `gspo` and `luspo`
    clip one ratio per sequence; their papers use an `epsilon` of about 3e-4. `sapo` and `vespo` weight the gradient by
    a smooth function of the ratio of the token (`sapo`) or of the sequence (`vespo`). `dppo` and `ipo` remove tokens
    whose probability changed by more than `epsilon` or `epsilon_high`. [`actor.policy_loss.loss_mode`]"""
    loss: CustomLoss | str | None = None
    """Your own loss instead of that of `loss_type`: a function that receives an `agl.LossInputs` and returns the loss
    of each token, (B, T), or its import path such as `my_package.losses:my_loss`. Its `aggregation` is `token` by
    default. [`register_policy_loss`]"""
    aggregation: Aggregation | None = None
    """Unit that has equal weight in the loss of a step: each `token`, each `sequence` (row) or each `rollout` (all its
    rows together). With `constant` each token weighs 1 / (rollouts * `loss_scale_factor`). None uses the value of the
    `loss_type`'s paper: `rollout` for grpo, gspo and sapo, `constant` for dr_grpo and luspo, `token` for the others.
    [`actor.loss_agg_mode`]"""
    loss_scale_factor: Count | None = None
    """Length for `constant` aggregation, in tokens; None is `max_completion_length`, or 1 with luspo.
    [`actor.loss_scale_factor`]"""
    epsilon: Annotated[float, Bounds(above=0, below=1)] = 0.2
    """Lower clip range: the ratio of new to old probability is clipped below 1 - `epsilon`. With `dppo` and `ipo` it is
    the largest decrease of the probability itself. [`actor.clip_ratio_low`]"""
    epsilon_high: Positive | None = 0.28
    """Upper clip range: the ratio is clipped above 1 + `epsilon_high`; None is `epsilon`. With `cispo` it is the
    maximum ratio itself, with `dppo` and `ipo` the largest increase of the probability. [`actor.clip_ratio_high`]"""
    delta: Annotated[float, Bounds(above=1)] | None = None
    """Maximum ratio for tokens with a negative advantage (dual clip). It must be above 1 + `epsilon_high`. None is no
    limit. [`actor.clip_ratio_c`]"""
    sapo_temperature_pos: Positive = 1.0
    """Temperature of `sapo` for tokens with a positive advantage; a higher one reduces the weight of tokens with a
    ratio far from 1 more. [`actor.tau_pos`]"""
    sapo_temperature_neg: Positive = 1.05
    """Temperature of `sapo` for the other tokens. [`actor.tau_neg`]"""
    vespo_k_pos: Positive = 2.0
    """Exponent of `vespo` for sequences with a positive advantage: how much a ratio below 1 reduces the weight.
    [none]"""
    vespo_lambda_pos: Positive = 3.0
    """Rate of decay of `vespo` for the same: how much a ratio above 1 reduces the weight. [none]"""
    vespo_k_neg: Positive = 3.0
    """Exponent of `vespo` for sequences with a negative advantage. [none]"""
    vespo_lambda_neg: Positive = 2.0
    """Rate of decay of `vespo` for sequences with a negative advantage. [none]"""
    off_policy_mask_threshold: Positive | None = None
    """Remove a sequence with a negative advantage from the loss if its mean log ratio of the engine's to the learner's
    probability is above this threshold, such as 0.5 (DeepSeek-V3.2, arXiv:2512.02556, equation 9). If its calls have
    their own advantages, those with a negative one are removed. [none]"""
    top_entropy_quantile: Share = 1.0
    """Share of the tokens of an optimizer step that the loss keeps, those with the highest entropy
    (arXiv:2506.01939, which uses 0.2). Below 1, each optimizer step needs one more forward pass. [none]"""
    kl_tau: NotNegative = 0.0
    """Weight of the squared log ratio of the learner's to the engine's probability, a penalty for distance from the
    weights that sampled (Kimi K2.5, arXiv:2602.02276). The name is that of prime-rl, which uses 1e-3 with `dppo`.
    [none]"""
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
        """Raise BadRequestError if settings of the loss contradict each other, or the custom loss cannot be found."""
        if self.loss is not None:
            custom_loss(self.loss)
        low, high, by = self.importance_sampling_clip_min, self.importance_sampling_clip_max, self.aggregates_by
        loss, largest = self.chosen_loss, self.ratio_limits.high
        of_sapo = {name: getattr(self, name) for name in ("sapo_temperature_pos", "sapo_temperature_neg")}
        of_vespo = {f"vespo_{n}": getattr(self, f"vespo_{n}") for n in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        unused = [
            f"{name}={value}"
            for owner, values in (("sapo", of_sapo), ("vespo", of_vespo))
            for name, value in values.items()
            if self.loss is None and self.loss_type != owner and value != getattr(LossSettings, name)
        ]
        pairs = {
            f"loss_type={self.loss_type!r} and {', '.join(unused)}: this loss does not use it; omit it": bool(unused),
            f"loss_type={self.loss_type!r} and loss={name_of(self.loss)!r}: a custom loss replaces that of loss_type; "
            "omit one of them": self.loss is not None and self.loss_type != "dapo",
            f"loss_type={self.loss_type!r} and epsilon_high={self.epsilon_high}: with {self.loss_type} it is the "
            "maximum ratio itself; set at least 1, such as 5.0": loss.limits_of == "largest ratio" and largest < 1,
            f"loss_type={self.loss_type!r} and epsilon_high={self.epsilon_high}: with {self.loss_type} it is a change "
            "of a probability; set at most 1": loss.limits_of == "probability" and largest > 1,
            f"loss_type='vespo' and importance_sampling_mode={self.importance_sampling_mode!r}: vespo multiplies the "
            "corrections of the tokens of a sequence; use 'token_truncate' or 'token_mask'": loss.uses_correction
            and self.importance_sampling_correction
            and self.importance_sampling_mode.startswith("sequence"),
            f"loss_type={self.loss_type!r} and delta={self.delta}: this loss does not support delta; omit it": (
                self.delta is not None and not loss.takes_delta
            ),
            f"delta={self.delta} and epsilon_high={self.epsilon_high}: delta must be above 1 + epsilon_high": (
                self.delta is not None and loss.takes_delta and self.delta <= largest
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
        """The loss of `loss_type`, or the custom loss."""
        if self.loss is None:
            return LOSSES[self.loss_type]
        return Loss(aggregation="token", formula="custom", takes_delta=True)

    @property
    def aggregates_by(self) -> Aggregation:
        """The value of `aggregation`, or its default."""
        return self.aggregation or self.chosen_loss.aggregation

    def constant_length(self, longest: int) -> int:
        """Return the value of `loss_scale_factor`, or its default; `longest` is `max_completion_length`."""
        return self.loss_scale_factor or self.chosen_loss.scale_factor or longest

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
    """Baseline of a reward: the mean of its group (`grpo`, `maxrl`, `reinforce_plus_plus_baseline`), the mean of the
    other rollouts of its group (`rloo`), or the mean of the step (`reinforce_plus_plus`). `maxrl` divides by the mean
    of the group, so that rarely solved tasks weigh more; it requires rewards of at least 0.
    [`algorithm.adv_estimator`]"""
    scale_rewards: ScaleRewards | None = None
    """Divisor of advantages: `group` is the standard deviation of the group (GRPO), `batch` that of the step's rewards,
    `none` does not divide (Dr. GRPO); as in TRL, True is `group` and False is `none`. None uses the value of the
    `advantage`'s paper: `group` for grpo, `none` for rloo and maxrl, `batch` for the other two.
    [`algorithm.norm_adv_by_std_in_grpo`]"""
    reward_weights: Mapping[str, float] | None = None
    """Weight of each reward dimension by name, for rewards with several dimensions. A dimension without a weight does
    not count. None uses only the primary reward. [none; in the reward function]"""
    multi_objective_aggregation: MultiObjective = "sum_then_normalize"
    """`sum_then_normalize` adds the weighted dimensions into one reward and computes its advantage.
    `normalize_then_sum` computes an advantage per dimension and scales their weighted sum over the step (GDPO).
    [`adv_estimator: gdpo`]"""
    turn_advantage_weight: NotNegative = 0.0
    """Weight of the advantage of each model call, which is added to that of its rollout. It comes from the rewards that
    were emitted for calls, steps and agents; if no rollout of a group has any, from the rollout's own reward, as that
    of its last call. 0 trains all calls of a rollout with one advantage. [none; in verl-agent: `step_advantage_w`]"""
    turn_group: TurnGroup = "turn"
    """Calls whose returns are compared, among those of one task: `turn` compares the n-th calls of each agent, `state`
    those with the same prompt (GiGPO, arXiv:2505.10978). [none]"""
    turn_gamma: Share = 1.0
    """Discount of the return of a call: a reward counts this much less for each call between them. [none]"""
    soft_punish_cache: Count | None = None
    """Number of tokens before `max_completion_length` at which the length of a rollout's longest call begins to lower
    its reward; None disables it. In TRL: `get_soft_overlong_punishment(soft_punish_cache=)`.
    [`overlong_buffer_cfg.len`]"""
    overlong_penalty_factor: Positive = 1.0
    """Penalty of a call with the maximum length, with `soft_punish_cache`. [`overlong_buffer_cfg.penalty_factor`]"""
    max_num_gen_batches: Count = 1
    """Maximum number of times that a step samples: groups whose rewards are all equal are excluded and replaced by
    groups of other tasks (DAPO). With 1, no group is replaced. [`algorithm.filter_groups.max_num_gen_batches`]"""

    def read_scale(self) -> None:
        """Replace True and False, which TRL accepts for `scale_rewards`, by the names of what they mean."""
        scale: object = self.scale_rewards
        if isinstance(scale, bool):
            object.__setattr__(self, "scale_rewards", "group" if scale else "none")

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
            f"turn_advantage_weight={self.turn_advantage_weight} and advantage={self.advantage!r}: calls are compared "
            "in groups; use 'grpo' or 'rloo'": self.turn_advantage_weight > 0
            and self.advantage not in ("grpo", "rloo"),
            f"turn_advantage_weight={self.turn_advantage_weight} and multi_objective_aggregation='normalize_then_sum': "
            "rewards of calls have one dimension": self.turn_advantage_weight > 0 and several,
            f"turn_group={self.turn_group!r}, turn_gamma={self.turn_gamma} and turn_advantage_weight=0: set "
            "turn_advantage_weight, such as 1.0": self.turn_advantage_weight == 0
            and (self.turn_group != "turn" or self.turn_gamma != 1.0),
            "advantage='maxrl' and soft_punish_cache: it divides by the mean reward, which a penalty makes negative": (
                self.advantage == "maxrl" and self.soft_punish_cache is not None
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
