"""Trainer: parts to bundles, bundles to a strategy. The one place that knows every part."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.fast import Baseline, FastAlgorithm
from agentlightning.env_var import LightningEnvVar
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.execution.client_server import ClientServerExecutionStrategy
from agentlightning.execution.settings import check_port
from agentlightning.litagent.decorator import FunctionalLitAgent, as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.runner.base import Runner
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.collector import collector_of
from agentlightning.tracer.otel import OtelTracer
from agentlightning.trainer.arguments import (
    check_dataset,
    check_hooks,
    check_nothing_needs_an_algorithm,
    check_resources,
    check_whole,
    refuse_unknown,
    resolve_alias,
    runner_count,
    same_setting,
    tell_of_old_settings,
)
from agentlightning.trainer.bundles import AlgorithmSide, RunnerSide
from agentlightning.trainer.init_utils import ComponentSpec, build_component, short_name
from agentlightning.trainer.registry import ABSENT_ALGORITHMS, AlgorithmRegistry, ExecutionStrategyRegistry
from agentlightning.trainer.runners import check_settings_are_used, replicas
from agentlightning.trainer.stores import check_shared, default_store, named_store
from agentlightning.types import Dataset, Hook, NamedResources
from agentlightning.utils.id import generate_id

logger = logging.getLogger(__name__)

_NO_SUCH_METHOD = {
    "train": "call fit(agent, train_dataset=...); it returns None and leaves the result in trainer.result",
    "configure": "give settings to the constructor, those of the algorithm as algorithm={'type': ..., ...}",
    "fit_v0": "the v0.1 protocol is not part of this release; call fit(agent, train_dataset=...)",
    "fit_v2": "call fit(agent, train_dataset=...)",
}


class Trainer:
    """Trains an agent: connects algorithm, runners, store and the rest, and runs them to an end.

    Every part may be given as an instance, a class, a factory, an import string, a dict with `type` and settings, or a
    short name where there is one. To build a part in another way, override its `_make_*` method.

    Args:
        algorithm: who learns; short names `baseline`, `grpo`. None makes `fit` serve runners only.
        n_runners: runner replicas; 1 by default.
        max_rollouts: rollouts per runner, after which it ends.
        initial_resources: handed to the algorithm before it runs.
        tracer: None is `OtelTracer()`.
        adapter: None is `TracerTraceToTriplet()`; a dict without `type` holds settings of that.
        store: None is a store in memory; also `"memory"`, `"sqlite:///run.db"`, `"http://host:4747"`.
        runner: None is `LitAgentRunner`, which takes `tracer`, `max_rollouts`, `reward_fn` and `policy_faults` from
            here; a dict without `type` holds further settings of that.
        strategy: where the parts run: `cs` (processes, the default) or `shm` (threads); also `execution_strategy`.
        port: of the store server of a client-server strategy.
        llm_proxy: the gateway; a dict without `type` holds its settings.
        hooks: called around every rollout.
        reward_fn: gives the reward for agents that return something else than a reward.
        policy_faults: exception classes of an agent that are the policy's fault, with the reward that each earns.
        n_workers, max_tasks, triplet_exporter, dev, daemon: deprecated.

    Raises:
        TypeError, ValueError: a setting is unknown, out of its range, or would have no effect; names it.
    """

    @refuse_unknown
    def __init__(
        self,
        *,
        algorithm: ComponentSpec[Algorithm] = None,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: ComponentSpec[Tracer] = None,
        adapter: ComponentSpec[TraceAdapter[Any]] = None,
        store: ComponentSpec[LightningStore] = None,
        runner: ComponentSpec[Runner[Any]] = None,
        strategy: ComponentSpec[ExecutionStrategy] = None,
        port: int | None = None,
        llm_proxy: ComponentSpec[LLMProxy] = None,
        hooks: Hook | Sequence[Hook] | None = None,
        dev: bool = False,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        triplet_exporter: ComponentSpec[TraceAdapter[Any]] = None,
        daemon: bool = True,
        execution_strategy: ComponentSpec[ExecutionStrategy] = None,
        reward_fn: Callable[..., Any] | None = None,
        policy_faults: dict[type[Exception], float] | None = None,
    ) -> None:
        self.worker_id: int | None = None
        self.result: Any = None
        """What the algorithm of the last `fit` or `dev` returned."""
        n_runners = resolve_alias("n_workers", n_workers, "n_runners", n_runners)
        max_rollouts = resolve_alias("max_tasks", max_tasks, "max_rollouts", max_rollouts)
        adapter = resolve_alias("triplet_exporter", triplet_exporter, "adapter", adapter)
        strategy = same_setting("strategy", strategy, "execution_strategy", execution_strategy)
        tell_of_old_settings(dev, daemon)
        collector_of()  # a collector that cannot be used is told of here, not by the first worker

        self.n_runners = 1 if n_runners is None else check_whole("n_runners", n_runners)
        self.max_rollouts = None if max_rollouts is None else check_whole("max_rollouts", max_rollouts)
        self.max_tasks = self.max_rollouts if max_tasks is None else max_tasks
        self.port = None if port is None else check_port("port", port)
        self.initial_resources = check_resources(initial_resources)
        self.daemon = daemon
        self.reward_fn = reward_fn
        self.policy_faults = policy_faults

        self.tracer = self._make_tracer(tracer)
        self.adapter = self._make_adapter(adapter)
        self.algorithm = self._make_algorithm(algorithm)
        self.strategy = self._make_strategy(strategy, n_runners=self.n_runners, port=self.port)
        self.store = self._make_store(store, self.strategy)
        check_shared(self.store, self.strategy)
        self._runner_spec, self._tracer_spec = runner, tracer
        self.runner = self._make_runner(runner)
        check_settings_are_used(self.runner, runner, self._runner_settings(), None if tracer is None else self.tracer)
        self.n_runners = self.n_workers = runner_count(self.strategy, self.n_runners, n_runners)
        self.llm_proxy = self._make_llm_proxy(llm_proxy, store=self.store)
        self.hooks = self._normalize_hooks(hooks)
        self.triplet_exporter = self.adapter

    def __getattr__(self, name: str) -> Any:
        if name in _NO_SUCH_METHOD:
            raise AttributeError(f"Trainer has no {name}(): {_NO_SUCH_METHOD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- what a user calls -------------------------------------------------------------------------------------------

    def fit(
        self,
        agent: LitAgent[Any] | Callable[..., Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Run the algorithm with runners that play `agent`, until the algorithm ends. Its result is in `result`.

        A plain function is made an agent by `rollout`. Without an algorithm it serves runners until interrupted.

        Raises:
            TypeError: the agent or a dataset is none.
            ValueError: something was given that only an algorithm could use, and there is none.
            KeyboardInterrupt: Ctrl+C; everything has been cleaned up.
            RunnerDiedError, StrandedWorkError: runners failed for good, or ended while work was open.
        """
        if self.algorithm is None:
            given = {"train_dataset": train_dataset, "val_dataset": val_dataset}
            given |= {"initial_resources": self.initial_resources, "llm_proxy": self.llm_proxy}
            check_nothing_needs_an_algorithm(given, self.strategy)
        self._execute(self.algorithm, as_agent(agent), train_dataset, val_dataset, self.initial_resources)

    def dev(
        self,
        agent: LitAgent[Any] | Callable[..., Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Try an agent quickly: as `fit`, but only with a `FastAlgorithm`; `Baseline` if there is none.

        Raises:
            TypeError: the algorithm is no `FastAlgorithm`.
            ValueError: the agent asks for resources and there are no `initial_resources`.
        """
        algorithm = Baseline() if self.algorithm is None else self.algorithm
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                "Trainer.dev() requires an algorithm that inherits from FastAlgorithm, such as agl.Baseline; "
                f"got {type(algorithm).__name__}. Call fit() to train with it."
            )
        agent, resources = as_agent(agent), self.initial_resources
        if resources is None and isinstance(algorithm, Baseline):
            if isinstance(agent, FunctionalLitAgent) and agent.needs_resources:
                raise ValueError(
                    "The agent asks for resources and nobody would publish any: "
                    "give the Trainer initial_resources={'main_llm': agl.LLM(...)}"
                )
            resources = {}
        self._execute(algorithm, agent, train_dataset, val_dataset, resources)

    # --- how parts are made: the places to override ------------------------------------------------------------------

    def _make_tracer(self, tracer: ComponentSpec[Tracer]) -> Tracer:
        return _made(build_component(tracer, expected_type=Tracer, spec_name="tracer", default_factory=OtelTracer))

    def _make_adapter(self, adapter: ComponentSpec[TraceAdapter[Any]]) -> TraceAdapter[Any]:
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
        name = short_name(algorithm)
        if name is not None and name in ABSENT_ALGORITHMS and name not in AlgorithmRegistry:
            raise ValueError(f"algorithm={name!r}: {ABSENT_ALGORITHMS[name]}")
        return build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True, registry=AlgorithmRegistry
        )

    def _make_strategy(
        self, strategy: ComponentSpec[ExecutionStrategy], *, n_runners: int, port: int | None = None
    ) -> ExecutionStrategy:
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
        if port is not None and getattr(made, "server_port", None) is None:
            logger.warning("port=%d has no effect: %s serves no store", port, type(made).__name__)
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
        settings = self._runner_settings()
        made = build_component(
            runner,
            expected_type=Runner,
            spec_name="runner",
            default_factory=lambda: LitAgentRunner[Any](self.tracer, **settings),
            optional_defaults={"tracer": lambda: self.tracer, **{k: _constant(v) for k, v in settings.items()}},
            dict_requires_type=False,
            dict_default_cls=LitAgentRunner,
        )
        return _made(made)

    def _make_llm_proxy(self, llm_proxy: ComponentSpec[LLMProxy], *, store: LightningStore) -> LLMProxy | None:
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

    # --- one run -----------------------------------------------------------------------------------------------------

    def _execute(
        self,
        algorithm: Algorithm | None,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        resources: NamedResources | None,
    ) -> None:
        check_dataset("train_dataset", train_dataset)
        check_dataset("val_dataset", val_dataset)
        agent.set_trainer(self)
        self.result = None
        run_id = self._run_id(algorithm)
        shared = self.strategy.runners_share_process and self.n_runners > 1
        runners = replicas(self.runner, self._build_runner, self.n_runners) if shared else (self.runner,)
        algorithm_side = AlgorithmSide(
            algorithm, self, self.adapter, resources, self.llm_proxy, train_dataset, val_dataset, run_id
        )
        runner_side = RunnerSide(agent, runners, self.hooks, run_id)
        returned = self.strategy.execute(algorithm_side, runner_side, self.store)
        self.result = returned if returned is not None else algorithm_side.result
        if self.strategy.interrupted:
            raise KeyboardInterrupt

    def _run_id(self, algorithm: Algorithm | None) -> str | None:
        """A run of its own for each fit; none where the other side is elsewhere, unless `AGL_RUN_ID` names it."""
        named = os.environ.get(LightningEnvVar.AGL_RUN_ID.value) or None
        alone = algorithm is not None and getattr(self.strategy, "role", "both") == "both"
        return named or (f"run-{generate_id(12)}" if alone else None)

    def _build_runner(self) -> Runner[Any] | None:
        """Return a runner like the first, with a tracer of its own; None where it was given as an instance."""
        if self._runner_spec is self.runner:
            return None
        twin, tracer = copy.copy(self), self._tracer_spec
        twin.tracer = copy.deepcopy(self.tracer) if tracer is self.tracer else self._make_tracer(tracer)
        return twin._make_runner(self._runner_spec)

    def _runner_settings(self) -> dict[str, Any]:
        given = {"max_rollouts": self.max_rollouts, "reward_fn": self.reward_fn, "policy_faults": self.policy_faults}
        return {name: value for name, value in given.items() if value is not None}


def _made(component: Any) -> Any:
    assert component is not None
    return component


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
