"""Strategies: where the algorithm and the runners run, and how a run ends. Each is loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
