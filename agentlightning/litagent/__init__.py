"""Agents: the class that users subclass, the decorators that convert a function into an agent, and programs as agents.
Each is loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
