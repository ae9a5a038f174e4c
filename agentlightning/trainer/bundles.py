"""The two bundles of a fit: everything a side needs but the store, in one object that can be sent to a process."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentlightning.adapter.base import TraceAdapter
from agentlightning.algorithm.base import Algorithm
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.supervise import until_set
from agentlightning.execution.threads import call_in_thread
from agentlightning.litagent.litagent import LitAgent
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner.base import Runner
from agentlightning.store.base import LightningStore
from agentlightning.store.complete import complete
from agentlightning.store.scoped import LightningStoreScoped
from agentlightning.types import Dataset, Hook, NamedResources

if TYPE_CHECKING:
    from agentlightning.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

EVENT_POLL_SECONDS = 0.1


def scoped(store: LightningStore, run_id: str | None) -> LightningStore:
    """Return the store as a run sees it, with the whole contract; without a run, all of it."""
    return complete(store) if run_id is None else LightningStoreScoped(store, run_id)


@dataclass
class AlgorithmSide:
    """The algorithm with what it is given. Calling it binds the parts, runs it and returns its result."""

    algorithm: Algorithm | None
    trainer: Trainer | None
    adapter: TraceAdapter[Any]
    initial_resources: NamedResources | None
    llm_proxy: LLMProxy | None
    train_dataset: Dataset[Any] | None
    val_dataset: Dataset[Any] | None
    run_id: str | None
    result: Any = field(default=None, init=False)
    """What the algorithm returned, if it ran in this process."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the trainer behind: it belongs to the process that called `fit`."""
        return {**self.__dict__, "trainer": None}

    def scope(self, store: LightningStore) -> LightningStore:
        """Return the view of the store that holds only this run."""
        return scoped(store, self.run_id)

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Run the algorithm; without one, wait for the event. A synchronous one runs on a thread of its own."""
        if self.algorithm is None:
            await until_set(event, EVENT_POLL_SECONDS)
            return None
        self._bind(self.algorithm, self.scope(store))
        datasets = {"train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        if self.algorithm.is_async():
            self.result = await self.algorithm.run(**datasets)
            return self.result
        run = self.algorithm.run
        result = await call_in_thread(lambda: run(**datasets), name="algorithm")
        self.result = await result if inspect.isawaitable(result) else result
        return self.result

    def _bind(self, algorithm: Algorithm, store: LightningStore) -> None:
        if self.trainer is not None:
            algorithm.set_trainer(self.trainer)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources is not None:
            algorithm.set_initial_resources(self.initial_resources)
        if self.llm_proxy is not None:
            self.llm_proxy.set_store(store)
            algorithm.set_llm_proxy(self.llm_proxy)


@dataclass
class RunnerSide:
    """The agent with the runner of each worker. Calling it serves rollouts as one worker."""

    agent: LitAgent[Any]
    runners: tuple[Runner[Any], ...]
    """One for each worker that shares a process with others; else one, of which each process has its own copy."""
    hooks: tuple[Hook, ...]
    run_id: str | None

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        """Serve until the event; what was initialised is torn down in reverse order, whatever happens."""
        runner = self.runners[worker_id % len(self.runners)]
        runner.init(agent=self.agent, hooks=self.hooks)
        try:
            runner.init_worker(worker_id, scoped(store, self.run_id))
            try:
                await runner.iter(event=event)
            finally:
                _quietly("runner worker", lambda: runner.teardown_worker(worker_id))
        finally:
            _quietly("runner", runner.teardown)


def _quietly(what: str, teardown: Any) -> None:
    try:
        teardown()
    except Exception:  # the work is done, or its own error is on its way: this one is only told
        logger.exception("Error during %s teardown", what)
