"""The v0.1 client, for programs that import it from here. It is defined in `agentlightning.legacy`."""

from agentlightning.legacy.client import AgentLightningClient, DevTaskLoader

__all__ = ["AgentLightningClient", "DevTaskLoader"]
