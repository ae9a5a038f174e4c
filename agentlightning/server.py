"""The old home of the v0.1 server; see `agentlightning.legacy`."""

from agentlightning.legacy.server import AgentLightningServer

__all__ = ["AgentLightningServer"]
