"""Construction of a Trainer's parts from their specs. Each part has a `_make_*` method that subclasses may override.

Also checks that runners serve the queue and use every setting of the Trainer, and chooses the store: by name, by
default, and suitable for the strategy.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Algorithm
from agentlightning.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agentlightning.execution.address import DEFAULT_PORT, LOOPBACK, Address
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.runner.base import Runner
from agentlightning.store.base import LightningStore
from agentlightning.store.spec import is_store_spec, public_form, store_from_spec
from agentlightning.tracer.base import Tracer
from agentlightning.trainer.arguments import check_hooks
from agentlightning.trainer.init_utils import ComponentSpec, build_component, load_class
from agentlightning.trainer.registry import (
    AlgorithmRegistry,
    ExecutionStrategyRegistry,
    TrackerRegistry,
)
from agentlightning.types import Hook, NamedResources
from agentlightning.utils.setting_checks import check_port

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.trackers.tracker import Tracker

logger = logging.getLogger(__name__)

_NOTHING = object()
_NO_TRACKER = (
    "trackers: {actual_type} is not a tracker; expected one of "
    + ", ".join(map(repr, TrackerRegistry))
    + ", or an object with start(run), record(record) and finish(ending)"
)


class TrainerParts:
    """The settings of the parts, and the methods that make them. `Trainer` adds the runs."""

    tracer: Tracer
    max_rollouts: int | None
    reward_fn: Callable[..., Any] | None
    reward_dimensions: tuple[str, ...]
    policy_faults: dict[type[Exception], float] | None
    initial_resources: NamedResources | None

    def _make_tracer(self, tracer: ComponentSpec[Tracer]) -> Tracer:
        from agentlightning.tracer.otel import OtelTracer

        return _made(build_component(tracer, expected_type=Tracer, spec_name="tracer", default_factory=OtelTracer))

    def _make_adapter(self, adapter: ComponentSpec[TraceAdapter[Any]]) -> TraceAdapter[Any]:
        from agentlightning.adapter.triplet import TracerTraceToTriplet

        made = build_component(
            adapter,
            expected_type=TraceAdapter,
            spec_name="adapter",
            default_factory=TracerTraceToTriplet,
            dict_requires_type=False,
            dict_default_cls=TracerTraceToTriplet,
        )
        return _made(made)

    def _make_algorithm(self, algorithm: ComponentSpec[Algorithm]) -> Algorithm | None:
        return build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True, registry=AlgorithmRegistry
        )

    def _make_trackers(self, trackers: object) -> tuple[Tracker, ...]:
        """Return trackers as a tuple. Accept None, one spec, or a sequence."""
        from agentlightning.trackers.tracker import Tracker

        if trackers is None:
            return ()
        many = isinstance(trackers, Sequence) and not isinstance(trackers, str)
        specs = list(cast("Sequence[Any]", trackers)) if many else [cast("Any", trackers)]
        return tuple(
            _made(
                build_component(
                    {"type": spec} if isinstance(spec, (type, str)) else spec,  # a class has the methods, too
                    expected_type=Tracker,
                    spec_name="trackers" if len(specs) == 1 else f"trackers[{number}]",
                    registry=TrackerRegistry,
                    type_error_fmt=_NO_TRACKER.replace("{actual_type}", "{type_name}"),
                    invalid_spec_error_fmt=_NO_TRACKER,
                )
            )
            for number, spec in enumerate(specs)
        )

    def _make_strategy(
        self, strategy: ComponentSpec[ExecutionStrategy], *, n_runners: int, port: int | None = None
    ) -> ExecutionStrategy:
        from agentlightning.execution.client_server import ClientServerExecutionStrategy

        defaults = {"n_runners": n_runners} if port is None else {"n_runners": n_runners, "server_port": port}
        made = _made(
            build_component(
                strategy,
                expected_type=ExecutionStrategy,
                spec_name="strategy",
                default_factory=lambda: ClientServerExecutionStrategy(n_runners=n_runners, server_port=port),
                optional_defaults=defaults,
                registry=ExecutionStrategyRegistry,
            )
        )
        if port is not None and made is strategy and isinstance(made, ClientServerExecutionStrategy):
            made.server_port = port
        check_address_is_used(strategy, made)
        serves = getattr(made, "server_port", None) is not None and getattr(made, "managed_store", True)
        if port is not None and not serves:
            logger.warning("port=%d has no effect: %s runs no store server", port, type(made).__name__)
        return made

    def _make_store(self, store: ComponentSpec[LightningStore], strategy: ExecutionStrategy) -> LightningStore:
        if isinstance(store, str) and (named := named_store(store)) is not None:
            return named
        made = build_component(
            store,
            expected_type=LightningStore,
            spec_name="store",
            default_factory=lambda: default_store(strategy),
        )
        return _made(made)

    def _make_runner(self, runner: ComponentSpec[Runner[Any]]) -> Runner[Any]:
        from agentlightning.runner.agent import LitAgentRunner

        settings = self._runner_settings()
        made = build_component(
            _serving(runner),
            expected_type=Runner,
            spec_name="runner",
            default_factory=lambda: LitAgentRunner[Any](self.tracer, **settings),
            optional_defaults={"tracer": lambda: self.tracer, **{k: lambda v=v: v for k, v in settings.items()}},
            dict_requires_type=False,
            dict_default_cls=LitAgentRunner,
        )
        if hasattr(made, "take_from_trainer"):  # sets only what the runner has not set itself
            cast("Any", made).take_from_trainer(tracer=self.tracer, **settings)
        return _made(made)

    def _make_llm_proxy(self, llm_proxy: ComponentSpec[LLMProxy], *, store: LightningStore) -> LLMProxy | None:
        if llm_proxy is None:
            return None
        from agentlightning.llm_proxy import LLMProxy

        return build_component(
            llm_proxy,
            expected_type=LLMProxy,
            spec_name="llm_proxy",
            allow_none=True,
            optional_defaults={"store": store},
            dict_requires_type=False,
            dict_default_cls=LLMProxy,
        )

    def _normalize_hooks(self, hooks: Hook | Sequence[Hook] | None) -> tuple[Hook, ...]:
        return check_hooks(hooks)

    def _runner_settings(self) -> dict[str, Any]:
        settings = {
            "max_rollouts": self.max_rollouts,
            "reward_fn": self.reward_fn,
            "reward_dimensions": self.reward_dimensions or None,
            "policy_faults": self.policy_faults,
        }
        return {name: value for name, value in settings.items() if value is not None}


def _made(component: object) -> Any:
    assert component is not None
    return component


def _serving(spec: Any) -> Any:
    """Return the spec of a runner. Replace a class that has only `execute` with one that serves the queue."""
    if isinstance(spec, dict) and "type" in spec:
        settings = cast("dict[str, Any]", spec)
        return {**settings, "type": _serving(settings["type"])}
    named = isinstance(spec, str) and "." in spec
    target = cast("Any", load_class(cast("str", spec)) if named else spec)
    if isinstance(target, type) and issubclass(target, Runner):
        from agentlightning.runner.agent import serving

        return serving(cast("type[Runner[Any]]", target))
    return cast("Any", target)


def check_serves(runner: Runner[Any]) -> None:
    """Raise `TypeError` if a runner does not serve the queue."""
    kind: Any = type(runner)
    if kind.iter is cast("Any", Runner).iter:
        from agentlightning.runner.agent import overrides_only_execute

        unused = " Its run() is never called." if "run" in vars(kind) else ""
        if overrides_only_execute(kind):
            unused = f" Pass the class itself, runner={kind.__name__}, so that its execute() is called."
        raise TypeError(
            f"The runner {kind.__name__} has no iter(), so it would claim no rollouts.{unused} Derive it from "
            "agl.LitAgentRunner and override execute(task), step or iter. An agent (a function or an agl.LitAgent) "
            "is not a runner: pass it to fit(agent, train_dataset=...)."
        )


def replicas(
    first: Runner[Any], build: Callable[[], Runner[Any] | None], count: int, share_process: bool | None
) -> tuple[Runner[Any], ...]:
    """Return `count` runners: the first, and others that are built from the spec, or copied if the spec is an instance.

    Return only the first if each runner has its own process, or may have one and cannot be copied.
    """
    runners = [first]
    while len(runners) < count and share_process is not False:
        runner = build()
        try:
            runners.append(runner or copy.deepcopy(first))
        except Exception as error:  # any class may refuse to be copied, with any exception
            if not share_process:
                return (first,)
            raise TypeError(
                f"Each worker in a process needs its own runner, and this {type(first).__name__} cannot be copied "
                f"({type(error).__name__}: {error}). Pass a class, a factory or a dict as runner=, or use "
                "strategy='cs'."
            ) from error
    return tuple(runners)


def check_settings_are_used(
    runner: Runner[Any], spec: object, settings: dict[str, object], tracer: Tracer | None
) -> None:
    """Raise `ValueError` if an existing runner, or one from a factory, differs from the settings of the Trainer."""
    ready_made = spec is runner or (callable(spec) and not isinstance(spec, type))
    named = () if ready_made else inspect.signature(type(runner)).parameters
    expected = settings if tracer is None else {**settings, "tracer": tracer}
    for name, value in expected.items():
        own = getattr(runner, name, getattr(runner, f"_{name}", _NOTHING))
        if name not in named and own is not value and own != value:
            raise ValueError(
                f"{name} of the Trainer would have no effect: the runner {type(runner).__name__} does not accept it. "
                f"Set it on the runner: runner={{'type': ..., {name!r}: ...}}, or omit runner= or {name}=."
            )


_URL = LightningEnvVar.AGENT_LIGHTNING_STORE_URL.value
_HOST = LightningEnvVar.AGL_SERVER_HOST.value
_PORT = LightningEnvVar.AGL_SERVER_PORT.value


def named_store(text: str) -> LightningStore | None:
    """Return the store for a string such as `sqlite:///run.db`; None for an import path."""
    return store_from_spec(text) if is_store_spec(text) or "." not in text else None


def default_store(strategy: ExecutionStrategy) -> LightningStore:
    """Return a store in memory; for an unmanaged strategy, a client of the server in the environment variables.

    The server is at `AGENT_LIGHTNING_STORE_URL`. Without that variable, and if processes need a shared store, it is at
    `AGL_SERVER_HOST` and `AGL_SERVER_PORT`, if one of them is set.
    """
    from agentlightning.store.memory import InMemoryLightningStore

    url = os.environ.get(_URL)
    managed = getattr(strategy, "managed_store", True)
    if url is None:
        address = None if managed or strategy.runners_share_process else _address_of_environment()
        if address is None:
            return InMemoryLightningStore()
        logger.info("Using the store server at %s (AGL_MANAGED_STORE=0, %s, %s)", address, _HOST, _PORT)
        return store_from_spec(address)
    if managed:
        logger.warning(
            "%s=%s is ignored: the strategy manages its own store; set AGL_MANAGED_STORE=0 to use the server",
            _URL,
            public_form(url),
        )
        return InMemoryLightningStore()
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{_URL} must be an http address such as http://127.0.0.1:4747; got {public_form(url)!r}")
    return store_from_spec(url)


def _address_of_environment() -> str | None:
    """Return the address of the store server at `AGL_SERVER_HOST` and `AGL_SERVER_PORT`; None if neither is set."""
    port = check_port(_PORT, resolve_int_env_var(_PORT, fallback=DEFAULT_PORT))
    if port == 0 or (_HOST not in os.environ and _PORT not in os.environ):
        return None
    return Address(resolve_str_env_var(_HOST, fallback=LOOPBACK), port).url


def place_of(store: LightningStore) -> str:
    """Return the location of a store's data, in the form that `store=` accepts if it has such a form."""
    path, address = getattr(store, "path", None), getattr(store, "server_address_root", None)
    if isinstance(path, str):
        return f"sqlite:///{path}"
    if isinstance(address, str):
        return address
    durable = store.capabilities.get("persistent", store.capabilities.get("persistence"))
    return type(store).__name__ if durable else "memory, until this program ends"


