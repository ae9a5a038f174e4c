"""The v0.1 protocol, for scripts that still speak it: a server that hands out tasks, a client, and a runner.

Nothing else in this package uses it. Everything here is deprecated and says so once: a `Trainer` with a store does the
same work, durably and with traces. `agentlightning.client`, `agentlightning.server` and `agentlightning.runner.legacy`
are the old import paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.legacy.client import AgentLightningClient
    from agentlightning.legacy.dev import DevTaskLoader
    from agentlightning.legacy.runner import LegacyAgentRunner
    from agentlightning.legacy.server import AgentLightningServer

_HOMES = {
    "AgentLightningClient": "agentlightning.legacy.client",
    "AgentLightningServer": "agentlightning.legacy.server",
    "DevTaskLoader": "agentlightning.legacy.dev",
    "LegacyAgentRunner": "agentlightning.legacy.runner",
}

__all__ = ["AgentLightningClient", "AgentLightningServer", "DevTaskLoader", "LegacyAgentRunner"]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
