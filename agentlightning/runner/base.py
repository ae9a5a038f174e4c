"""Runner: the interface of classes that claim rollouts from a store and run an agent on them. Also calls of hooks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from typing_extensions import override

from agentlightning.litagent.litagent import LitAgent
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.types import AttemptedRollout, NamedResources, ParallelWorkerBase, Rollout, RolloutMode, Span
from agentlightning.utils.exceptions import readable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def worker_label(host: str, pid: int, index: int) -> str:
    """Return the name of a worker in the store: host, process and index, which is unique across machines."""
    return f"{host}-{pid}-{index}"


def log_prefix(worker_id: int | None, rollout_id: str | None = None) -> str:
    """Return the prefix of a log line: `[Worker-0] [ro-...]`, or `[Worker-0]` without a rollout."""
    worker = "Worker-Unknown" if worker_id is None else f"Worker-{worker_id}"
    return f"[{worker}] [{rollout_id}]" if rollout_id else f"[{worker}]"


class StopEvent(Protocol):
    """The event that stops a runner, such as `threading.Event`."""

    def is_set(self) -> bool: ...


class Runner(ParallelWorkerBase, Generic[T]):
    """Claims rollouts from a store, one after another, and runs an agent on them.

    May be created in one process and used in another: nothing is started before `init_worker`. One object serves one
    worker. `async with runner:` tears down at its end what was initialised inside; `run_context` also initialises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise TypeError(
                f"{type(self).__name__} does not accept these arguments. Pass agent and store to the context: "
                "LitAgentRunner(tracer=OtelTracer()).run_context(agent=agent, store=store)"
            )
        super().__init__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.worker_id is not None:
            _quietly("runner worker", partial(self.teardown_worker, self.worker_id))
        if getattr(self, "_agent", self) is not None:  # without this attribute: always
            _quietly("runner", self.teardown)

    @override
    def init(self, agent: LitAgent[T], **kwargs: Any) -> None:
        """Prepare for an agent. Called once."""
        raise NotImplementedError

    @override
    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Prepare for a store. Called once per worker."""
        raise NotImplementedError

    @override
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error: use `iter` or `step`."""
        raise RuntimeError("A runner has no run(). Await iter() to run queued rollouts, or step(input) for one task")

    @override
    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""
        raise NotImplementedError

    @override
    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""
        raise NotImplementedError

    async def iter(self, *, event: StopEvent | None = None) -> None:
        """Run rollouts of the queue until `event` is set."""
        raise NotImplementedError

    async def execute(self, task: AttemptedRollout) -> object:
        """Run one claimed rollout and report its end; called by `iter` and `step` for each rollout.

        To add steps, override it and call `return await super().execute(task)`, which runs the rollout. If a class
        overrides nothing else, pass the class itself to the Trainer, which adds `LitAgentRunner`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not implement execute(). Pass the class itself to the Trainer (runner="
            f"{type(self).__name__}), or derive it from agl.LitAgentRunner"
        )

    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
    ) -> Rollout:
        """Run one task immediately, without the queue, and return its rollout.

        `resources` are published first, if there are any. When `event` is set, the attempt is cancelled. An exception
        of the agent is recorded, then raised here.
        """
        raise NotImplementedError

    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> RunContext[Self]:
        """Return a context manager (`with` or `async with`) in which `iter` and `step` of the runner can be called."""
        return RunContext(self, agent, store, hooks, worker_id or 0)


def _overridable(callback: Callable[..., Awaitable[None]]) -> Callable[..., Any]:
    """Hide the signature from type checkers, so that an override may have fewer keywords and may be sync."""
    return callback


class Hook(ParallelWorkerBase):
    """Callbacks of the runner. Override any of them, sync or async, with the keywords that you need.

    Each override may have any of the keywords in its signature here.
    """

    @override
    def __init__(self) -> None:
        super().__init__()

    @_overridable
    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout) -> None:
        """Called after resources are resolved, before tracing begins."""

    @_overridable
    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called after the trace context is opened, before the agent is called."""

    @_overridable
    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called after the agent has returned, while the trace context is still open."""

    @_overridable
    async def on_rollout_error(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout, error: BaseException
    ) -> None:
        """Called after an exception, of the agent or internal, ended the attempt; before `on_rollout_end`."""

    @_overridable
    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout, spans: list[Span]
    ) -> None:
        """Called after the result is processed, before the attempt's status is written; also on failure."""


