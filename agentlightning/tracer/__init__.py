"""Tracers: what runs inside a trace context becomes spans. Each is loaded on first use."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
