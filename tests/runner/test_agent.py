"""One task at once: `step`, and the context in which a runner is ready."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.litagent import LitAgent, llm_rollout, rollout
from agentlightning.runner import LitAgentRunner, Runner
from agentlightning.runner.agent import serving
from agentlightning.runner.outcome import Ending, MissingResources
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import LLM, AttemptedRollout
from tests.stubs.running import runner_of


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
    ("agent", "error", "message"),
    [
        (rollout(lambda task: 1 / 0), ZeroDivisionError, "division by zero"),
        (rollout(lambda task: "text"), TypeError, "Invalid raw result type"),
        (Needs(), MissingResources, "Failed to fetch resources"),
        (Needs(), RuntimeError, "Failed to fetch resources"),
    ],
)
async def test_step_raises_what_went_wrong_after_it_was_recorded(
    store: InMemoryLightningStore, agent: Any, error: Any, message: str
) -> None:
    with runner_of().run_context(agent=agent, store=store) as runner:
        for task in "xy":
            with pytest.raises(error, match=message):
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
        assert (runner.store, runner.worker_id) == (store, 0)
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
    assert "Exception during teardown of runner" in caplog.text


async def test_what_happens_around_a_rollout_may_be_overridden(store: InMemoryLightningStore) -> None:
    endings: list[Ending] = []

    class Watching(LitAgentRunner[Any]):
        async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
            endings.append(await super()._execute_rollout(rollout))
            return endings[-1]

    with Watching(OtelTracer()).run_context(agent=rollout(lambda task: 1.0), store=store) as runner:
        await runner.step("x")
    assert [ending.outcome for ending in endings] == ["scored"]


TASKS = [0.25, 0.75]


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@agl.rollout
def agent(task: float) -> float:
    return task


class Counting(Runner[Any]):
    """A subclass of the base class that has nothing but `execute`."""

    async def execute(self, task: AttemptedRollout) -> Any:
        print(f"executes {task.rollout_id} as worker {self.worker_id}")
        return await super().execute(task)


class CountingAll(LitAgentRunner[Any]):
    """The same on the runner that there is."""

    async def execute(self, task: AttemptedRollout) -> Any:
        print(f"executes {task.rollout_id} as worker {self.worker_id}")
        return await super().execute(task)


SPECS: dict[str, Any] = {
    "class": Counting,
    "path": f"{__name__}.Counting",
    "dict": {"type": Counting, "poll_interval": 0.1},
    "dict of a path": {"type": f"{__name__}.Counting"},
    "subclass of LitAgentRunner": CountingAll,
    "instance of that": CountingAll(OtelTracer()),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_execute_is_called_for_each_rollout(spec: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = agl.Trainer(runner=spec, strategy="shm", n_runners=2, algorithm="baseline", initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == TASKS
    assert capfd.readouterr().out.count("executes ro-") == 2


class WithState(Counting):
    """One with a constructor of its own, as one writes it above `Runner`."""

    def __init__(self) -> None:
        super().__init__()
        self.executed: list[str] = []

    async def execute(self, task: AttemptedRollout) -> Any:
        self.executed.append(task.rollout_id)
        return await super().execute(task)


def test_a_constructor_of_its_own_may_know_nothing_of_a_tracer() -> None:
    trainer = agl.Trainer(runner=WithState, strategy="shm", algorithm="baseline", initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == TASKS
    with pytest.raises((TypeError, ValueError), match="tracer"):
        agl.Trainer(runner=WithState, tracer=OtelTracer())


def test_the_runner_is_one_of_the_class_that_was_given() -> None:
    runner = agl.Trainer(runner=Counting, max_rollouts=3).runner
    assert isinstance(runner, Counting)
    assert isinstance(runner, LitAgentRunner)
    assert type(runner).__name__ == "Counting"
    assert serving(CountingAll) is CountingAll


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_execute_is_called_in_processes(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = {"type": "cs", "n_runners": 2, "server_port": 0, "start_method": method}
    trainer = agl.Trainer(runner=Counting, strategy=strategy, algorithm="baseline", initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == TASKS
    assert capfd.readouterr().out.count("executes ro-") == 2


def test_a_runner_of_such_a_class_is_pickled() -> None:
    runner = agl.Trainer(runner=Counting, max_rollouts=3).runner
    again = pickle.loads(pickle.dumps(runner))
    assert type(again) is type(runner)
    assert again._max_rollouts == 3


async def test_step_runs_by_execute_too(store: InMemoryLightningStore, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Counting)(OtelTracer()).run_context(agent=agent, store=store) as runner:  # type: ignore[call-arg]
        assert (await runner.step(0.5)).status == "succeeded"
    assert "executes ro-" in capfd.readouterr().out


async def test_an_exception_in_execute_is_the_end_of_that_attempt_and_the_runner_goes_on(
    store: InMemoryLightningStore,
) -> None:
    class Failing(Runner[Any]):
        async def execute(self, task: AttemptedRollout) -> Any:
            if task.input < 0:
                raise LookupError(f"no such task: {task.input}")
            return await super().execute(task)

    queued = [await store.enqueue_rollout(task) for task in (-1.0, 0.5)]
    with serving(Failing)(OtelTracer()).run_context(agent=agent, store=store) as runner:  # type: ignore[call-arg]
        await runner.iter(exit_when_idle=0.1)  # type: ignore[call-arg]
    ended = [await store.get_latest_attempt(rollout.rollout_id) for rollout in queued]
    assert [attempt and attempt.outcome for attempt in ended] == ["infrastructure_fault", "scored"]
    assert ended[0] is not None
    assert ended[0].error is not None
    assert (ended[0].error.type, ended[0].error.message) == ("LookupError", "no such task: -1.0")


async def test_a_rollout_may_be_ended_by_what_overrides_it(store: InMemoryLightningStore) -> None:
    class Refusing(LitAgentRunner[Any]):
        async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
            ids = (rollout.rollout_id, rollout.attempt.attempt_id)
            await self.get_store().update_attempt(*ids, status="failed", outcome="cancelled", outcome_reason="refused")
            return Ending("failed", "cancelled", "refused")

    with Refusing(OtelTracer()).run_context(agent=agent, store=store) as runner:
        assert (await runner.step(0.5)).status == "failed"
    [rollout] = (await store.query_rollouts()).items
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert (attempt.outcome, attempt.outcome_reason) == ("cancelled", "refused")


async def test_an_execute_that_runs_nothing_is_told_what_to_write(store: InMemoryLightningStore) -> None:
    class Forgetting(Runner[Any]):
        async def execute(self, task: AttemptedRollout) -> Any:
            return 1.0

    runner = serving(Forgetting)(OtelTracer())  # type: ignore[call-arg]
    message = r"Forgetting.execute returned .* call: return await super\(\).execute"
    with runner.run_context(agent=agent, store=store), pytest.raises(RuntimeError, match=message):
        await runner.step(0.5)
    [rollout] = (await store.query_rollouts()).items
    assert rollout.status == "failed"


async def test_an_exception_after_the_rollout_has_ended_is_raised(store: InMemoryLightningStore) -> None:
    class FailingLate(Runner[Any]):
        async def execute(self, task: AttemptedRollout) -> Any:
            await super().execute(task)
            raise LookupError("too late")

    runner = serving(FailingLate)(OtelTracer())  # type: ignore[call-arg]
    with runner.run_context(agent=agent, store=store), pytest.raises(LookupError, match="too late"):
        await runner.step(0.5)
    [rollout] = (await store.query_rollouts()).items
    assert rollout.status == "succeeded"


def test_an_object_of_such_a_class_is_told_to_give_the_class() -> None:
    with pytest.raises(TypeError, match="Pass the class itself, runner=Counting"):
        agl.Trainer(runner=Counting())
    with pytest.raises(NotImplementedError, match="runner=Counting"):
        next(Runner.execute(Counting(), None).__await__())  # type: ignore[arg-type]
