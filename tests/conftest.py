"""Servers that tests of several folders use, started when the first test asks, and the package's logger as it was."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.stubs.mongo_server import mongo_uri
from tests.stubs.postgres_server import postgres_server, postgres_uri

__all__ = ["mongo_uri", "postgres_server", "postgres_uri"]

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def package_logger_as_it_was() -> Iterator[None]:
    """Commands that a test runs within this process set up logging; the next test must not see it."""
    logger = logging.getLogger("agentlightning")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers
