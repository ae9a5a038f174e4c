"""AgentOpsTracer: the spans of AgentOps's instrumentors, collected per attempt. Needs the extra `agentops`.

The client of AgentOps is started without its service (`instrumentation/agentops.py`), so it needs neither an account
nor a network. To send spans to AgentOps as well, first call
`agentlightning.instrumentation.agentops.enable_agentops_service()`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from typing_extensions import override

from agentlightning.errors import MissingExtraError
from agentlightning.instrumentation import AGENTOPS_INSTALLED, instrument_all, uninstrument_all
from agentlightning.instrumentation.agentops import agentops_service_enabled
from agentlightning.tracer.otel import LightningSpanProcessor, OtelSpanRecordingContext, OtelTracer

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

__all__ = ["AgentOpsTracer", "LightningSpanProcessor"]

logger = logging.getLogger(__name__)

_PLACEHOLDER_KEY = "00000000-0000-0000-0000-000000000000"
_own_clients: list[Any] = []
"""The client that was started here; AgentOps has one per process."""


class AgentOpsTracer(OtelTracer):
    """An `OtelTracer` with one root span per context, `<name>.session`, and the libraries traced by AgentOps below it.

    Args:
        agentops_managed: start the client of AgentOps; if false, the program has to start it.
        instrument_managed: patch AgentOps so that it works offline and keeps token ids; if false, it is unchanged.
        daemon: has no effect.
        store: as for `OtelTracer`.

    Raises:
        MissingExtraError: AgentOps is not installed.
    """

    traces_clients = False

    def __init__(
        self,
        *,
        agentops_managed: bool = True,
        instrument_managed: bool = True,
        daemon: bool = True,
        store: LightningStore | None = None,
    ) -> None:
        if not AGENTOPS_INSTALLED:
            raise MissingExtraError("AgentOpsTracer", "agentops", "agentops")
        super().__init__(store)
        self.agentops_managed = agentops_managed
        self.instrument_managed = instrument_managed
        self.daemon = daemon
        self._instrumented = False
        for name, effect in (("agentops_managed", "start"), ("instrument_managed", "patch")):
            if not getattr(self, name):
                logger.warning("AgentOpsTracer(%s=False): the program has to %s AgentOps itself", name, effect)
        if not daemon:
            logger.warning("AgentOpsTracer(daemon=False) has no effect")

    def instrument(self, worker_id: int) -> None:
        """Patch the vendor packages. Override it for other patches."""
        instrument_all()

    def uninstrument(self, worker_id: int) -> None:
        """Undo `instrument`."""
        uninstrument_all()

    @override
    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """See `OtelTracer`; also starts the client of AgentOps, which then stays until the process ends.

        Raises:
            RuntimeError: the client could not be started.
        """
        super().init_worker(worker_id, store)
        if self.instrument_managed and not self._instrumented:
            self.instrument(worker_id)
            self._instrumented = True
        if not self.agentops_managed:
            return
        agentops: Any = importlib.import_module("agentops")
        client = agentops.get_client()
        if client.initialized:
            if client not in _own_clients:
                logger.warning("The program has started AgentOps itself, so AgentOps continues to send to its service")
            return
        service = agentops_service_enabled()
        settings = {} if service else {"api_key": _PLACEHOLDER_KEY, "log_session_replay_url": False}
        agentops.init(auto_start_session=False, **settings)
        if not client.initialized:
            raise RuntimeError("AgentOps TracerProvider is not initialized.")
        _own_clients.append(client)

    @override
    def teardown_worker(self, worker_id: int, *args: object, **kwargs: object) -> None:
        super().teardown_worker(worker_id)
        if self._instrumented:
            self._instrumented = False
            self.uninstrument(worker_id)

    @override
    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_instrumented": False}

    @override
    def get_langchain_handler(self, tags: list[str] | None = None) -> Any:
        """Return a callback handler of AgentOps for LangChain. Its spans are below the open context."""
        module: Any = importlib.import_module("agentops.integration.callbacks.langchain")
        handler = module.LangchainCallbackHandler(api_key=_PLACEHOLDER_KEY, tags=tags, auto_session=False)
        handler.session_span = trace_api.get_current_span()
        return handler

    get_langchain_callback_handler = get_langchain_handler

    @override
    @contextmanager
    def _root(self, name: str) -> Generator[object]:
        tracer = self._tracer()
        attributes = {"agentops.span.kind": "session", "operation.name": name}
        span = tracer.start_span(f"{name}.session", context=Context(), attributes=attributes)
        session = OtelSpanRecordingContext(span)
        session.resume()
        try:
            yield tracer
        except BaseException as error:  # also records cancellation and interrupts
            session.record_exception(error)
            raise
        finally:
            session.finalize()
