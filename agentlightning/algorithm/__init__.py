"""Algorithms learn from rollouts. Those that need a training stack are loaded on first use."""

from agentlightning.lazy import attach_stub

_REMOVED: dict[str, str] = {
    "VERL": "Training through VERL is not part of this release; use agl.GRPO.",
}

__getattr__, __dir__ = attach_stub(__name__, _REMOVED)
