"""Integrations with other projects, none of which is needed to import them."""

from agentlightning.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
