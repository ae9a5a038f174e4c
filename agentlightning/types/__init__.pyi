# The public values, each once; read by type checkers and, at run time, by `attach_stub`. `Hook` lives above, beside the
# runner that calls it, and is offered here for programs that import it from here.
from . import (
    agent as agent,
    core as core,
    history as history,
    query as query,
    resources as resources,
    runs as runs,
    summaries as summaries,
    tracer as tracer,
)
from agentlightning.runner.base import Hook as Hook
from agentlightning.types.agent import (
    Dataset as Dataset,
    GenericResponse as GenericResponse,
    ParallelWorkerBase as ParallelWorkerBase,
    RolloutLegacy as RolloutLegacy,
    RolloutRawResult as RolloutRawResult,
    RolloutRawResultLegacy as RolloutRawResultLegacy,
    Task as Task,
    TaskIfAny as TaskIfAny,
    Triplet as Triplet,
)
from agentlightning.types.core import (
    Attempt as Attempt,
    AttemptedRollout as AttemptedRollout,
    AttemptError as AttemptError,
    AttemptStatus as AttemptStatus,
    EnqueueRolloutRequest as EnqueueRolloutRequest,
    Outcome as Outcome,
    RetentionPolicy as RetentionPolicy,
    Rollout as Rollout,
    RolloutConfig as RolloutConfig,
    RolloutStatus as RolloutStatus,
    TaskInput as TaskInput,
    Worker as Worker,
    WorkerStatus as WorkerStatus,
)
from agentlightning.types.history import (
    HistoryImport as HistoryImport,
    HistoryRefusal as HistoryRefusal,
)
from agentlightning.types.mode import RolloutMode as RolloutMode
from agentlightning.types.query import (
    FilterField as FilterField,
    FilterOptions as FilterOptions,
    PaginatedResult as PaginatedResult,
    SortOptions as SortOptions,
)
from agentlightning.types.resources import (
    LLM as LLM,
    CustomResource as CustomResource,
    NamedResources as NamedResources,
    PromptTemplate as PromptTemplate,
    ProxyLLM as ProxyLLM,
    Resource as Resource,
    ResourcesUpdate as ResourcesUpdate,
    ResourceUnion as ResourceUnion,
    SamplingParameters as SamplingParameters,
    SystemPrompt as SystemPrompt,
)
from agentlightning.types.runs import (
    BestFigure as BestFigure,
    EventPage as EventPage,
    RecordKind as RecordKind,
    RolloutEvent as RolloutEvent,
    Run as Run,
    RunEvent as RunEvent,
    RunRecord as RunRecord,
    RunState as RunState,
)
from agentlightning.types.summaries import (
    AggregateBy as AggregateBy,
    AggregateGroup as AggregateGroup,
    RolloutAggregate as RolloutAggregate,
    RolloutFilter as RolloutFilter,
    RolloutSummary as RolloutSummary,
    SpanKind as SpanKind,
    SpanOutline as SpanOutline,
    SummaryPage as SummaryPage,
    SummarySort as SummarySort,
    TokenText as TokenText,
)
from agentlightning.types.tracer import (
    Attributes as Attributes,
    AttributeValue as AttributeValue,
    DroppedCounts as DroppedCounts,
    Event as Event,
    Link as Link,
    OtelResource as OtelResource,
    Span as Span,
    SpanAttributeNames as SpanAttributeNames,
    SpanContext as SpanContext,
    SpanCoreFields as SpanCoreFields,
    SpanLike as SpanLike,
    SpanNames as SpanNames,
    SpanRecordingContext as SpanRecordingContext,
    StatusCode as StatusCode,
    TraceState as TraceState,
    TraceStatus as TraceStatus,
)
