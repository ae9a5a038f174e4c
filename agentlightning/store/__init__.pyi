from . import (
    base as base,
    client_server as client_server,
    http as http,
    memory as memory,
    mongo as mongo,
    postgres as postgres,
    spec as spec,
    sqlite as sqlite,
    threading as threading,
)
from agentlightning.store.base import (
    LightningStore as LightningStore,
    LightningStoreCapabilities as LightningStoreCapabilities,
    LightningStoreStatistics as LightningStoreStatistics,
)
from agentlightning.store.client_server import (
    LightningStoreClient as LightningStoreClient,
    LightningStoreServer as LightningStoreServer,
)
from agentlightning.store.memory import InMemoryLightningStore as InMemoryLightningStore
from agentlightning.store.mongo import MongoLightningStore as MongoLightningStore
from agentlightning.store.postgres import PostgresLightningStore as PostgresLightningStore
from agentlightning.store.spec import store_from_spec as store_from_spec
from agentlightning.store.sqlite import SQLiteLightningStore as SQLiteLightningStore
from agentlightning.store.threading import LightningStoreThreaded as LightningStoreThreaded
