"""The client and the server of a store over HTTP, for programs that import them from here."""

from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.operations import API_AGL_PREFIX
from agentlightning.store.http.server import LightningStoreServer

__all__ = ["API_AGL_PREFIX", "LightningStoreClient", "LightningStoreServer"]
