"""Patches of vendor packages, to use them without a network and to keep token ids that they would drop.

There is one module per vendor; the vendor's package is imported only when something is patched. Patches may be applied
any number of times: they are counted, and undoing the last one restores the package. vLLM is not patched, because
versions from 0.10.2 return token ids, which the gateway requests.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from agentlightning.instrumentation import agentops

logger = logging.getLogger(__name__)


def _has(*packages: str) -> bool:
    return all(find_spec(package) is not None for package in packages)


AGENTOPS_INSTALLED = _has("agentops")
AGENTOPS_LANGCHAIN_INSTALLED = _has("agentops", "langchain_core")
WEAVE_INSTALLED = _has("weave")

_VENDORS = (
    ("agentops", AGENTOPS_INSTALLED, agentops.instrument_agentops, agentops.uninstrument_agentops),
    (
        "agentops_langchain",
        AGENTOPS_LANGCHAIN_INSTALLED,
        agentops.instrument_agentops_langchain,
        agentops.uninstrument_agentops_langchain,
    ),
)
"""Name, installed, patch, restore; in the order of application."""


def instrument_all() -> list[str]:
    """Patch the installed vendor packages and return their names; Weave is patched by its tracer."""
    return [name for name, installed, patch, _ in _VENDORS if installed and patch()]


def uninstrument_all() -> None:
    """Undo `instrument_all`."""
    for _, installed, _, restore in reversed(_VENDORS):
        if installed:
            restore()
