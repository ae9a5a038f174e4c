from . import (
    base as base,
    calls as calls,
    explain as explain,
    messages as messages,
    rows as rows,
    spans as spans,
    tree as tree,
    triplet as triplet,
)
from agentlightning.adapter.base import (
    Adapter as Adapter,
    OtelTraceAdapter as OtelTraceAdapter,
    TraceAdapter as TraceAdapter,
)
from agentlightning.adapter.calls.calls import (
    CallRef as CallRef,
    ModelCall as ModelCall,
    model_calls as model_calls,
)
from agentlightning.adapter.explain import (
    CallWitness as CallWitness,
    ExplainedCall as ExplainedCall,
    Explanation as Explanation,
)
from agentlightning.adapter.messages import TraceToMessages as TraceToMessages
from agentlightning.adapter.rows.samples import (
    Sample as Sample,
    SampleReading as SampleReading,
    samples_from_calls as samples_from_calls,
    samples_from_triplets as samples_from_triplets,
)
from agentlightning.adapter.rows.seams import (
    RowCause as RowCause,
    RowStart as RowStart,
    SeamCause as SeamCause,
)
from agentlightning.adapter.spans.attributes import Problem as Problem
from agentlightning.adapter.tree.reward_matching import RewardMatchPolicy as RewardMatchPolicy
from agentlightning.adapter.tree.tree import TraceTree as TraceTree
from agentlightning.adapter.triplet import (
    LlmProxyTraceToTriplet as LlmProxyTraceToTriplet,
    TracerTraceToTriplet as TracerTraceToTriplet,
    TraceToTripletBase as TraceToTripletBase,
    TripletReading as TripletReading,
)
