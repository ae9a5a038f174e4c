"""GRPO: group-relative policy optimisation of a transformers model, with an engine of its own."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.algorithm.grpo.grpo import GRPO, GRPOResult
    from agentlightning.algorithm.grpo.settings import GRPOSettings

_HOMES: dict[str, str] = {
    "GRPO": "agentlightning.algorithm.grpo.grpo",
    "GRPOResult": "agentlightning.algorithm.grpo.grpo",
    "GRPOSettings": "agentlightning.algorithm.grpo.settings",
}

__all__ = ["GRPO", "GRPOResult", "GRPOSettings"]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
