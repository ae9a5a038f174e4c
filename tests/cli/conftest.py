"""Commands that run in the process of the tests leave its logging as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_is_put_back() -> Iterator[None]:
    logger = logging.getLogger("agentlightning")
    before = logger.level, logger.propagate, logger.handlers[:]
    yield
    for handler in logger.handlers[:]:
        if handler not in before[2]:
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]
