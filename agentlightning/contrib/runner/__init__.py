"""Runners for other projects' agents."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
