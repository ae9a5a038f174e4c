"""The OpenTelemetry providers behind a tracer: ours and the program's work in parallel.

Two providers have our processor. The *global* one receives the spans of instrumented libraries. It is the program's,
which continues to sample and export, or a placeholder until the program sets one. Our *own* one creates the spans of
emitters and operations: they are sent to our scopes only, never to the program's exporters, and cannot be lost through
a sampler or a processor of the program.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult
from typing_extensions import override

from agentlightning.semconv import LightningResourceAttributes
from agentlightning.tracer.scope import ended_scope, scope_for, scope_of
from agentlightning.utils.id import SYSTEM_RANDOM

logger = logging.getLogger(__name__)

_TRACER_NAME = LightningResourceAttributes.TRACER_NAME.value
_lock = threading.Lock()
_own: dict[str | None, TracerProvider] = {}


class LightningSpanProcessor(SpanProcessor):
    """Keeps spans in the scope in which they began. Uses no store and has no state."""

    @override
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        parent, context = span.parent, span.get_span_context()
        scope = scope_for(parent.span_id if parent is not None else 0)
        if scope is not None and context is not None:
            scope.begin(context.span_id)
        elif scope is None and (ended := ended_scope()) is not None:
            ended.refuse()

    @override
    def on_end(self, span: ReadableSpan) -> None:
        scope = scope_of(span)
        if scope is not None:
            scope.end(span)

    @override
    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""

    @override
    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: no spans wait here, only in their scope."""
        return True


_PROCESSOR = LightningSpanProcessor()


# --- the global provider -----------------------------------------------------------------------------------------


_watched: list[trace_api.TracerProvider] = []
"""Global providers with our processor, the latest one last; a program rarely has more than two."""


def watch_global_provider() -> trace_api.TracerProvider:
    """Return the global provider with our processor; set a placeholder if the program has none.

    Call it again at any time: it is cheap, and a program may set its provider later.
    """
    provider = trace_api.get_tracer_provider()
    if _watched and _watched[-1] is provider:
        return provider
    with _lock:
        provider = trace_api.get_tracer_provider()
        if isinstance(provider, trace_api.ProxyTracerProvider):
            # a stand-in becomes global without using up the one call of `set_tracer_provider` that a program has
            provider = StandInProvider(span_limits=_limits())
            if getattr(trace_api, "_TRACER_PROVIDER", trace_api) is None:
                trace_api._TRACER_PROVIDER = provider  # pyright: ignore[reportAttributeAccessIssue] -- the public setter is final
            else:  # an OpenTelemetry that keeps its provider elsewhere
                trace_api.set_tracer_provider(provider)
        if all(other is not provider for other in _watched):
            if (add := getattr(provider, "add_span_processor", None)) is not None:
                add(_PROCESSOR)
            else:
                logger.warning(
                    "The global tracer provider %s does not support span processors: spans of instrumented libraries "
                    "are not recorded",
                    type(provider).__name__,
                )
            _watched.append(provider)
        elif _watched[-1] is not provider:
            _watched.sort(key=lambda other: other is provider)
    return provider


class StandInProvider(TracerProvider):
    """The global provider of a program that has none. Its tracers use the program's provider once one is set."""

    @override
    def get_tracer(self, *args: Any, **kwargs: Any) -> trace_api.Tracer:
        return _FollowingTracer(self, super().get_tracer(*args, **kwargs), args, kwargs)


class _FollowingTracer(trace_api.Tracer):
    """A tracer that always uses the current global provider."""

    def __init__(
        self, stand_in: StandInProvider, own: trace_api.Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._stand_in = stand_in
        self._own = own
        self._asked_for = (args, kwargs)
        self._followed: tuple[trace_api.TracerProvider, trace_api.Tracer] | None = None

    def _present(self) -> trace_api.Tracer:
        provider = watch_global_provider()
        if provider is self._stand_in:
            return self._own
        if self._followed is None or self._followed[0] is not provider:
            args, kwargs = self._asked_for
            self._followed = (provider, provider.get_tracer(*args, **kwargs))
        return self._followed[1]

    @override
    def start_span(self, *args: Any, **kwargs: Any) -> trace_api.Span:
        return self._present().start_span(*args, **kwargs)

    @override
    def start_as_current_span(  # pyright: ignore[reportIncompatibleMethodOverride] -- also a decorator there
        self, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[trace_api.Span]:
        return self._present().start_as_current_span(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


# --- our own provider --------------------------------------------------------------------------------------------


def own_provider(tracer_name: str | None = None) -> TracerProvider:
    """Return the provider of our spans; `tracer_name` is added to the resource of its spans."""
    with _lock:
        if tracer_name not in _own:
            attributes = {} if tracer_name is None else {_TRACER_NAME: tracer_name}
            provider = TracerProvider(
                sampler=_EvidenceSampler(),
                resource=Resource.create(attributes),
                id_generator=_SameIds(),
                span_limits=_limits(),
                shutdown_on_exit=False,
            )
            provider.add_span_processor(_PROCESSOR)
            _own[tracer_name] = provider
        return _own[tracer_name]


def _limits() -> SpanLimits:
    return SpanLimits(max_span_attributes=SpanLimits.UNSET)


class _EvidenceSampler(Sampler):
    """Records every span, and marks it as sampled only if the program's sampler would. Library spans below ours are
    therefore sampled as if ours did not exist."""

    @override
    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace_api.SpanKind | None = None,
        attributes: Any = None,
        links: Sequence[trace_api.Link] | None = None,
        trace_state: trace_api.TraceState | None = None,
    ) -> SamplingResult:
        sampler = cast(Sampler, getattr(trace_api.get_tracer_provider(), "sampler", ALWAYS_ON))
        try:
            theirs = sampler.should_sample(parent_context, trace_id, name, kind, attributes, links)
        except Exception as error:  # boundary: a broken sampler of the program loses no evidence
            logger.debug("The sampler %s of the program failed: %r", type(sampler).__name__, error)
            return SamplingResult(Decision.RECORD_ONLY, attributes)
        decision = Decision.RECORD_AND_SAMPLE if theirs.decision.is_sampled() else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, theirs.trace_state)

    @override
    def get_description(self) -> str:
        return "agentlightning: records all spans, samples like the program"


class _SystemIds(RandomIdGenerator):
    """Random ids that do not repeat if the agent seeds `random`: the store keeps one span per id."""

    @override
    def generate_span_id(self) -> int:
        return SYSTEM_RANDOM.randrange(1, 1 << 64)

    @override
    def generate_trace_id(self) -> int:
        return SYSTEM_RANDOM.randrange(1, 1 << 128)


class _SameIds(IdGenerator):
    """Ids in the program's form, because its spans may be below ours."""

    def __init__(self) -> None:
        self._random = _SystemIds()

    def _theirs(self) -> IdGenerator:
        theirs = getattr(trace_api.get_tracer_provider(), "id_generator", None)
        return self._random if theirs is None or type(theirs) is RandomIdGenerator else cast(IdGenerator, theirs)

    @override
    def generate_trace_id(self) -> int:
        return self._theirs().generate_trace_id()

    @override
    def generate_span_id(self) -> int:
        return self._theirs().generate_span_id()
