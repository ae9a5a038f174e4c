"""The two ends of a store over HTTP, under the path that programs import them from."""

from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.operations import API_AGL_PREFIX
from agentlightning.store.http.server import LightningStoreServer

__all__ = ["API_AGL_PREFIX", "LightningStoreClient", "LightningStoreServer"]
