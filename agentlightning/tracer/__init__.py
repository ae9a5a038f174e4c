"""Tracers, which record the code inside a trace context as spans. Each is loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
