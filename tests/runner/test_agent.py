"""One task, now: `step`, and the context in which a runner is ready."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agentlightning.litagent import LitAgent, llm_rollout, rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.outcome import Ending, MissingResources
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import LLM, AttemptedRollout
from tests.runner.serving import runner_of


async def test_step_runs_a_task_and_returns_its_rollout(store: InMemoryLightningStore) -> None:
    with runner_of().run_context(agent=rollout(lambda task: 0.5), store=store) as runner:
        finished = await runner.step("x", mode="val")
    assert isinstance(finished, AttemptedRollout)
    assert (finished.status, finished.mode, finished.attempt.outcome) == ("succeeded", "val", "scored")
    assert [worker.worker_id for worker in await store.query_workers()] == [finished.attempt.worker_id]


async def test_step_publishes_the_resources_it_is_given(store: InMemoryLightningStore) -> None:
    runner = runner_of()
    agent = llm_rollout(lambda task, llm: float(llm.model == "m"))
    with runner.run_context(agent=agent, store=store):
        finished = await runner.step("x", resources={"main": LLM(endpoint="http://x", model="m")})
    latest = await store.get_latest_resources()
    assert latest is not None
    assert finished.resources_id == latest.resources_id
    assert finished.status == "succeeded"


class Needs(LitAgent[str]):
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("agent", "error", "said"),
    [
        (rollout(lambda task: 1 / 0), ZeroDivisionError, "division by zero"),
        (rollout(lambda task: "text"), TypeError, "Invalid raw result type"),
        (Needs(), MissingResources, "Failed to fetch resources"),
        (Needs(), RuntimeError, "Failed to fetch resources"),
    ],
)
async def test_step_raises_what_went_wrong_after_it_was_recorded(
    store: InMemoryLightningStore, agent: Any, error: Any, said: str
) -> None:
    with runner_of().run_context(agent=agent, store=store) as runner:
        for task in "xy":
            with pytest.raises(error, match=said):
                await runner.step(task)
    assert [one.status for one in await store.query_rollouts()] == ["failed", "failed"]


async def test_the_stop_event_cancels_a_step(store: InMemoryLightningStore) -> None:
    event = threading.Event()

    @rollout
    async def agent(task: str) -> float:
        event.set()
        await asyncio.Event().wait()
        return 1.0

    runner = runner_of()
    with runner.run_context(agent=agent, store=store):
        finished = await asyncio.wait_for(runner.step("x", event=event), 10)
    assert isinstance(finished, AttemptedRollout)
    assert (finished.attempt.status, finished.attempt.outcome) == ("failed", "cancelled")


async def test_the_context_is_also_an_async_one(store: InMemoryLightningStore) -> None:
    async with runner_of().run_context(agent=rollout(lambda task: 1.0), store=store) as runner:
        assert runner.agent.get_runner() is runner
        assert (await runner.step("x")).status == "succeeded"
    with pytest.raises(ValueError, match="Call init"):
        runner.get_agent()


class Unlucky(LitAgentRunner[Any]):
    """Fails in one step of its life, and notes the others."""

    def __init__(self, failing: str) -> None:
        super().__init__(OtelTracer())
        self.failing, self.life = failing, list[str]()

    def _note(self, step: str) -> None:
        self.life.append(step)
        if step == self.failing:
            raise RuntimeError(step)

    def init(self, *args: Any, **kwargs: Any) -> None:
        self._note("init")
        super().init(*args, **kwargs)

    def init_worker(self, *args: Any, **kwargs: Any) -> None:
        self._note("init_worker")
        super().init_worker(*args, **kwargs)

    def teardown_worker(self, *args: Any, **kwargs: Any) -> None:
        self._note("teardown_worker")
        super().teardown_worker(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self._note("teardown")
        super().teardown(*args, **kwargs)


@pytest.mark.parametrize(
    ("failing", "life"),
    [
        ("init", ["init"]),
        ("init_worker", ["init", "init_worker", "teardown"]),
    ],
)
def test_only_what_was_initialised_is_torn_down(store: InMemoryLightningStore, failing: str, life: list[str]) -> None:
    runner = Unlucky(failing)
    with pytest.raises(RuntimeError, match=failing), runner.run_context(agent=rollout(lambda task: 1.0), store=store):
        pass
    assert runner.life == life


@pytest.mark.parametrize("failing", ["teardown_worker", "teardown"])
def test_an_unclean_end_is_logged_and_not_raised(
    store: InMemoryLightningStore, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Unlucky(failing)
    with runner.run_context(agent=rollout(lambda task: 1.0), store=store):
        pass
    assert runner.life == ["init", "init_worker", "teardown_worker", "teardown"]
    assert "Error during runner" in caplog.text


async def test_what_happens_around_a_rollout_may_be_overridden(store: InMemoryLightningStore) -> None:
    endings: list[Ending] = []

    class Watching(LitAgentRunner[Any]):
        async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
            endings.append(await super()._execute_rollout(rollout))
            return endings[-1]

    with Watching(OtelTracer()).run_context(agent=rollout(lambda task: 1.0), store=store) as runner:
        await runner.step("x")
    assert [ending.outcome for ending in endings] == ["scored"]