R = TypeVar("R", bound=Runner[Any])


class RunContext(Generic[R]):
    """Initialises a runner, and tears down in reverse order what was initialised."""

    def __init__(
        self, runner: R, agent: LitAgent[Any], store: LightningStore, hooks: Sequence[Hook] | None, worker_id: int
    ) -> None:
        self._runner = runner
        self._agent = agent
        self._store = store
        self._hooks = hooks
        self._worker_id = worker_id

    def __enter__(self) -> R:
        runner = self._runner
        with ExitStack() as stack:
            runner.init(agent=self._agent, hooks=self._hooks)
            stack.callback(_quietly, "runner", runner.teardown)
            runner.init_worker(self._worker_id, self._store)
            stack.callback(_quietly, "runner worker", partial(runner.teardown_worker, self._worker_id))
            self._teardown = stack.pop_all()
        return runner

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._teardown.close()

    async def __aenter__(self) -> R:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def _quietly(what: str, teardown: Callable[[], object]) -> None:
    try:
        teardown()
    except Exception:  # the work is done, or its own error propagates: this one is only logged
        logger.exception("Exception during teardown of %s", what)


_ATTEMPT = frozenset(("agent", "runner", "rollout"))
OFFERED: dict[str, frozenset[str]] = {
    "on_rollout_start": _ATTEMPT,
    "on_trace_start": _ATTEMPT | {"tracer"},
    "on_trace_end": _ATTEMPT | {"tracer"},
    "on_rollout_error": _ATTEMPT | {"error"},
    "on_rollout_end": _ATTEMPT | {"spans"},
}
"""The arguments of each callback."""


class Hooks:
    """The hooks of one runner. A callback gets the keywords of its signature, and may be sync or async.

    Raises:
        TypeError: one is not a hook, or has an unknown argument; names it.
    """

    def __init__(self, hooks: Sequence[Hook] | None) -> None:
        self._hooks = [(hook, check_hook(hook)) for hook in hooks or ()]

    async def call(self, callback: str, **keywords: Any) -> None:
        """Call one callback of all hooks."""
        order = reversed(self._hooks) if callback.endswith("_end") else iter(self._hooks)
        for hook, takes in order:
            try:
                names = takes[callback]
                arguments = {key: value for key, value in keywords.items() if names is None or key in names}
                answer = getattr(hook, callback)(**arguments)
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:  # a hook only observes; its errors must not change the rollout
                shown = readable(error)
                raised = (type(shown), shown, shown.__traceback__)
                logger.error("Exception during %s hook of %s", callback, type(hook).__name__, exc_info=raised)


def check_hook(hook: Any) -> dict[str, frozenset[str] | None]:
    """Return the names of the arguments of each callback of a hook; None means all.

    Raises:
        TypeError: it is not a hook, or a callback has an unknown argument; names it.
    """
    if not isinstance(hook, Hook):
        raise TypeError(f"A hook must be an object of a subclass of agl.Hook; got {hook!r}")
    takes: dict[str, frozenset[str] | None] = {}
    for callback, offered in OFFERED.items():
        parameters = inspect.signature(getattr(hook, callback)).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        takes[callback] = None if takes_all else frozenset(p.name for p in parameters)
        needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [p.name for p in needed if p.name not in offered or p.kind is p.POSITIONAL_ONLY]
        if unknown:
            raise TypeError(
                f"{type(hook).__name__}.{callback} has the unknown arguments {', '.join(unknown)}; available by name: "
                f"{', '.join(sorted(offered))}"
            )
    return takes
