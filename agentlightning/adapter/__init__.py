"""Adapters: from stored spans to what algorithms learn from."""

from agentlightning.adapter.attributes import Problem
from agentlightning.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter
from agentlightning.adapter.calls import CallRef, ModelCall, model_calls
from agentlightning.adapter.credit import RewardMatchPolicy
from agentlightning.adapter.explain import CallWitness, Explanation
from agentlightning.adapter.messages import TraceToMessages
from agentlightning.adapter.samples import (
    Sample,
    SampleReading,
    samples_from_calls,
    samples_from_triplets,
)
from agentlightning.adapter.seams import RowCause, RowStart, SeamCause
from agentlightning.adapter.tree import TraceTree
from agentlightning.adapter.triplet import (
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToTripletBase,
    TripletReading,
)

__all__ = [
    "Adapter",
    "TraceAdapter",
    "OtelTraceAdapter",
    "TraceToMessages",
    "TraceToTripletBase",
    "TracerTraceToTriplet",
    "LlmProxyTraceToTriplet",
    "TraceTree",
    "RewardMatchPolicy",
    "TripletReading",
    "Explanation",
    "CallWitness",
    "Problem",
    "CallRef",
    "ModelCall",
    "model_calls",
    "Sample",
    "SampleReading",
    "RowStart",
    "RowCause",
    "SeamCause",
    "samples_from_calls",
    "samples_from_triplets",
]
