"""Parts of layers above the store that a store server serves beside its own interface, named by text.

A part is `module:function`. It is imported when a server is made, so the store imports nothing above it. A part that
cannot be imported is skipped with one line in the log, and the store is still served.
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
"""The parts of every server."""


@dataclass(frozen=True)
class Mount:
    """The additions of one part to a server."""

    routes: Sequence[Route]
    """Its paths, none of which belongs to the store's interface."""
    is_open: Callable[[str], bool] = lambda path: False
    """True for a path that needs no token: files of the page, never data."""
    describe: Callable[[], tuple[dict[str, Any], dict[str, Any]]] = lambda: ({}, {})
    """Return the OpenAPI `paths` and `components.schemas` of the part. Called once, when the description of the
    interface is requested."""


Part = Callable[[Callable[[], LightningStore]], Mount]
"""Makes the mount of a server; its argument is a function that returns the store, called once per request."""


def mounts_of(store: Callable[[], LightningStore], names: Sequence[str] = MOUNTS) -> list[Mount]:
    """Return the parts of a server, those that can be imported."""
    mounts: list[Mount] = []
    for name in names:
        module, _, function = name.partition(":")
        try:
            part: Part = getattr(importlib.import_module(module), function)
            mounts.append(part(store))
        except Exception:  # the boundary: the store must be served also where a part of it is broken
            logger.exception("the store is served without %s, which cannot be imported", name)
    return mounts
