"""The kernel: small parts that know no noun of ours but Span."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
