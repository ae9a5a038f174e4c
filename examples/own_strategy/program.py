"""Custom strategies: one that runs everything on one event loop, for a debugger; and one that chooses another."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from typing import Any

import agentlightning as agl
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle


class OneLoop(agl.ExecutionStrategy):
    """Runs algorithm and runners as tasks of one event loop: one thread, so a breakpoint stops everything."""

    runners_share_process = True

    def __init__(self, n_runners: int = 1) -> None:
        self.n_runners = n_runners

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: agl.LightningStore) -> Any:
        return asyncio.run(self._conduct(algorithm, runner, store))

    async def _conduct(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: agl.LightningStore) -> Any:
        event = agl.ThreadingEvent()
        runners = [asyncio.ensure_future(runner(store, index, event)) for index in range(self.n_runners)]
        work = asyncio.ensure_future(algorithm(store, event))
        try:
            await asyncio.wait([work, *runners], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # a runner ended first: nothing would run the rest of the queue
                work.cancel()
                await asyncio.gather(*runners)  # raises its exception
                raise agl.RunnerDiedError("the runners ended before the algorithm")
            return await work
        finally:
            event.set()
            for task in (work, *runners):
                task.cancel()
            await asyncio.gather(work, *runners, return_exceptions=True)


class ByEnvironment(agl.ExecutionStrategy):
    """Runs on one loop if `DEBUG` is set, otherwise with a process for each runner."""

    def __init__(self, n_runners: int = 2) -> None:
        self.n_runners = n_runners

    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: agl.LightningStore) -> Any:
        chosen = OneLoop if os.environ.get("DEBUG") else agl.ClientServerExecutionStrategy
        return chosen(n_runners=self.n_runners).execute(algorithm, runner, store)


@agl.rollout
async def where(task: str) -> float:
    main = threading.current_thread() is threading.main_thread()
    child = multiprocessing.parent_process() is not None
    print(f"{task}: {'a child' if child else 'this'} process, {'main' if main else 'another'} thread", flush=True)
    return 1.0


def main() -> None:
    for strategy in (OneLoop(n_runners=2), ByEnvironment(n_runners=1)):
        print(type(strategy).__name__, flush=True)
        trainer = agl.Trainer(algorithm="baseline", strategy=strategy, initial_resources={})
        trainer.fit(where, train_dataset=["first", "second"])
        print("rewards:", trainer.result.rewards)


if __name__ == "__main__":
    main()
