"""`fit` and `dev` with the real parts: what goes in, what comes back, and how a run ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import NoScoredRolloutError
from agentlightning.execution import supervisor
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, Dataset, EnqueueRolloutRequest
from tests.trainer.parts import run_tasks, tenth

STRATEGIES: dict[str, dict[str, Any]] = {
    "shm, one runner": {"strategy": "shm"},
    "shm, three runners": {"strategy": "shm", "n_runners": 3},
    "cs, two runners": {"strategy": {"type": "cs", "server_port": 0}, "n_runners": 2},
    "cs, spawned": {"strategy": {"type": "cs", "server_port": 0, "start_method": "spawn"}},
    "cs, runner here": {"strategy": {"type": "cs", "server_port": 0, "main_process": "runner"}},
}


@pytest.mark.parametrize("where", STRATEGIES)
def test_fit_runs_every_task_and_keeps_what_the_algorithm_returned(where: str) -> None:
    trainer = agl.Trainer(algorithm=run_tasks, **STRATEGIES[where])
    assert trainer.fit(tenth, train_dataset=[1, 2, 3, 4]) is None
    assert [status for status, _ in trainer.result] == ["succeeded"] * 4
    here = {pid == os.getpid() for _, pid in trainer.result}
    assert here == {where.startswith("shm") or where == "cs, runner here"}


@pytest.mark.parametrize("agent", [7, agl.LitAgent, "http://127.0.0.1:4747"])
def test_what_is_no_agent_is_refused(agent: Any) -> None:
    with pytest.raises(TypeError, match="An agent must be a LitAgent, a function"):
        agl.Trainer(algorithm="baseline", strategy="shm").fit(agent, train_dataset=[1])


@pytest.mark.parametrize("dataset", ["http://127.0.0.1:8000", 7, {1, 2}])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(TypeError, match="train_dataset must"):
        agl.Trainer(algorithm="baseline", strategy="shm").fit(tenth, train_dataset=dataset)


@pytest.mark.parametrize(
    ("settings", "datasets", "name"),
    [
        ({}, {"train_dataset": [1]}, "train_dataset"),
        ({}, {"val_dataset": [1]}, "val_dataset"),
        ({"initial_resources": {}}, {}, "initial_resources"),
        ({"llm_proxy": agl.LLMProxy}, {}, "llm_proxy"),
        ({"adapter": agl.LlmProxyTraceToTriplet}, {}, "adapter"),
        ({"rollout_config": {"timeout_seconds": 9.0}}, {}, "rollout_config"),
    ],
)
def test_what_only_an_algorithm_could_use_is_refused_without_one(
    settings: dict[str, Any], datasets: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} would have no effect without an algorithm"):
        agl.Trainer(**settings).fit(tenth, **datasets)


# --- algorithms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_a_synchronous_algorithm_runs_beside_the_loop_and_may_block(strategy: Any) -> None:
    class Blocking(agl.Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> tuple[str, list[str]]:
            done = asyncio.run(self.enqueue_and_wait(train_dataset))
            return threading.current_thread().name, done

        async def enqueue_and_wait(self, tasks: list[int]) -> list[str]:
            store = self.get_store()
            await store.add_resources({})
            rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task) for task in tasks])
            ids = [rollout.rollout_id for rollout in rollouts]
            return [r.status for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=30)]

    trainer = agl.Trainer(algorithm=Blocking(), strategy=strategy)
    trainer.fit(tenth, train_dataset=[1, 2])
    assert trainer.result == ("algorithm", ["succeeded"] * 2)


def test_an_algorithm_is_given_every_part() -> None:
    parts: dict[str, Any] = {}

    @agl.algo
    async def algorithm(*, store, adapter, llm_proxy, initial_resources, train_dataset, val_dataset, trainer) -> None:
        parts.update(locals())

    resources: dict[str, Any] = {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")}
    proxy = agl.LLMProxy()
    trainer = agl.Trainer(algorithm=algorithm, llm_proxy=proxy, initial_resources=resources, strategy="shm")
    trainer.fit(tenth, train_dataset=[1], val_dataset=[2])
    assert (parts["train_dataset"], parts["val_dataset"], parts["initial_resources"]) == ([1], [2], resources)
    assert (parts["adapter"], parts["llm_proxy"], parts["trainer"]) == (trainer.adapter, proxy, trainer)
    assert parts["store"] is proxy.get_store()


@pytest.mark.parametrize("where", ["shm, one runner", "shm, three runners", "cs, two runners"])
def test_what_the_algorithm_raises_comes_out_of_fit_which_leaves_no_result(where: str) -> None:
    @agl.algo
    def broken() -> None:
        raise OverflowError("too much")

    trainer = agl.Trainer(algorithm=run_tasks, **STRATEGIES[where])
    trainer.fit(tenth, train_dataset=[1])
    trainer.algorithm = broken
    with pytest.raises(OverflowError, match="too much"):
        trainer.fit(tenth)
    assert trainer.result is None


def test_every_fit_is_a_run_of_its_own_on_a_store_that_stays(tmp_path: Path) -> None:
    store = agl.SQLiteLightningStore(tmp_path / "run.db")
    for _ in range(2):
        agl.Trainer(algorithm=run_tasks, store=store, strategy="shm").fit(tenth, train_dataset=[1, 2])

    async def runs() -> list[str | None]:
        try:
            return [rollout.run_id for rollout in await store.query_rollouts()]
        finally:
            await store.close()

    run_ids = asyncio.run(runs())
    assert len(run_ids) == 4
    assert len(set(run_ids)) == 2
    assert None not in run_ids


async def test_two_runs_on_one_store_do_not_see_each_other(server: agl.LightningStoreServer) -> None:
    def run(endpoint: str, sign: int) -> list[Any]:
        @agl.algo
        async def algorithm(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
            try:
                await store.add_resources({})
                rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
                ids = [rollout.rollout_id for rollout in rollouts]
                await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
                return [agl.find_final_reward(list(await store.query_spans(rollout_id))) for rollout_id in ids]
            finally:
                await client.close()

        def agent(task: int) -> float:
            return float(sign * task)

        client = agl.LightningStoreClient(endpoint)
        strategy = {"type": "cs", "managed_store": False}
        trainer = agl.Trainer(algorithm=algorithm, store=client, strategy=strategy)
        trainer.fit(agent, train_dataset=list(range(1, 9)))
        return trainer.result

    one, other = await asyncio.gather(*(asyncio.to_thread(run, server.endpoint, sign) for sign in (1, -1)))
    assert one == [float(task) for task in range(1, 9)]
    assert other == [-reward for reward in one]


# --- runners --------------------------------------------------------------------------------------------------------


def test_runners_of_one_process_have_a_runner_and_a_tracer_each() -> None:
    pairs: dict[str, tuple[Any, Any]] = {}
    together = threading.Barrier(3, timeout=20)

    @agl.rollout
    def agent(task: int, rollout: AttemptedRollout) -> float:
        together.wait()
        tracer = agl.get_active_tracer()
        agl.emit_annotation({"task": task})
        pairs[rollout.attempt.worker_id or ""] = (tracer, threading.current_thread())
        return 1.0

    @agl.algo
    async def algorithm(*, store: LightningStore, train_dataset: Dataset[int]) -> list[list[int]]:
        await store.add_resources({})
        rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=30)
        spans = [await store.query_spans(r.rollout_id) for r in rollouts]
        return [[s.attributes["task"] for s in group if "task" in s.attributes] for group in spans]

    for runner in ({}, {"runner": agl.LitAgentRunner(agl.OtelTracer())}):
        pairs.clear()
        trainer = agl.Trainer(algorithm=algorithm, strategy="shm", n_runners=3, **runner)
        trainer.fit(agent, train_dataset=[1, 2, 3])
        assert trainer.result == [[1], [2], [3]]
        assert len(pairs) == len({id(tracer) for tracer, _ in pairs.values()}) == 3


def test_a_runner_that_cannot_be_copied_is_explained() -> None:
    class Locked(agl.LitAgentRunner[Any]):
        def __init__(self) -> None:
            super().__init__(agl.OtelTracer())
            self.lock = threading.Lock()

    with pytest.raises(TypeError, match=r"Locked cannot be copied .* Pass a class, a factory or a dict"):
        agl.Trainer(algorithm=run_tasks, runner=Locked(), strategy="shm", n_runners=2).fit(tenth, train_dataset=[1])
    agl.Trainer(algorithm=run_tasks, runner=Locked, strategy="shm", n_runners=2).fit(tenth, train_dataset=[1])


def test_hooks_reward_fn_and_policy_faults_reach_the_runner() -> None:
    class Count(agl.Hook):
        ended = 0

        async def on_rollout_end(self, *, rollout: AttemptedRollout, **_: Any) -> None:
            Count.ended += 1

    @agl.rollout
    def agent(task: str) -> Any:
        if task == "bad":
            raise KeyError(task)
        return task

    trainer = agl.Trainer(
        algorithm="baseline",
        strategy="shm",
        initial_resources={},
        hooks=Count(),
        reward_fn=lambda output, task: float(len(output)),
        policy_faults={KeyError: -1.0},
    )
    trainer.fit(agent, train_dataset=["four", "bad"])
    assert Count.ended == 2
    assert trainer.result.outcomes == {"scored": 1, "policy_fault": 1}
    assert trainer.result.rewards[0] == 4.0


LIMITED = ["shm, one runner", "shm, three runners", "cs, two runners", "cs, runner here"]


@pytest.mark.parametrize("where", LIMITED)
def test_a_smoke_test_ends_after_max_rollouts_of_each_runner_and_says_what_was_not_run(
    where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**STRATEGIES[where], "max_rollouts": 3, "initial_resources": {}, "progress": "plain"}
    trainer = agl.Trainer(algorithm="baseline", **settings)
    trainer.fit(tenth, train_dataset=list(range(50)), val_dataset=[1])
    runs = 3 * trainer.n_runners
    assert trainer.result.outcomes == {"scored": runs, "cancelled": 51 - runs}
    assert "51 rollouts in " in (line := capfd.readouterr().err)
    assert f"({51 - runs} not run, {runs} scored)" in line


@pytest.mark.parametrize("where", LIMITED)
def test_an_algorithm_that_asks_for_more_after_max_rollouts_is_ended(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "IDLE_SECONDS", 0.1)

    @agl.algo
    async def steps(*, store: LightningStore) -> None:
        await store.add_resources({})
        while True:
            made = await store.enqueue_rollout(1)
            await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=30)
            attempt = await store.get_latest_attempt(made.rollout_id)
            if attempt is None:  # it was cancelled: as long as a step of a training takes
                await asyncio.sleep(1.0)

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(algorithm=steps, store=store, run_id="smoke", max_rollouts=2, **STRATEGIES[where])
    trainer.fit(tenth)
    assert trainer.result is None
    if where != "cs, runner here":  # there the store is in the child
        run = asyncio.run(store.get_run_by_id("smoke"))
        assert run is not None
        assert (run.state, run.stop_reason) == ("stopped", "every runner has run max_rollouts=2")
        ended = asyncio.run(store.query_rollouts())
        assert sum(rollout.status == "succeeded" for rollout in ended) == 2 * trainer.n_runners
        assert {rollout.status for rollout in ended} == {"succeeded", "cancelled"}


@pytest.mark.parametrize(("error", "raised"), [(NoScoredRolloutError, False), (LookupError, True)])
def test_an_algorithm_that_max_rollouts_left_nothing_to_learn_from_has_not_failed(
    error: type[Exception], raised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.algo
    async def learns(*, store: LightningStore) -> None:
        await store.add_resources({})
        made = [await store.enqueue_rollout(number) for number in range(9)]
        done = await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in made], timeout=30)
        if any(rollout.status == "cancelled" for rollout in done):
            raise error("nothing to learn from")

    trainer = agl.Trainer(algorithm=learns, strategy="shm", max_rollouts=2)
    with pytest.raises(error) if raised else contextlib.nullcontext():
        trainer.fit(tenth)
    assert ("before the algorithm had enough rollouts: nothing to learn from" in caplog.text) != raised


def test_a_failed_rollout_counts_and_its_retries_too() -> None:
    def fails(task: int) -> float:
        raise KeyError(task)

    trainer = agl.Trainer(
        algorithm="baseline",
        strategy="shm",
        max_rollouts=2,
        initial_resources={},
        rollout_config={"max_attempts": 5, "retry_condition": ["failed"]},
    )
    trainer.fit(fails, train_dataset=[1])
    [rollout] = asyncio.run(trainer.store.query_rollouts())
    assert rollout.status == "cancelled"
    assert [attempt.status for attempt in asyncio.run(trainer.store.query_attempts(rollout.rollout_id))] == [
        "failed"
    ] * 2


def test_fit_without_an_algorithm_serves_the_open_rollouts_of_the_store() -> None:
    store = agl.InMemoryLightningStore()

    async def enqueue() -> str:
        await store.add_resources({})
        return (await store.enqueue_rollout(5)).rollout_id

    rollout_id = asyncio.run(enqueue())
    trainer = agl.Trainer(store=store, strategy="shm", max_rollouts=1)

    class Stop(agl.Hook):
        async def on_rollout_end(self, **_: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    trainer.hooks = (Stop(),)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tenth)
    rollout = asyncio.run(store.get_rollout_by_id(rollout_id))
    assert rollout is not None


@pytest.mark.parametrize("where", ["shm, one runner", "shm, three runners", "cs, two runners", "cs, runner here"])
def test_ctrl_c_is_raised_again_once_everything_has_ended(where: str, tmp_path: Path) -> None:
    note = tmp_path / "note"

    class Endless(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await self.get_store().add_resources({})
            rollout = await self.get_store().enqueue_rollout(0)
            await self.get_store().wait_for_rollouts(rollout_ids=[rollout.rollout_id])
            try:
                os.kill(main, signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                note.write_text("cleaned up")

    main = os.getpid()
    trainer = agl.Trainer(algorithm=Endless(), **STRATEGIES[where])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(tenth)
    assert note.read_text() == "cleaned up"
    assert trainer.result is None


# --- dev ------------------------------------------------------------------------------------------------------------


def test_dev_refuses_an_agent_whose_resources_nobody_would_publish() -> None:
    @agl.rollout
    def agent(task: int, llm: agl.LLM) -> float:
        return 1.0

    with pytest.raises(ValueError, match=r"set initial_resources=.* of the Trainer"):
        agl.Trainer(strategy="shm").dev(agent, [1])
