"""Trainer: builds the parts, puts them into bundles, and runs the bundles with a strategy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, cast, get_args

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Algorithm, ResultT
from agentlightning.base.process_secrets import server_token
from agentlightning.env_var import LightningEnvVar
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.litagent.decorator import FunctionalLitAgent, as_agent
from agentlightning.litagent.litagent import LitAgent
from agentlightning.logging import log_context
from agentlightning.runner.base import Runner
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.collector import collector_of
from agentlightning.trackers.tracker import Tracker
from agentlightning.trainer.arguments import (
    check_algorithm_uses,
    check_children_can_import,
    check_nothing_needs_an_algorithm,
    check_resources,
    check_rollout_config,
    check_run_id,
    refuse_unknown,
    resolve_alias,
    runner_count,
    same_setting,
    tell_of_old_settings,
)
from agentlightning.trainer.datasets import as_dataset
from agentlightning.trainer.follow import RunReport
from agentlightning.trainer.init_utils import ComponentSpec
from agentlightning.trainer.parts import check_serves, check_settings_are_used, check_shared, place_of, replicas
from agentlightning.trainer.shorthand import TrainerLegacy, TrainerShorthand
from agentlightning.training.progress import Style
from agentlightning.types import Dataset, Hook, NamedResources, RolloutConfig
from agentlightning.utils.concurrency.main_thread import outside_of_running_loop
from agentlightning.utils.id import generate_id
from agentlightning.utils.setting_checks import check_choice, check_count, check_port

if TYPE_CHECKING:
    from agentlightning.algorithm.evaluator import OnSample, SequentialStop
    from agentlightning.evaluation.result import EvaluationResult
    from agentlightning.evaluation.tasks import SliceBy
    from agentlightning.llm_proxy import LLMProxy

_NO_SUCH_METHOD = {
    "init": "fit() sets up and tears down every part; to use only a runner: runner.run_context(agent=..., store=...)",
    "init_worker": "fit() sets up every part; to use only a runner: runner.run_context(agent=..., store=...)",
    "teardown": "fit() tears down every part that it has started",
    "run": "call fit(agent, train_dataset=...)",
    "client": "pass the server's URL or agl.AgentLightningClient(url) to fit_v0",
    "fit_v2": "call fit(agent, train_dataset=...)",
    "execute_task": "the algorithm enqueues rollouts and runners execute them; for a single task: runner.step(task)",
    "record_span": "spans are recorded while an agent runs; to add others, call store.add_span(span)",
    "calculate_reward": "return the reward from the agent, or pass reward_fn to the constructor",
    "optimize_step": "steps belong to an algorithm: subclass agl.Algorithm, or decorate a function with @agl.algo",
    "update_resources": "algorithms publish resources: await store.update_resources(resources_id, resources)",
}


TrackerSpec: TypeAlias = ComponentSpec[Tracker]


class Trainer(TrainerShorthand, TrainerLegacy, Generic[ResultT]):
    """Trains an agent: it builds the algorithm, the runners, the store and the other parts, and runs them.

    Each part is an instance, a class, a factory, an import string, a dict with `type` and settings, or a short name if
    it has one. To build a part in another way, override its `_make_*` method.

    Args:
        algorithm: the learning algorithm; short names `apo`, `baseline`, `gepa`, `grpo`, `ppo`, `sft`, `tinker`, `trl`,
            `verl`. With None, `fit` only serves runners.
        n_runners: number of runners; 1 by default.
        max_rollouts: number of rollouts after which each runner ends; for smoke tests. Once all runners have ended,
            open rollouts are cancelled, and an algorithm that enqueues more is ended.
        initial_resources: resources by name that the algorithm gets before it runs.
        tracer: records the spans of an attempt; `OtelTracer()` by default.
        adapter: converts spans into training data; `TracerTraceToTriplet()` by default. A dict without `type` holds
            settings of the default.
        store: a store in memory by default; also `"memory"`, `"sqlite:///run.db"`, `"http://host:4747"`.
        runner: runs the agent; `LitAgentRunner` by default, which uses `tracer`, `max_rollouts`, `reward_fn`,
            `reward_dimensions` and `policy_faults` of this Trainer. A dict without `type` holds further settings of
            the default.
        strategy: where the parts run: `cs` (processes, the default), `shm` (threads) or `ray` (a Ray cluster).
        port: port of the store server of a client-server strategy.
        llm_proxy: the gateway; a dict without `type` holds its settings.
        hooks: called at the start and the end of each rollout and its trace.
        trackers: receive the records of a run: `"tensorboard"`, `"wandb"`, `"mlflow"`, `"swanlab"`, a dict with such a
            `type` and settings, your own objects (`agl.Tracker`), or a list of these.
        reward_fn: returns the reward for agents that do not return one.
        reward_dimensions: names of the rewards in a dict that an agent returns, starting with the one to learn from. By
            default, this is the reward named `reward` or `primary`.
        policy_faults: exception classes that count as failures of the policy if the agent raises them, and the reward
            for each.
        rollout_config: attempts, time limits and retries of every rollout: a `RolloutConfig` or a dict of its fields.
            An algorithm's own values for a rollout take precedence.
        run_id: name of the run. With the same name and the same durable store, `fit` resumes the run: it continues
            open rollouts and does not repeat ended ones. Without it, `AGL_RUN_ID` is the name; without both, every
            `fit` is a new run.
        progress: `auto` shows a live line and a final table on a terminal, and otherwise a summary in the log; also
            `live`, `plain` (only the summary) and `none`.
        dev: deprecated: call `trainer.dev(...)`.
        n_workers: deprecated, the old name of `n_runners`.
        max_tasks: deprecated, the old name of `max_rollouts`.
        triplet_exporter: deprecated, the old name of `adapter`.
        daemon: argument of v0.1 without effect.
        execution_strategy: another name for `strategy`.

    Raises:
        TypeError, ValueError: a setting is unknown, out of range, or would have no effect.
    """

    @refuse_unknown
    def __init__(
        self,
        *,
        algorithm: ComponentSpec[Algorithm[ResultT]] = None,
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
        reward_dimensions: Sequence[str] | None = None,
        policy_faults: dict[type[Exception], float] | None = None,
        rollout_config: RolloutConfig | Mapping[str, Any] | None = None,
        run_id: str | None = None,
        progress: Style = "auto",
        trackers: TrackerSpec | Sequence[TrackerSpec] = None,
    ) -> None:
        from agentlightning.runner.outcome import check_policy_faults
        from agentlightning.runner.results import check_dimensions, check_reward_fn

        self.worker_id: int | None = None
        self.result: ResultT = cast("ResultT", None)
        """The algorithm's return value in the last `fit` or `dev`; None before the first."""
        self._seen: set[str] = set()
        n_runners = resolve_alias("n_workers", n_workers, "n_runners", n_runners)
        max_rollouts = resolve_alias("max_tasks", max_tasks, "max_rollouts", max_rollouts)
        adapter = resolve_alias("triplet_exporter", triplet_exporter, "adapter", adapter)
        strategy = same_setting("strategy", strategy, "execution_strategy", execution_strategy)
        tell_of_old_settings(dev, daemon)
        server_token()  # removed from the environment before any process that would inherit it
        collector_of()  # report an unusable collector here, not in the first worker

        self.n_runners = 1 if n_runners is None else check_count("n_runners", n_runners)
        self.max_rollouts = None if max_rollouts is None else check_count("max_rollouts", max_rollouts)
        self.max_tasks = self.max_rollouts if max_tasks is None else max_tasks
        self.port = None if port is None else check_port("port", port)
        self.initial_resources = check_resources(initial_resources)
        self.daemon = daemon
        self.reward_fn = check_reward_fn(reward_fn)
        self.reward_dimensions = check_dimensions(reward_dimensions)
        self.policy_faults = None if policy_faults is None else check_policy_faults(policy_faults)
        self.rollout_config = check_rollout_config(rollout_config)
        self.run_id = check_run_id(run_id)
        self.progress: Style = check_choice("progress", progress, get_args(Style))

        self.tracer = self._make_tracer(tracer)
        self.adapter = self._make_adapter(adapter)
        self._adapter_spec = adapter
        self.algorithm = self._make_algorithm(algorithm)
        settings = {"adapter": adapter, "initial_resources": self.initial_resources or None}
        check_algorithm_uses(self.algorithm, settings, self.rollout_config, self.progress)
        self.strategy = self._make_strategy(strategy, n_runners=self.n_runners, port=self.port)
        self.store = self._make_store(store, self.strategy)
        check_shared(self.store, self.strategy)
        self._runner_spec, self._tracer_spec = runner, tracer
        self.runner = self._make_runner(runner)
        check_serves(self.runner)
        check_settings_are_used(self.runner, runner, self._runner_settings(), None if tracer is None else self.tracer)
        self.n_runners = self.n_workers = runner_count(self.strategy, self.n_runners, n_runners)
        self.llm_proxy = self._make_llm_proxy(llm_proxy, store=self.store)
        self.hooks = self._normalize_hooks(hooks)
        self.trackers = self._make_trackers(trackers)
        self.triplet_exporter = self.adapter

    def __getattr__(self, name: str) -> Any:
        if name in _NO_SUCH_METHOD:
            raise AttributeError(f"Trainer has no {name}(): {_NO_SUCH_METHOD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- public methods ----------------------------------------------------------------------------------------------

    def fit(
        self,
        agent: LitAgent[Any] | Callable[..., object],
        train_dataset: Dataset[Any] | Iterable[object] | None = None,
        *,
        val_dataset: Dataset[Any] | Iterable[object] | None = None,
        run_id: str | None = None,
    ) -> None:
        """Run the algorithm with runners that run `agent`, until the algorithm ends. Its result is in `result`.

        A plain function is converted by `rollout`. A dataset is a list, a data frame, an iterator, or an object with a
        length and items by index. `run_id` is the name of this run; None uses the constructor's. Without an algorithm,
        `fit` serves runners until interrupted. In a running event loop, as in a notebook, it blocks the loop.

        Raises:
            TypeError: the agent or a dataset has the wrong type.
            ValueError: without an algorithm, a setting is set that only an algorithm uses.
            KeyboardInterrupt: Ctrl+C was pressed; all parts have been cleaned up.
            RunnerDiedError, StrandedWorkError: runners failed permanently, or ended while rollouts were open.
        """
        if self.algorithm is None:
            settings = {"train_dataset": train_dataset, "val_dataset": val_dataset, "adapter": self._adapter_spec}
            settings |= {"initial_resources": self.initial_resources, "llm_proxy": self.llm_proxy}
            settings |= {"trackers": self.trackers or None}
            check_nothing_needs_an_algorithm({**settings, "rollout_config": self.rollout_config}, self.strategy)
        before, self.run_id = self.run_id, check_run_id(run_id) or self.run_id
        self.result = cast("ResultT", None)
        try:
            self.result = self._execute(
                self.algorithm,
                as_agent(agent),
                train_dataset,
                val_dataset,
                self.initial_resources,
                self._run_id(self.algorithm),
            )
        finally:
            self.run_id = before

    def dev(
        self,
        agent: LitAgent[Any] | Callable[..., object],
        train_dataset: Dataset[Any] | Iterable[object] | None = None,
        *,
        val_dataset: Dataset[Any] | Iterable[object] | None = None,
    ) -> None:
        """Try an agent quickly: like `fit`, but with a `FastAlgorithm` only; `Baseline` by default.

        Raises:
            TypeError: the algorithm is not a `FastAlgorithm`.
            ValueError: the agent requires resources and `initial_resources` is not set.
        """
        from agentlightning.algorithm.fast import Baseline, FastAlgorithm

        algorithm: Algorithm[Any] = Baseline() if self.algorithm is None else self.algorithm
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                "Trainer.dev() requires an algorithm that inherits from FastAlgorithm, such as agl.Baseline; "
                f"got {type(algorithm).__name__}. Call fit() to train with it."
            )
        agent, resources = as_agent(agent), self.initial_resources
        if resources is None and isinstance(algorithm, Baseline):
            _check_needs_no_resources(agent, "set initial_resources={} of the Trainer")
            resources = {}
        self.result = cast("ResultT", None)
        self.result = self._execute(algorithm, agent, train_dataset, val_dataset, resources, self._run_id(algorithm))

    def evaluate(
        self,
        agent: LitAgent[Any] | Callable[..., object],
        dataset: Dataset[Any] | Iterable[object],
        *,
        n_samples: int = 1,
        resources: NamedResources | None = None,
        slices: SliceBy | Sequence[SliceBy] | None = None,
        stop_early: SequentialStop | None = None,
        on_sample: OnSample | None = None,
    ) -> EvaluationResult:
        """Run every task `n_samples` times without learning, and return rewards, outcomes and durations.

        `resources` are passed to the agent; None uses `initial_resources`. The rollouts have the mode `val`. If this
        process has both roles, they belong to a separate run, and the result is recorded there as the evaluation
        `evaluation`. To compare two results on the same tasks, call `before.compare(after)`. A process with the role
        `runner` serves the evaluation and returns an empty result.

        `slices` is a field of the tasks (`"meta.difficulty"` is nested), a function of a task, or a list of these; the
        result is split by their values. `stop_early` ends the evaluation once its sequential test is decided.
        `on_sample(task, sample)` is called when a sample has ended, while others still run.

        Raises:
            TypeError: the agent, the dataset, the resources, the slices or `stop_early` have the wrong type.
            ValueError: the agent requires resources and none are set; the dataset is empty; a slice does not apply to
                the tasks; the baseline of `stop_early` has other tasks.
            KeyboardInterrupt, RunnerDiedError, StrandedWorkError: as in `fit`.
        """
        from agentlightning.algorithm.evaluator import Evaluator, check_baseline
        from agentlightning.evaluation.result import EvaluationResult
        from agentlightning.evaluation.tasks import slices_of

        n_samples, agent = check_count("n_samples", n_samples), as_agent(agent)
        tasks = as_dataset("dataset", dataset)
        if tasks is None or len(tasks) == 0:
            raise ValueError("an evaluation needs tasks; the dataset is empty")
        each = [tasks[index] for index in range(len(tasks))] if slices is not None or stop_early is not None else []
        if stop_early is not None:
            check_baseline(stop_early, each)
        evaluator = Evaluator(n_samples, slices_of(each, slices), stop_early, on_sample)
        provided = self.initial_resources if resources is None else check_resources(resources, "resources")
        if provided is None:
            _check_needs_no_resources(agent, "pass resources={} to evaluate()")
        result = self._execute(evaluator, agent, None, tasks, provided or {}, self._run_id(evaluator, "evaluation"))
        if not isinstance(result, EvaluationResult):
            return EvaluationResult()
        return replace(result, place=place_of(self.store))

    # --- one run -----------------------------------------------------------------------------------------------------

    def _execute(
        self,
        algorithm: Algorithm | None,
        agent: LitAgent[Any],
        train_dataset: object,
        val_dataset: object,
        resources: NamedResources | None,
        run_id: str | None,
    ) -> Any:
        from agentlightning.algorithm.evaluator import Evaluator
        from agentlightning.trainer.bundles import AlgorithmSide, RunnerSide, settings_of

        train, val = None, None
        if getattr(self.strategy, "role", "both") != "runner":  # a runner process does not use them
            train, val = as_dataset("train_dataset", train_dataset), as_dataset("val_dataset", val_dataset)
        agent.set_trainer(self)
        runners = replicas(self.runner, self._build_runner, self.n_runners, self.strategy.runners_share_process)
        algorithm_side = AlgorithmSide(
            algorithm=algorithm,
            trainer=self,
            adapter=self.adapter,
            initial_resources=resources,
            llm_proxy=self.llm_proxy,
            train_dataset=train,
            val_dataset=val,
            trackers=self.trackers,
            run_id=run_id,
            rollout_config=self.rollout_config,
            report=RunReport(f"run {run_id}" if run_id else "the run", place_of(self.store)),
            progress=self.progress,
            seen=self._seen if run_id == self._name() and not isinstance(algorithm, Evaluator) else None,
            config=settings_of(self, agent, train, val),
        )
        runner_side = RunnerSide(agent, runners, self.hooks, run_id)
        algorithm_side.store_unreachable_timeout = runner_side.store_unreachable_timeout
        check_children_can_import(getattr(self.strategy, "start_method", None), runner_side, algorithm)
        with log_context(run_id=run_id), outside_of_running_loop():
            returned = self.strategy.execute(algorithm_side, runner_side, self.store)
        if self.strategy.interrupted or algorithm_side.interrupted:
            raise KeyboardInterrupt
        return returned if returned is not None else algorithm_side.result

    def _name(self) -> str | None:
        """Return the user's name for the run."""
        return self.run_id or os.environ.get(LightningEnvVar.AGL_RUN_ID.value) or None

    def _run_id(self, algorithm: Algorithm | None, purpose: str | None = None) -> str | None:
        """Return the next run's id: a new one without a name; None if another process has, or may have, the other side.

        With a `purpose`, it is the id of a separate run, so that neither this run nor the named run resumes the other.
        """
        name = self._name()
        elsewhere = getattr(self.strategy, "role", "both") != "both" or getattr(self.strategy, "may_be_joined", False)
        if algorithm is None or elsewhere:
            return name
        if purpose is not None:
            return f"{name or purpose}-{generate_id(12)}"
        return name or f"run-{generate_id(12)}"

    def _build_runner(self) -> Runner[Any] | None:
        """Return a runner like the first, with its own tracer; None if the user passed an instance."""
        if self._runner_spec is self.runner:
            return None
        twin, tracer = copy.copy(self), self._tracer_spec
        twin.tracer = copy.deepcopy(self.tracer) if tracer is self.tracer else self._make_tracer(tracer)
        return twin._make_runner(self._runner_spec)


def _check_needs_no_resources(agent: LitAgent[Any], way_out: str) -> None:
    if isinstance(agent, FunctionalLitAgent) and agent.needs_resources:
        example = way_out.format(agent.example_resources)
        raise ValueError(f"The agent requires resources, but none would be published: {example}")
