"""Adapters turn stored spans into what algorithms learn from: model calls, triplets, token rows, messages. Each is
loaded on first use."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
