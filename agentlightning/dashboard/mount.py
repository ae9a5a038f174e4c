"""The dashboard as a part of a store server; see `agentlightning/store/http/mounts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentlightning.dashboard.data import Data
from agentlightning.dashboard.pages import PATHS, Pages
from agentlightning.store.base import LightningStore
from agentlightning.store.http.mounts import Mount


def dashboard(store: Callable[[], LightningStore]) -> Mount:
    """Return the page and its data for the server of a store."""
    pages, data = Pages(), Data(store)
    return Mount(routes=[*pages.routes(), *data.routes()], is_open=pages.is_open, describe=_describe)


def _describe() -> tuple[dict[str, Any], dict[str, Any]]:
    from agentlightning.dashboard.description import described

    paths, schemas = described()
    return {**PATHS, **paths}, schemas
