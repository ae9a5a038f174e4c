"""Tracers: what runs inside a trace context becomes spans. Each is loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.tracer.agentops import AgentOpsTracer
    from agentlightning.tracer.base import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
    from agentlightning.tracer.delivery import TraceDeliveryError
    from agentlightning.tracer.dummy import DummyTracer
    from agentlightning.tracer.otel import OtelTracer
    from agentlightning.tracer.weave import WeaveTracer

_HOMES: dict[str, str] = {
    "AgentOpsTracer": "agentlightning.tracer.agentops",
    "DummyTracer": "agentlightning.tracer.dummy",
    "OtelTracer": "agentlightning.tracer.otel",
    "TraceDeliveryError": "agentlightning.tracer.delivery",
    "Tracer": "agentlightning.tracer.base",
    "WeaveTracer": "agentlightning.tracer.weave",
    "clear_active_tracer": "agentlightning.tracer.base",
    "get_active_tracer": "agentlightning.tracer.base",
    "set_active_tracer": "agentlightning.tracer.base",
}

__all__ = [
    "AgentOpsTracer",
    "DummyTracer",
    "OtelTracer",
    "TraceDeliveryError",
    "Tracer",
    "WeaveTracer",
    "clear_active_tracer",
    "get_active_tracer",
    "set_active_tracer",
]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name)
