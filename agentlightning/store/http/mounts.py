"""Additional parts of a store server, such as the dashboard, given by name.

A part is `module:function`. It is imported when a server is created, so that the store does not depend on it. If the
import fails, the part is skipped with a warning, and the store is served without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.routing import Route

from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

MOUNTS: Final[tuple[str, ...]] = ("agentlightning.dashboard.data:dashboard",)
"""Parts of every server."""


@dataclass(frozen=True)
class Mount:
    """The additions of one part to a server."""

    routes: Sequence[Route]
    """Additional paths; none of them is a path of the store."""
    is_open: Callable[[str], bool] = lambda path: False
    """Return True for a path that needs no token: static files, never data."""
    describe: Callable[[], tuple[dict[str, Any], dict[str, Any]]] = lambda: ({}, {})
    """Return the OpenAPI `paths` and `components.schemas` of the part. Called once, when the OpenAPI document is
    requested."""


Part = Callable[[Callable[[], LightningStore]], Mount]
"""Creates the mount of a server. The argument is a function that returns the store, called once per request."""


def mounts_of(store: Callable[[], LightningStore], names: Sequence[str] = MOUNTS) -> list[Mount]:
    """Return the parts of a server that can be imported."""
    mounts: list[Mount] = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            part: Part = getattr(importlib.import_module(module), function)
            mounts.append(part(store))
        except Exception:  # the boundary: the store must be served also where a part of it is broken
            logger.exception("serving the store without %s, which cannot be imported", name)
    return mounts
