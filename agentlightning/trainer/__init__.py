"""The Trainer: the one place that knows every part. Loaded on first use."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
