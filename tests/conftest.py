"""Servers that tests of several folders use: started once, when the first test asks."""

from tests.stubs.mongo_server import mongo_uri
from tests.stubs.postgres_server import postgres_server, postgres_uri

__all__ = ["mongo_uri", "postgres_server", "postgres_uri"]
