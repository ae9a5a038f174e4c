"""The old home of the v0.1 runner; see `agentlightning.legacy`."""

from agentlightning.legacy.runner import LegacyAgentRunner

__all__ = ["LegacyAgentRunner"]
