"""Adapters turn stored spans into what algorithms learn from: model calls, triplets, token rows, messages."""

from agentlightning.adapter.base import Adapter, OtelTraceAdapter, TraceAdapter
from agentlightning.adapter.calls.calls import CallRef, ModelCall, model_calls
from agentlightning.adapter.explain import CallWitness, ExplainedCall, Explanation
from agentlightning.adapter.messages import TraceToMessages
from agentlightning.adapter.rows.samples import Sample, SampleReading, samples_from_calls, samples_from_triplets
from agentlightning.adapter.rows.seams import RowCause, RowStart, SeamCause
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.tree.reward_matching import RewardMatchPolicy
from agentlightning.adapter.tree.tree import TraceTree
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
    "ExplainedCall",
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