def check_address_is_used(spec: object, strategy: ExecutionStrategy) -> None:
    """Raise `ValueError` if server settings are set for a strategy that runs no store server.

    Only warn if the environment turned the server off (`AGL_MANAGED_STORE=0`): the program may run in several places.
    """
    if not isinstance(spec, dict) or getattr(strategy, "managed_store", True):
        return
    settings = cast("dict[str, Any]", spec)
    unused = [name for name in ("server_host", "server_port", "connect_host") if settings.get(name) is not None]
    if not unused:
        return
    text = f"{', '.join(unused)} of the strategy would have no effect: with managed_store=False it runs no server"
    if settings.get("managed_store") is False:
        raise ValueError(f"{text}. Remove one of these settings")
    logger.warning("%s (AGL_MANAGED_STORE)", text)


def check_shared(store: LightningStore, strategy: ExecutionStrategy) -> None:
    """Raise `ValueError` if several processes use a store directly and it does not share its data between them."""
    if getattr(strategy, "managed_store", True) or strategy.runners_share_process:
        return
    capabilities = store.capabilities
    if not (capabilities.get("zero_copy") or capabilities.get("distributed")):
        raise ValueError(
            f"managed_store=False passes the store to several processes, and each would have its own "
            f"{type(store).__name__}. Use store='http://...' (or {_URL}, or {_PORT} for a server on this machine), "
            "store='sqlite:///run.db', or managed_store=True."
        )
