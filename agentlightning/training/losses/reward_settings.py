"""The settings of what a rollout is worth: its reward, and the advantage that the reward gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from agentlightning.errors import BadRequestError
from agentlightning.field_help import explain_fields
from agentlightning.utils.setting_checks import check_choice, check_flag, check_number, refuse_pairs

Advantage = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ScaleRewards = Literal["group", "batch", "none"]
MultiObjective = Literal["sum_then_normalize", "normalize_then_sum"]

_SCALES: dict[Advantage, ScaleRewards] = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


@explain_fields
@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """From rewards to advantages; the formulas are in `rewards.py` and `advantages.py`."""

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
    soft_punish_cache: int | None = None
    """Tokens before `max_completion_length` in which the reward of a rollout begins to fall with its longest call; None
    is off. TRL has it as `get_soft_overlong_punishment(soft_punish_cache=)`. [`overlong_buffer_cfg.len`]"""
    overlong_penalty_factor: float = 1.0
    """What a call of full length costs. [`overlong_buffer_cfg.penalty_factor`]"""
    max_num_gen_batches: int = 1
    """How many times a step may sample: groups whose rewards are all equal are replaced by groups of other tasks, and
    stay excluded (DAPO). 1 takes the groups as they are. [`algorithm.filter_groups.max_num_gen_batches`]"""

    def __post_init__(self) -> None:
        self.check_rewards()

    def check_rewards(self) -> None:
        """Return if every setting is in its range and all of them go together.

        Raises:
            BadRequestError: one is not, or a pair does not; they are named.
        """
        check_choice("advantage", self.advantage, get_args(Advantage))
        if self.scale_rewards is not None:
            check_choice("scale_rewards", self.scale_rewards, get_args(ScaleRewards))
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, get_args(MultiObjective))
        check_flag("mask_truncated_completions", self.mask_truncated_completions)
        check_number("max_num_gen_batches", self.max_num_gen_batches, int, at_least=1)
        check_number("overlong_penalty_factor", self.overlong_penalty_factor, float, above=0)
        if self.soft_punish_cache is not None:
            check_number("soft_punish_cache", self.soft_punish_cache, int, at_least=1)
        self._check_weights()
        natural, several = _SCALES[self.advantage], self.multi_objective_aggregation == "normalize_then_sum"
        pairs = {
            f"advantage={self.advantage!r} and scale_rewards={self.scale_rewards!r}: it is scaled by {natural!r}; "
            "leave scale_rewards out": self.advantage != "grpo" and self.scale_rewards not in (None, natural),
            "multi_objective_aggregation='normalize_then_sum' and reward_weights=None: name the reward dimensions": (
                several and self.reward_weights is None
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

    def _check_weights(self) -> None:
        weights = self.reward_weights
        if weights is None:
            return
        if not isinstance(weights, Mapping) or not weights or not all(isinstance(name, str) for name in weights):
            raise BadRequestError(
                f"reward_weights holds the weight of each reward dimension by its name, such as "
                f"{{'right': 1.0, 'short': 0.2}}; got {weights!r}"
            )
        for name, weight in weights.items():
            check_number(f"reward_weights[{name!r}]", weight, float, at_least=-1e30, at_most=1e30)

    @property
    def scales_by(self) -> ScaleRewards:
        """The value of `scale_rewards`, or its default."""
        return self.scale_rewards or _SCALES[self.advantage]

    @property
    def compares_in_groups(self) -> bool:
        """Whether a group of one, or one of equal rewards, has nothing to teach."""
        return self.advantage != "reinforce_plus_plus"
