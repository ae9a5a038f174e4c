"""Runners: they take rollouts from a store and play them with an agent. Each is loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.legacy.runner import LegacyAgentRunner
    from agentlightning.runner.agent import LitAgentRunner
    from agentlightning.runner.base import Runner

_HOMES: dict[str, str] = {
    "LegacyAgentRunner": "agentlightning.legacy.runner",
    "LitAgentRunner": "agentlightning.runner.agent",
    "Runner": "agentlightning.runner.base",
}

__all__ = ["LegacyAgentRunner", "LitAgentRunner", "Runner"]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
