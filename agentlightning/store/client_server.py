"""The two ends of a store over HTTP, under the path that programs import them from."""

from agentlightning.store.client import LightningStoreClient
from agentlightning.store.routes import API_AGL_PREFIX
from agentlightning.store.server import LightningStoreServer

__all__ = ["API_AGL_PREFIX", "LightningStoreClient", "LightningStoreServer"]
