"""General utilities. The only type of this package that they depend on is `Span`."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
