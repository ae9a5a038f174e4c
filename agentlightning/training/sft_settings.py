"""The settings of supervised fine-tuning: those of training runs, of its loss, and of rollout selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, cast

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import (
    CROSS_ENTROPY,
    Aggregation,
    Count,
    Loss,
    LossSettings,
    NotNegative,
    RewardSettings,
)
from agentlightning.training.settings import TrainingSettings
from agentlightning.utils.setting_checks import Bounds

Source = Literal["new", "stored"]

_BY_ANOTHER_NAME: Final[Mapping[str, str]] = {
    "num_train_epochs": "max_steps, which counts steps of batch_size",
    "threshold": "min_reward",
    "reward_threshold": "min_reward",
    "best_of": "best_per_task",
    "rollout_ids": "rollouts",
    "max_length": "max_model_length",
    "packing": "padding_free",
}
_OF_REWARDS: Final = "rewards choose rollouts; they do not weight tokens"
_OF_RATIOS: Final = "SFT uses the cross-entropy loss, which has no ratio"
_OF_REFERENCE: Final = "SFT uses the cross-entropy loss, which has no reference"
_WITHOUT_MEANING: Final[Mapping[str, str]] = {
    "loss": "SFT always uses the cross-entropy loss; use agl.GRPO for your own",
    "loss_type": "SFT always uses the cross-entropy loss; `aggregation` sets how it is averaged",
    "loss_scale_factor": "the loss of SFT is a mean",
    **dict.fromkeys(("advantage", "scale_rewards", "multi_objective_aggregation", "reward_weights"), _OF_REWARDS),
    **dict.fromkeys(("turn_advantage_weight", "turn_group", "turn_gamma"), _OF_REWARDS),
    **dict.fromkeys(("soft_punish_cache", "overlong_penalty_factor", "max_num_gen_batches"), _OF_REWARDS),
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", "staleness_clip_max", "kl_tau"), _OF_RATIOS),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg", "off_policy_mask_threshold"), _OF_RATIOS),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), _OF_RATIOS),
    "top_entropy_quantile": "SFT trains every token of the chosen rollouts",
    "importance_sampling_correction": _OF_RATIOS,
    **{f"importance_sampling_{name}": _OF_RATIOS for name in ("mode", "clip_max", "clip_min")},
    **dict.fromkeys(("beta", "kl_estimator", "use_bias_correction_kl", "use_kl_in_reward"), _OF_REFERENCE),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _OF_REFERENCE),
    "policies": "SFT trains one policy; use agl.GRPO for several",
    "max_staleness": "SFT collects synchronously; use agl.GRPO",
    "curriculum": "SFT learns from chosen rollouts, and a rate near one half has no advantage for it",
}
_SILENT_ALARMS: Final = ("policy_shift", "engine_mismatch", "equal_rewards", "reference_distance", "stale_weights")
"""Alarms that do not apply to the cross-entropy loss, which can learn from tokens of any source."""


class _CrossEntropySettings(LossSettings):
    @property
    @override
    def chosen_loss(self) -> Loss:
        return CROSS_ENTROPY


@explain_fields
@dataclass(frozen=True, kw_only=True)
class SFTSettings(TrainingSettings):
    """Every setting of `SFT`, with its meaning and default. `GRPOSettings` explains the settings shared with GRPO."""

    algorithm = "SFT"
    names_elsewhere = _BY_ANOTHER_NAME
    without_meaning = _WITHOUT_MEANING
    model_missing = (
        "SFT needs model, the folder of a transformers model: agl.SFT(model='path/to/model', min_reward=1.0)"
    )

    rollouts: Source | Sequence[str] = "new"
    """Source of rollouts: `new` runs the agent on tasks in every step; `stored` uses the training rollouts that are in
    the store at the start; a list of ids uses exactly these rollouts."""
    from_run: str | None = None
    """Run whose stored rollouts are used; `""` is the run without a name, None is every run."""
    min_reward: float | None = None
    """Minimum reward of a chosen rollout; None is no limit."""
    best_per_task: Count | None = None
    """Number of best rollouts chosen per task; None is no limit. Rollouts with equal inputs belong to one task."""
    aggregation: Aggregation | None = None
    """Unit that has equal weight in the loss of a step; see `GRPOSettings`. None is `token`."""
    entropy_coef: NotNegative = 0.0
    """Weight of the mean entropy per token (nats), which is subtracted from the loss."""
    top_share: Annotated[float, Bounds(above=0, at_most=1)] | None = None
    """Share of the best remaining rollouts that are chosen, at least one (with `new`: per step); None chooses all."""

    @override
    def __post_init__(self) -> None:
        self._check_choice()
        if self.alarms == "default":
            object.__setattr__(self, "alarms", dict.fromkeys(_SILENT_ALARMS))
        super().__post_init__()

    def _check_choice(self) -> None:
        rollouts: object = self.rollouts
        if isinstance(rollouts, (list, tuple)):
            ids = cast("Sequence[object]", rollouts)
            if not ids or not all(isinstance(one, str) and one for one in ids):
                raise BadRequestError(f"rollouts must list at least one rollout id; got {rollouts!r}")
            twice = sorted({str(one) for one in ids if ids.count(one) > 1})
            if twice:
                raise BadRequestError(f"rollouts lists ids more than once: {', '.join(twice)}")
            object.__setattr__(self, "rollouts", list(ids))
        elif rollouts not in ("new", "stored"):
            raise BadRequestError(f"rollouts must be 'new', 'stored' or a list of rollout ids; got {rollouts!r}")
        if self.from_run is not None and (rollouts != "stored" or not isinstance(self.from_run, str)):
            raise BadRequestError(
                f"from_run={self.from_run!r} and rollouts={rollouts!r}: from_run must be the id of a run and requires "
                "rollouts='stored'"
            )

    @property
    def chooses(self) -> bool:
        """Whether a setting, other than a function, chooses the rollouts to train on."""
        rules = (self.min_reward, self.best_per_task, self.top_share, self.named)
        return any(rule is not None for rule in rules)

    @property
    def named(self) -> list[str] | None:
        """The ids of `rollouts` if it is a list of ids, else None."""
        return list(self.rollouts) if not isinstance(self.rollouts, str) else None

    @property
    def collects(self) -> bool:
        """Whether the agent runs to create rollouts."""
        return self.rollouts == "new"

    @property
    @override
    def loss_settings(self) -> LossSettings:
        return _CrossEntropySettings(aggregation=self.aggregation, entropy_coef=self.entropy_coef)

    @property
    @override
    def rewards(self) -> RewardSettings:
        return RewardSettings()
