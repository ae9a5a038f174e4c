"""GRPO: group-relative policy optimisation of a transformers model, with an engine of its own."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
