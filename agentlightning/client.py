"""The old home of the v0.1 client; see `agentlightning.legacy`."""

from agentlightning.legacy.client import AgentLightningClient, DevTaskLoader

__all__ = ["AgentLightningClient", "DevTaskLoader"]
