"""The Trainer, which builds all parts and runs them. Loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
