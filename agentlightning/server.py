"""The v0.1 server, for programs that import it from here. It is defined in `agentlightning.legacy`."""

from agentlightning.legacy.server import AgentLightningServer

__all__ = ["AgentLightningServer"]
