"""Adapters convert stored spans into the input of algorithms: model calls, triplets, token rows, messages. Each is
loaded on first use."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
