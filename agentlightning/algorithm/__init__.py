"""Algorithms learn from rollouts. Those that need a training stack are loaded on first use."""

from agentlightning.lazy import attach_stub

_REMOVED: dict[str, str] = {
    "APO": "Prompt optimisation is not part of this release; write it with @agl.algo, or train weights with agl.GRPO.",
    "VERL": "Training through VERL is not part of this release; use agl.GRPO.",
}

__getattr__, __dir__ = attach_stub(__name__, _REMOVED)
