"""The settings of the optimizer and of the schedule of its learning rate. Does not import torch.

Names and meanings are those of transformers' `TrainingArguments`, from which TRL's `GRPOConfig` inherits them; VERL
0.9.1's name follows in brackets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, cast

from agentlightning.errors import BadRequestError
from agentlightning.training.loss_settings import NotNegative, Positive
from agentlightning.utils.setting_checks import Bounds, check_fields, refuse_pairs

LRSchedulerType = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
OptimizerName = Literal[
    "adamw_torch_fused",
    "adamw_torch",
    "muon",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "lion_8bit",
    "lion_32bit",
    "ademamix",
    "ademamix_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
]
Beta = Annotated[float, Bounds(at_least=0, below=1)]

DEFAULT_OPTIM: Final = "adamw_torch_fused"
_FOLLOW_A_METRIC: Final = ("reduce_lr_on_plateau", "greedy")
_WITHOUT_EPSILON: Final = ("lion", "adafactor", "sgd", "adagrad", "rmsprop")
_WITHOUT_BETAS: Final = _WITHOUT_EPSILON[1:]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer of a policy; `learner/optimizers.py` makes it."""

    optim: OptimizerName = DEFAULT_OPTIM
    """Optimizer, by its name in transformers' `OptimizerNames`; in addition `muon`, for the matrices of the hidden
    layers, with AdamW for all other weights. Names with `8bit`, `lion`, `ademamix` or `bnb` require the
    package `bitsandbytes`. [`actor.optim.optimizer`]"""
    optim_args: Mapping[str, object] | None = None
    """Further arguments of the optimizer's class, such as `{"momentum": 0.9}` with `sgd`. In TRL it is a string.
    [`actor.optim.override_optimizer_config`]"""
    adam_beta1: Beta = 0.9
    """Decay of AdamW's mean of gradients, per optimizer step; also of Lion and AdEMAMix. [`actor.optim.betas`]"""
    adam_beta2: Beta = 0.99
    """Decay of AdamW's mean of squared gradients, per optimizer step; also of Lion and AdEMAMix. TRL's default is
    0.999, with which a run of some dozen steps would hardly adapt. [`actor.optim.betas`]"""
    adam_epsilon: Positive = 1e-8
    """Number that AdamW adds to the root of that mean before it divides by it. [none]"""
    weight_decay: NotNegative = 0.0
    """Share of a weight, times the learning rate, that a step subtracts from it. Biases and the weights of
    normalization layers are not decayed. [`actor.optim.weight_decay`]"""

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_optimizer()

    def check_optimizer(self) -> None:
        """Raise BadRequestError if settings of the optimizer contradict each other."""
        _check_arguments("optim_args", self.optim_args, "the optimizer, such as {'momentum': 0.9}")
        for name, ours in {"lr": "learning_rate", "weight_decay": "weight_decay"}.items():
            if name in (self.optim_args or {}):
                raise BadRequestError(f"optim_args must not contain {name!r}; use the setting {ours}")
        defaults = OptimizerSettings.__dataclass_fields__
        unused = {"adam_beta1": _WITHOUT_BETAS, "adam_beta2": _WITHOUT_BETAS, "adam_epsilon": _WITHOUT_EPSILON}
        refuse_pairs(
            {
                f"optim={self.optim!r} and {name}={getattr(self, name)}: this optimizer does not use it; omit it": (
                    any(kind in self.optim for kind in kinds) and getattr(self, name) != defaults[name].default
                )
                for name, kinds in unused.items()
            }
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate and its schedule, which is a function of the step alone."""

    learning_rate: Positive = 1e-5
    """Learning rate of the optimizer, which the schedule scales. [`actor.optim.lr`]"""
    lr_scheduler_type: LRSchedulerType = "constant"
    """Schedule of the learning rate over the steps of the run, as transformers' `get_scheduler` computes it: `linear`
    lowers it with each step, to 0 after the last step. [`actor.optim.lr_scheduler_type`]"""
    lr_scheduler_kwargs: Mapping[str, object] | None = None
    """Further arguments of the schedule, such as `{"min_lr_rate": 0.1}` with `cosine_with_min_lr`.
    [`actor.optim.min_lr_ratio`, `actor.optim.num_cycles`]"""
    warmup_steps: NotNegative = 0
    """Number of first steps in which the learning rate rises from 0; a number below 1 is a share of `max_steps`.
    [`actor.optim.lr_warmup_steps`, `actor.optim.lr_warmup_steps_ratio`]"""

    def check_schedule(self) -> None:
        """Raise BadRequestError if settings of the schedule contradict each other."""
        name: object = self.lr_scheduler_type
        _check_arguments("lr_scheduler_kwargs", self.lr_scheduler_kwargs, "the schedule, such as {'num_cycles': 2}")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise BadRequestError(
                "warmup_steps must be a whole number of steps, or a share of max_steps below 1; "
                f"got {self.warmup_steps!r}"
            )
        alone = f"lr_scheduler_type={name!r} and lr_scheduler_kwargs={self.lr_scheduler_kwargs!r}: it has no arguments"
        refuse_pairs(
            {
                f"lr_scheduler_type='constant' and warmup_steps={self.warmup_steps}: it has no warmup; use "
                "'constant_with_warmup'": name == "constant" and self.warmup_steps > 0,
                alone: bool(self.lr_scheduler_kwargs) and name in ("constant", "linear", "constant_with_warmup"),
            }
        )

    def refuse_metric_schedules(self) -> None:
        """Raise BadRequestError for a schedule that is no function of the step."""
        if self.lr_scheduler_type in cast("tuple[Any, ...]", _FOLLOW_A_METRIC):
            raise BadRequestError(
                f"lr_scheduler_type={self.lr_scheduler_type!r} follows a metric of the run, so the learning rate would "
                "not be a function of the step, as resuming and agl replay require. Use 'linear' or 'cosine'"
            )

    def rate_at(self, step: int, max_steps: int) -> float:
        """Return the learning rate of a step of a run; the first step is 1.

        Raises:
            BadRequestError: the schedule refuses its arguments, or the learning rate is negative or not finite.
        """
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        if self.lr_scheduler_type == "linear" and not self.warmup_steps:  # not rounded as transformers does
            return self.learning_rate * (1 - (step - 1) / max_steps)
        import torch
        from transformers import get_scheduler

        warmup = self.warmup_steps
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(0))], lr=self.learning_rate)
        try:
            schedule: Any = get_scheduler(
                self.lr_scheduler_type,
                optimizer,
                num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(max_steps * warmup),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=dict(self.lr_scheduler_kwargs or {}),
            )
            rate: object = float(self.learning_rate * schedule.lr_lambdas[0](step - 1))
        except (TypeError, ValueError, ArithmeticError) as error:
            rate = error
        if not isinstance(rate, float) or not math.isfinite(rate) or rate < 0:
            raise BadRequestError(
                f"lr_scheduler_type={self.lr_scheduler_type!r} with lr_scheduler_kwargs={self.lr_scheduler_kwargs!r}, "
                f"warmup_steps={warmup} and max_steps={max_steps} gives no learning rate for step {step}: {rate}"
            )
        return rate


def depends_on_length(settings: Mapping[str, Any]) -> bool:
    """Return whether a schedule depends on `max_steps`; `settings` as in the record of a run."""
    lasts = ("constant", "constant_with_warmup", "inverse_sqrt")
    return settings["lr_scheduler_type"] not in lasts or 0 < settings.get("warmup_steps", 0) < 1


def _check_arguments(name: str, value: object, whose: str) -> None:
    if value is not None and (not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value)):
        raise BadRequestError(f"{name} must be a dict of arguments of {whose}; got {value!r}")
