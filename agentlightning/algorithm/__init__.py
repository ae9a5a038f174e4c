"""Algorithms: who learns. Those that need a training stack are loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm
    from agentlightning.algorithm.decorator import FunctionalAlgorithm, algo
    from agentlightning.algorithm.fast import Baseline, FastAlgorithm
    from agentlightning.algorithm.grpo import GRPO

_HOMES: dict[str, str] = {
    "GRPO": "agentlightning.algorithm.grpo",
    "Algorithm": "agentlightning.algorithm.base",
    "Baseline": "agentlightning.algorithm.fast",
    "FastAlgorithm": "agentlightning.algorithm.fast",
    "FunctionalAlgorithm": "agentlightning.algorithm.decorator",
    "algo": "agentlightning.algorithm.decorator",
}

_REMOVED: dict[str, str] = {
    "APO": "Prompt optimisation is not part of this release; write it with @agl.algo, or train weights with agl.GRPO.",
    "VERL": "Training through VERL is not part of this release; use agl.GRPO.",
}

__all__ = ["GRPO", "Algorithm", "Baseline", "FastAlgorithm", "FunctionalAlgorithm", "algo"]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name, _REMOVED)
