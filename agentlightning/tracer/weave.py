"""WeaveTracer: the calls that Weave records, collected per attempt. Needs the extra `weave`, but no account or network.

Every call of Weave becomes one of our OpenTelemetry spans, in one tree with operations, emitters and the spans of other
libraries. `instrumentation/weave.py` disconnects Weave from its service.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace as trace_api
from pydantic import BaseModel
from typing_extensions import override

from agentlightning.errors import MissingExtraError
from agentlightning.instrumentation import WEAVE_INSTALLED
from agentlightning.instrumentation.weave import instrument_weave, uninstrument_weave
from agentlightning.semconv import LightningResourceAttributes, LightningSpanAttributes
from agentlightning.tracer.conversion import any_attributes
from agentlightning.tracer.otel import OtelSpanRecordingContext, OtelTracer
from agentlightning.tracer.provider import own_provider
from agentlightning.tracer.scope import current_scope
from agentlightning.utils.otel import INSTRUMENTATION_NAME

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

NAME = LightningSpanAttributes.OPERATION_NAME.value
INPUT = LightningSpanAttributes.OPERATION_INPUT.value
OUTPUT = LightningSpanAttributes.OPERATION_OUTPUT.value
_ROLLOUT_ID = LightningResourceAttributes.ROLLOUT_ID.value
_ATTEMPT_ID = LightningResourceAttributes.ATTEMPT_ID.value
_TRACER_NAME = "weave"
_RECORDING = "_agentlightning_recording"


class WeaveTracer(OtelTracer):
    """An `OtelTracer` with one root call per context, and the calls of Weave below it. `trace_context` yields the root.

    Args:
        project_name: the project that Weave reports to the program; by default generated, once per tracer.
        weave_user_settings: `weave.trace.settings.UserSettings` of the program.
        instrument_managed: replace Weave's client by ours; if false, Weave is unchanged, and its calls are not
            recorded.
        store: as for `OtelTracer`.

    Raises:
        MissingExtraError: Weave is not installed.
    """

    tracer_name = _TRACER_NAME
    success = "OK"
    traces_clients = False

    def __init__(
        self,
        *,
        project_name: str | None = None,
        weave_user_settings: object = None,
        instrument_managed: bool = True,
        store: LightningStore | None = None,
    ) -> None:
        if not WEAVE_INSTALLED:
            raise MissingExtraError("WeaveTracer", "weave", "weave")
        super().__init__(store)
        self.project_name = project_name or f"agl/weave-{secrets.token_hex(6)}"
        self.weave_user_settings = weave_user_settings
        self.instrument_managed = instrument_managed
        self._client: Any = None

    @override
    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_client": None}

    @override
    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Initialise the worker like `OtelTracer`, and replace Weave's client by ours.

        Raises:
            RuntimeError: this version of Weave lacks a required attribute.
        """
        super().init_worker(worker_id, store)
        if not self.instrument_managed or self._client is not None:
            return
        try:
            settings: Any = importlib.import_module("weave.trace.settings")
            own = settings.UserSettings(use_server_cache=False, print_call_link=False)
            apply = getattr(settings, "replace_settings", None) or settings.parse_and_apply_settings
            apply(self.weave_user_settings or own)
            self._client = instrument_weave(self.project_name, _Spans())
        except (ImportError, AttributeError, TypeError) as error:
            raise RuntimeError(f"Failed to initialize Weave for project '{self.project_name}': {error}") from error

    @override
    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        super().teardown_worker(worker_id)
        client, self._client = self._client, None
        if client is not None:
            uninstrument_weave()

    @override
    @contextmanager
    def _root(self, name: str) -> Generator[object]:
        client, scope = self._client, current_scope()
        if client is None or scope is None:
            yield self._tracer()
            return
        inputs = {_ROLLOUT_ID: scope.rollout_id, _ATTEMPT_ID: scope.attempt_id}
        values = {key: value for key, value in inputs.items() if value is not None}
        call = client.create_call(name or self.project_name, values)
        try:
            yield call
        except BaseException as error:  # also records cancellation and interrupts
            client.finish_call(call, exception=error)
            raise
        client.finish_call(call)


class _Spans:
    """Makes a span of every call of Weave. A call that cannot be recorded is skipped; the program continues."""

    def begun(self, call: Any, parent: object, current: bool) -> None:
        try:
            name = str(call.func_name)
            attributes = {NAME: name, INPUT: _plain(call.inputs), **dict(call.attributes or {})}
            attributes.pop("weave", None)  # Weave's own attributes
            above: OtelSpanRecordingContext | None = getattr(parent, _RECORDING, None)
            context = trace_api.set_span_in_context(above.get_otel_span()) if above is not None else None
            tracer = own_provider(_TRACER_NAME).get_tracer(INSTRUMENTATION_NAME)
            recording = OtelSpanRecordingContext(
                tracer.start_span(name, context, attributes=any_attributes(attributes))
            )
        except Exception as error:  # boundary: the arguments of a call are the program's
            logger.debug("A call of Weave was not recorded: %r", error)
            return
        setattr(call, _RECORDING, recording)
        if current:
            recording.resume()

    def ended(self, call: Any, output: object, exception: BaseException | None) -> None:
        recording: OtelSpanRecordingContext | None = getattr(call, _RECORDING, None)
        if recording is None:
            return
        try:
            if output is not None:
                recording.record_attributes(any_attributes({OUTPUT: _plain(output)}))
            recording.record_attributes(any_attributes(_plain(call.summary or {})))
        except Exception as error:  # boundary: as above
            logger.debug("The result of a call of Weave was not recorded: %r", error)
        if exception is None:
            recording.record_status("OK")
        else:
            recording.record_attributes({"exception.message": str(exception)})
            recording.record_exception(exception)
        recording.finalize()


def _plain(value: object) -> Any:
    """Return values with their pydantic models as dictionaries."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", warnings=False)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key.value if isinstance(key, Enum) else key): _plain(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[object], value)]
    return value
