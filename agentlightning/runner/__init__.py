"""Runners, which claim rollouts from a store and run an agent on them. Each is loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
