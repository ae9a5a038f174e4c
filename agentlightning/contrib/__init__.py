"""Integrations with other projects. The projects do not need to be installed to import them."""

from agentlightning.base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
