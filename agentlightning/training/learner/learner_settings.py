"""The settings of the learner: how it computes, and how much of the memory it may take."""

from __future__ import annotations

from dataclasses import dataclass

from agentlightning.field_help import explain_fields
from agentlightning.utils.setting_checks import check_flag, check_number


@explain_fields
@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How rows go through the model; what each costs and saves is told in the guide "Fit into memory"."""

    max_model_length: int | None = None
    """Most tokens of prompt and reply together; a longer call is refused. None is the context of the model.
    [`rollout.max_model_len`]"""
    max_tokens_per_forward: int = 4096
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

    def check_learner(self) -> None:
        """Check the values.

        Raises:
            BadRequestError: one is out of its range.
        """
        if self.max_model_length is not None:
            check_number("max_model_length", self.max_model_length, int, at_least=2)
        check_number("max_tokens_per_forward", self.max_tokens_per_forward, int, at_least=1)
        for name in ("padding_free", "gradient_checkpointing", "bf16"):
            check_flag(name, getattr(self, name))
