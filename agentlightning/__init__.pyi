# The public names of the package, each once: read by type checkers, by editors and, at run time, by `attach_stub`.
# The modules of the first block are attributes of the package which `from agentlightning import *` leaves out.
from . import (
    adapter as adapter,
    algorithm as algorithm,
    cli as cli,
    client as client,
    config as config,
    contrib as contrib,
    demo as demo,
    emitter as emitter,
    env_var as env_var,
    errors as errors,
    execution as execution,
    instrumentation as instrumentation,
    legacy as legacy,
    litagent as litagent,
    llm_proxy as llm_proxy,
    logging as logging,
    models as models,
    prompts as prompts,
    runner as runner,
    semconv as semconv,
    server as server,
    store as store,
    tracer as tracer,
    trackers as trackers,
    trainer as trainer,
    types as types,
    utils as utils,
)
from agentlightning import environments as environments
from agentlightning import integrations as integrations
from agentlightning import reward as reward
from agentlightning.adapter import (
    Adapter as Adapter,
    LlmProxyTraceToTriplet as LlmProxyTraceToTriplet,
    OtelTraceAdapter as OtelTraceAdapter,
    TraceAdapter as TraceAdapter,
    TraceToMessages as TraceToMessages,
    TraceToTripletBase as TraceToTripletBase,
    TracerTraceToTriplet as TracerTraceToTriplet,
)
from agentlightning.algorithm.apo.apo import APO as APO
from agentlightning.algorithm.gepa import GEPA as GEPA
from agentlightning.algorithm.base import Algorithm as Algorithm
from agentlightning.algorithm.decorator import FunctionalAlgorithm as FunctionalAlgorithm, algo as algo
from agentlightning.evaluation.result import EvaluationResult as EvaluationResult
from agentlightning.algorithm.evaluator import SequentialStop as SequentialStop
from agentlightning.algorithm.fast import Baseline as Baseline, FastAlgorithm as FastAlgorithm
from agentlightning.algorithm.grpo import GRPO as GRPO
from agentlightning.algorithm.ppo import PPO as PPO
from agentlightning.algorithm.sft import SFT as SFT
from agentlightning.algorithm.tinker import Tinker as Tinker
from agentlightning.algorithm.trl import TRL as TRL
from agentlightning.algorithm.verl import VERL as VERL
from agentlightning.evaluation.gate import Promotion as Promotion, judge_promotion as judge_promotion
from agentlightning.evaluation.gate import PromotionRules as PromotionRules
from agentlightning.prompt_search.history import PromptResult as PromptResult
from agentlightning.training.loss_settings import LossInputs as LossInputs
from agentlightning.chat.bill import Bill as Bill, LimitReached as LimitReached, Limits as Limits
from agentlightning.chat.chat import Chat as Chat, ChatError as ChatError, ChatReply as ChatReply
from agentlightning.config import lightning_cli as lightning_cli
from agentlightning.emitter import (
    OperationContext as OperationContext,
    emit_annotation as emit_annotation,
    emit_exception as emit_exception,
    emit_message as emit_message,
    emit_object as emit_object,
    emit_reward as emit_reward,
    find_final_reward as find_final_reward,
    find_reward_spans as find_reward_spans,
    get_message_value as get_message_value,
    get_object_value as get_object_value,
    get_reward_value as get_reward_value,
    get_rewards_from_span as get_rewards_from_span,
    is_reward_span as is_reward_span,
    operation as operation,
)
from agentlightning.env_var import (
    LightningEnvVar as LightningEnvVar,
    resolve_bool_env_var as resolve_bool_env_var,
    resolve_int_env_var as resolve_int_env_var,
    resolve_str_env_var as resolve_str_env_var,
)
from agentlightning.errors import (
    AgentLightningError as AgentLightningError,
    BadRequestError as BadRequestError,
    BusyError as BusyError,
    ConflictError as ConflictError,
    GoneError as GoneError,
    LedgerError as LedgerError,
    MissingExtraError as MissingExtraError,
    NoTrainableCallError as NoTrainableCallError,
    NonFiniteLossError as NonFiniteLossError,
    NotFoundError as NotFoundError,
    PolicyFault as PolicyFault,
    RunnerDiedError as RunnerDiedError,
    StoreUnreachableError as StoreUnreachableError,
    StoreWriteError as StoreWriteError,
    TooLargeError as TooLargeError,
    TooMuchDriftError as TooMuchDriftError,
    UnauthorizedError as UnauthorizedError,
)
from agentlightning.execution import (
    AlgorithmDiedError as AlgorithmDiedError,
    ClientServerExecutionStrategy as ClientServerExecutionStrategy,
    ExecutionEvent as ExecutionEvent,
    ExecutionStrategy as ExecutionStrategy,
    MultiprocessingEvent as MultiprocessingEvent,
    SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy,
    StalledError as StalledError,
    StrandedWorkError as StrandedWorkError,
    ThreadingEvent as ThreadingEvent,
)
from agentlightning.environments.graded import tasks_from as tasks_from
from agentlightning.environments.harbor.agent import HarborAgent as HarborAgent
from agentlightning.legacy import (
    AgentLightningClient as AgentLightningClient,
    AgentLightningServer as AgentLightningServer,
    DevTaskLoader as DevTaskLoader,
    LegacyAgentRunner as LegacyAgentRunner,
)
from agentlightning.chat.asking import JudgeError as JudgeError
from agentlightning.chat.judge import JudgeReward as JudgeReward
from agentlightning.chat.ranking import Ranking as Ranking, RankingReward as RankingReward
from agentlightning.litagent import (
    Bubblewrap as Bubblewrap,
    CommandAgent as CommandAgent,
    DataProto as DataProto,
    FunctionalLitAgent as FunctionalLitAgent,
    LitAgent as LitAgent,
    ProgramFailed as ProgramFailed,
    ProgramOutput as ProgramOutput,
    llm_rollout as llm_rollout,
    prompt_rollout as prompt_rollout,
    rollout as rollout,
)
from agentlightning.llm_proxy import (
    GatewayLimits as GatewayLimits,
    HealthChecks as HealthChecks,
    LLMProxy as LLMProxy,
    ModelConfig as ModelConfig,
    PolicyConfig as PolicyConfig,
)
from agentlightning.logging import (
    configure_logger as configure_logger,
    setup_logging as setup_logging,
    setup_module_logging as setup_module_logging,
)
from agentlightning.runner import LitAgentRunner as LitAgentRunner, Runner as Runner
from agentlightning.store import (
    InMemoryLightningStore as InMemoryLightningStore,
    LightningStore as LightningStore,
    LightningStoreCapabilities as LightningStoreCapabilities,
    LightningStoreClient as LightningStoreClient,
    LightningStoreServer as LightningStoreServer,
    LightningStoreStatistics as LightningStoreStatistics,
    LightningStoreThreaded as LightningStoreThreaded,
    MongoLightningStore as MongoLightningStore,
    PostgresLightningStore as PostgresLightningStore,
    SQLiteLightningStore as SQLiteLightningStore,
)
from agentlightning.tracer import (
    AgentOpsTracer as AgentOpsTracer,
    DummyTracer as DummyTracer,
    OtelTracer as OtelTracer,
    Tracer as Tracer,
    WeaveTracer as WeaveTracer,
    clear_active_tracer as clear_active_tracer,
    get_active_tracer as get_active_tracer,
    set_active_tracer as set_active_tracer,
)
from agentlightning.trackers import (
    RunEnding as RunEnding,
    TrackedRun as TrackedRun,
    Tracker as Tracker,
)
from agentlightning.trainer import Trainer as Trainer, build_component as build_component
from agentlightning.trainer.difficulty import (
    TaskRate as TaskRate,
    task_rates as task_rates,
    tasks_between as tasks_between,
)
from agentlightning.types import (
    Attempt as Attempt,
    AttemptError as AttemptError,
    AttemptStatus as AttemptStatus,
    AttemptedRollout as AttemptedRollout,
    AttributeValue as AttributeValue,
    Attributes as Attributes,
    CustomResource as CustomResource,
    Dataset as Dataset,
    DroppedCounts as DroppedCounts,
    EnqueueRolloutRequest as EnqueueRolloutRequest,
    Event as Event,
    EventPage as EventPage,
    FilterField as FilterField,
    FilterOptions as FilterOptions,
    GenericResponse as GenericResponse,
    Hook as Hook,
    LLM as LLM,
    Link as Link,
    NamedResources as NamedResources,
    OtelResource as OtelResource,
    Outcome as Outcome,
    PaginatedResult as PaginatedResult,
    ParallelWorkerBase as ParallelWorkerBase,
    PromptTemplate as PromptTemplate,
    ProxyLLM as ProxyLLM,
    Resource as Resource,
    ResourceUnion as ResourceUnion,
    ResourcesUpdate as ResourcesUpdate,
    RetentionPolicy as RetentionPolicy,
    Rollout as Rollout,
    RolloutConfig as RolloutConfig,
    RolloutEvent as RolloutEvent,
    RolloutLegacy as RolloutLegacy,
    RolloutMode as RolloutMode,
    RolloutRawResult as RolloutRawResult,
    RolloutRawResultLegacy as RolloutRawResultLegacy,
    RolloutStatus as RolloutStatus,
    SamplingParameters as SamplingParameters,
    SortOptions as SortOptions,
    Span as Span,
    SpanAttributeNames as SpanAttributeNames,
    SpanContext as SpanContext,
    SpanCoreFields as SpanCoreFields,
    SpanLike as SpanLike,
    SpanNames as SpanNames,
    SpanRecordingContext as SpanRecordingContext,
    StatusCode as StatusCode,
    SystemPrompt as SystemPrompt,
    Task as Task,
    TaskIfAny as TaskIfAny,
    TaskInput as TaskInput,
    TraceState as TraceState,
    TraceStatus as TraceStatus,
    Triplet as Triplet,
    Worker as Worker,
    WorkerStatus as WorkerStatus,
)
from agentlightning.utils.version import __version__ as __version__
