"""The settings of a critic: how fast it learns, how its values become advantages, and what its loss weighs."""

from __future__ import annotations

from dataclasses import dataclass

from agentlightning.field_help import explain_fields
from agentlightning.utils.setting_checks import check_flag, check_number


@explain_fields
@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How values are learned and used; the formulas are in `gae.py` and `value_loss.py`."""

    gamma: float = 1.0
    """What the value of the next token counts, between 0 and 1. [`algorithm.gamma`]"""
    lam: float = 0.95
    """Between 0 (advantages by the next value alone) and 1 (by the whole return), the lambda of GAE.
    [`algorithm.lam`]"""
    vf_coef: float = 0.1
    """Weight of the value loss. It moves the layers below the value head as well. [none; VERL's critic is a model of
    its own]"""
    cliprange_value: float = 0.2
    """How far a value may go from what it was before the step, before its gain no longer counts.
    [`critic.cliprange_value`, 0.5]"""
    value_learning_rate: float = 1e-3
    """Of AdamW on the value head, in the first step; it falls as `learning_rate` does. [`critic.optim.lr`]"""
    whiten_advantages: bool = True
    """Take the mean of all token advantages of a step off and divide by their deviation. TRL and VERL always do."""

    def check_critic(self) -> None:
        """Check the values.

        Raises:
            BadRequestError: one is out of its range.
        """
        for name in ("gamma", "lam"):
            check_number(name, getattr(self, name), float, at_least=0, at_most=1)
        check_number("vf_coef", self.vf_coef, float, at_least=0)
        for name in ("cliprange_value", "value_learning_rate"):
            check_number(name, getattr(self, name), float, above=0)
        check_flag("whiten_advantages", self.whiten_advantages)
