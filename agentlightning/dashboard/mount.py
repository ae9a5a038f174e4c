"""The dashboard as a part of a store server; see `agentlightning/store/http/mounts.py`."""

from __future__ import annotations

from collections.abc import Callable

from agentlightning.dashboard.pages import PATHS, Pages
from agentlightning.store.base import LightningStore
from agentlightning.store.http.mounts import Mount


def dashboard(store: Callable[[], LightningStore]) -> Mount:
    """Return the page and its data for the server of a store."""
    pages = Pages()
    return Mount(routes=pages.routes(), is_open=pages.is_open, paths=PATHS)
