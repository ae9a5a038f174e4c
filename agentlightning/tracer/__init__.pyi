from . import agentops as agentops, base as base, dummy as dummy, otel as otel, weave as weave
from agentlightning.tracer.agentops import AgentOpsTracer as AgentOpsTracer
from agentlightning.tracer.base import (
    Tracer as Tracer,
    clear_active_tracer as clear_active_tracer,
    get_active_tracer as get_active_tracer,
    set_active_tracer as set_active_tracer,
)
from agentlightning.tracer.delivery import TraceDeliveryError as TraceDeliveryError
from agentlightning.tracer.dummy import DummyTracer as DummyTracer
from agentlightning.tracer.otel import OtelTracer as OtelTracer
from agentlightning.tracer.weave import WeaveTracer as WeaveTracer
