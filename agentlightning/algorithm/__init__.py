"""Algorithms, which learn from rollouts. Those that need a training stack are loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
