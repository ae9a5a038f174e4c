"""AgentOps beside LangChain: chains keep their names, and graphs are traced once.

LangChain gives the name of a chain as a keyword argument, where AgentOps does not look: without it every chain is
`unknown_chain`, and adapters find no agent. LangGraph runs through the same callbacks, so its own instrumentor would
tell of every node twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.instrumentation.patching import Patch

logger = logging.getLogger(__name__)


def instrument_agentops_langchain() -> bool:
    """Apply the patches; False, with an error in the log, if this AgentOps has not what they need."""
    try:
        _PATCH.apply()
    except (ImportError, AttributeError) as error:
        logger.error("The LangChain handler of AgentOps is not patched: %s", error)
        return False
    return True


def uninstrument_agentops_langchain() -> None:
    """Take back what one `instrument_agentops_langchain` did."""
    _PATCH.restore()


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_chain_start(handler: Any, serialized: Mapping[str, Any] | None, inputs: Any, **kwargs: Any) -> Any:
        known = dict(serialized or {})
        name = kwargs.get("name")
        if isinstance(name, str) and name:
            known.setdefault("name", name)
        known.setdefault("id", str(kwargs.get("run_id") or known.get("name") or "unknown"))
        return original(handler, known, inputs, **kwargs)

    return on_chain_start


def _without_graphs(libraries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings for name, settings in libraries.items() if name != "langgraph"}


def _without_graph_names(names: set[str]) -> set[str]:
    return names - {"langgraph"}


_PATCH = Patch(
    ("agentops.integration.callbacks.langchain.callback", "LangchainCallbackHandler.on_chain_start", _named),
    ("agentops.instrumentation", "AGENTIC_LIBRARIES", _without_graphs),
    ("agentops.instrumentation", "TARGET_PACKAGES", _without_graph_names),
)
