"""All public data types, grouped by subject. Each one is imported on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
