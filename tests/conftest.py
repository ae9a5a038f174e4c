"""Servers that tests of several folders use, started when the first test asks; checks of what a test leaves behind."""

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from agentlightning.base import process_secrets
from agentlightning.utils.server_launcher import freeze_for_good
from tests.model_fixtures import byte_engine, engine, model_folder, policy, untrained_model
from tests.stubs.mongo_server import mongo_uri
from tests.stubs.postgres_server import postgres_server, postgres_uri
from tests.stubs.processes import terminal
from tests.stubs.running import client, server, store

__all__ = ["byte_engine", "engine", "model_folder", "policy", "untrained_model"]
__all__ += ["client", "mongo_uri", "postgres_server", "postgres_uri", "server", "store", "terminal"]

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Test processes share the cores: torch with a thread for each core in each of them waits for its own threads. The
# programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background jobs; the tests of interrupts send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector search the tests' own garbage only: the loaded modules are some million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_for_good()
        gc.enable()


@pytest.fixture(autouse=True)
def package_logger_as_it_was() -> Iterator[None]:
    """Commands that a test runs within this process set up logging; the next test must not see it."""
    logger = logging.getLogger("agentlightning")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(autouse=True)
def no_secrets_of_another_test() -> Iterator[None]:
    """A token that a test sets is held by the process until it is forgotten."""
    yield
    process_secrets.forget()


@pytest.fixture(autouse=True, scope="module")
def leaks_are_found_where_they_are_made() -> Iterator[None]:
    """Report leaks while the module that makes them runs, not in whichever test the collector runs by chance."""
    yield
    gc.collect()
    gc.freeze()  # what stays was imported by a test, or belongs to the session


_KEPT_OF_A_SECTION = 1_000_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Bound what a test printed and logged, as UTF-8: test processes send it to each other, hostile texts too."""
    report = yield
    report.sections = [
        (name, text[-_KEPT_OF_A_SECTION:].encode("utf-8", "replace").decode()) for name, text in report.sections
    ]
    return report
