"""Weave without Weights & Biases: a client that reports calls to a listener and sends nothing.

`@weave.op`, sessions and the integrations of Weave call the global client to begin and to finish calls. While the patch
is applied, that client is ours, also for a program that calls `weave.init` itself. It keeps Weave's state (call stack,
summaries, handlers) and needs no log-in, server or thread. Queries of Weave's service fail with an error that names the
reason. Error reports to Weave's vendor stay disabled for the rest of the process.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from concurrent.futures import Future
from typing import Any, Protocol

from agentlightning.instrumentation.patching import Original, Patch

logger = logging.getLogger(__name__)

_NO_DIGEST = "offline"
_FALLBACK_PROJECT = "agl/weave"


class CallListener(Protocol):
    """Receives the calls of Weave. Runs in the context of the caller, and must not raise."""

    def begun(self, call: Any, parent: object, current: bool) -> None:
        """A call began below `parent`; later calls in this context are below it if `current`."""
        ...

    def ended(self, call: Any, output: object, exception: BaseException | None) -> None: ...


class _Installed:
    """Our client, and the number of its users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Any = None
        self.users = 0


_installed = _Installed()


def instrument_weave(project: str, listener: CallListener) -> Any:
    """Replace the global client by one that reports to `listener`, patch the libraries that Weave knows, and return it.

    Weave has one client per process: if ours is already installed, it is returned with its existing listener.

    Raises:
        ImportError, AttributeError: this version of Weave does not support the patch; nothing is changed then.
    """
    with _installed.lock:
        if _installed.client is None:
            context: Any = importlib.import_module("weave.trace.context.weave_client_context")
            integrations: Any = importlib.import_module("weave.integrations.patch")
            sentry: Any = importlib.import_module("weave.telemetry.trace_sentry")
            client = _local_client_class()(project, listener, context.get_weave_client())
            if client.before is not None:
                logger.warning(
                    "Weave is already connected to %s; its calls are recorded by the tracer instead",
                    client.before.project,
                )
            _PATCH.apply()
            sentry.global_trace_sentry._disabled = True
            _set_client(client)
            integrations.implicit_patch()
            integrations.register_import_hook()
            _installed.client = client
        _installed.users += 1
        return _installed.client


def uninstrument_weave() -> None:
    """Release one use; the last one restores the previous client. Libraries stay patched, which has no effect without a
    client.

    Raises:
        RuntimeError: Weave is not instrumented.
    """
    with _installed.lock:
        if _installed.client is None:
            raise RuntimeError("Weave is not instrumented; call instrument_weave first")
        _installed.users -= 1
        if _installed.users == 0:
            client, _installed.client = _installed.client, None
            importlib.import_module("weave.integrations.patch").unregister_import_hook()
            _set_client(client.before)
            _PATCH.restore()


def _set_client(client: object) -> None:
    context: Any = importlib.import_module("weave.trace.context.weave_client_context")
    context.set_weave_client_global(None)  # another one is set only when there is none
    context.set_weave_client_global(client)


def _keep_client(original: Original) -> Original:
    """Replace `weave.init` for the program, because the client is already installed."""

    @functools.wraps(original)
    def init_weave(project_name: str = _FALLBACK_PROJECT, *args: object, **kwargs: object) -> object:
        context: Any = importlib.import_module("weave.trace.context.weave_client_context")
        client = context.get_weave_client()
        logger.debug("weave.init(%r) returns the tracer's existing client", project_name)
        return client if client is not None else original(project_name, *args, **kwargs)

    return init_weave


def _keep_going(original: Original) -> Original:
    """Replace `weave.finish` for the program, which must not end the client."""

    @functools.wraps(original)
    def finish() -> None:
        """Do nothing: there is nothing to send."""

    return finish


_PATCH = Patch(
    ("weave.trace.weave_init", "init_weave", _keep_client),
    ("weave.trace.weave_init", "finish", _keep_going),
)


# --- the client ----------------------------------------------------------------------------------------------------


class _NoServer:
    """Replaces Weave's connection."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} requires Weave's service, which this tracer does not use. Read the rollouts' store instead"
        )


class _NoWork:
    """Replaces Weave's threads: uploads are dropped, lookups are made immediately."""

    num_outstanding_futures = 0

    def defer(self, work: Original, *args: object, **kwargs: object) -> Future[object]:
        done: Future[object] = Future()
        sends = getattr(work, "__name__", "").startswith("send_")
        done.set_result(None if sends else work(*args, **kwargs))
        return done

    def then(self, futures: list[Future[object]], work: Original) -> Future[object]:
        return self.defer(work, [future.result() for future in futures])

    def flush(self, timeout: float | None = None) -> bool:
        return True


@functools.cache
def _local_client_class() -> Any:
    """Return the class of our client, which can be created only if Weave is installed."""
    weave_client: Any = importlib.import_module("weave.trace.weave_client")
    call_context: Any = importlib.import_module("weave.trace.context.call_context")
    refs: Any = importlib.import_module("weave.trace.refs")
    base: Any = weave_client.WeaveClient

    class LocalClient(base):
        """Stores nothing; reports to its listener."""

        def __init__(self, project: str, listener: CallListener, before: object) -> None:
            entity, _, name = project.rpartition("/")
            client: Any = super()
            client.__init__(entity or "agl", name, _NoServer(), ensure_project_exists=False)
            self.future_executor = self.future_executor_fastlane = _NoWork()
            self.listener = listener
            self.before = before
            self._warned = False

        def _save_op(self, op: Any, name: str | None = None) -> object:
            return refs.OpRef(self.entity, self.project, name or op.name, _NO_DIGEST)

        def _save_object(self, val: object, name: str, branch: str = "latest") -> object:
            if not self._warned:
                self._warned = True
                logger.warning("The tracer does not use Weave's service: %r and other objects are not published", name)
            return refs.ObjectRef(self.entity, self.project, name, _NO_DIGEST)

        def _save_nested_objects(self, obj: object, name: str | None = None) -> None: ...

        def flush(self) -> None: ...

        def finish(self, *args: object, **kwargs: object) -> None: ...

        def create_call(
            self, op: object, inputs: object, parent: object = None, *args: object, **kwargs: Any
        ) -> object:
            stacked = kwargs.get("use_stack", True)
            current = call_context.get_current_call() if stacked else None
            client: Any = super()
            call = client.create_call(op, inputs, parent, *args, **kwargs)
            if call.id is not None:
                self.listener.begun(call, parent if parent is not current else None, stacked)
            return call

        def finish_call(
            self, call: object, output: object = None, exception: BaseException | None = None, **kwargs: object
        ) -> None:
            client: Any = super()
            try:
                client.finish_call(call, output, exception, **kwargs)
            finally:
                self.listener.ended(call, output, exception)

    return LocalClient
