"""Small general parts, which depend on no other type of this package than Span."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
