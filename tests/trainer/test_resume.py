"""A run with a name, started again on the same durable store: what has ended stays, what is open goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore, cursors
from agentlightning.trainer.resume import past_of
from agentlightning.types import EnqueueRolloutRequest, Rollout
from tests.stubs.processes import run_program
from tests.trainer.parts import tenth
from tests.trainer.resumed import FATAL, TASKS


def start(folder: Path, strategy: Any) -> subprocess.CompletedProcess[str]:
    return run_program("python", "-m", "tests.trainer.resumed", folder, json.dumps(strategy), code=None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, strategy: Any) -> None:
    for _ in FATAL:
        killed = start(tmp_path, strategy)
        assert killed.returncode == -9, killed.stderr
    last = start(tmp_path, strategy)
    assert json.loads(last.stdout) == [task / 10 for task in TASKS], last.stderr
    attempts = Counter(map(int, (tmp_path / "attempts").read_text().split()))
    assert attempts == {task: 2 if task in FATAL else 1 for task in TASKS}


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_an_interrupted_run_goes_on_too(tmp_path: Path, strategy: Any) -> None:
    program, done, interruption = os.getpid(), tmp_path / "done", tmp_path / "interrupted"

    def agent(task: int) -> float:
        if task == 2 and not interruption.exists():
            interruption.touch()
            os.kill(program, signal.SIGINT)
            time.sleep(8)  # does not end by itself
            return 0.0
        with done.open("a") as file:
            file.write(f"{task}\n")
        return task / 10

    def run() -> Any:
        trainer = agl.Trainer(
            algorithm=agl.Baseline(max_queue_length=2),
            store=f"sqlite:///{tmp_path}/run.db",
            run_id="mine",
            strategy=strategy,
            initial_resources={},
        )
        try:
            trainer.fit(agent, train_dataset=[0, 1, 2, 3])
        finally:
            asyncio.run(trainer.store.close())
        return trainer.result.rewards

    with pytest.raises(KeyboardInterrupt):
        run()
    assert run() == [0.0, 0.1, 0.2, 0.3]
    assert sorted(done.read_text().split()) == ["0", "1", "2", "3"]


def rollouts_of(store: LightningStore) -> list[Rollout]:
    async def read() -> list[Rollout]:
        try:
            return list(await store.query_rollouts(sort_by="start_time"))
        finally:
            await store.close()

    return asyncio.run(read())


def enqueue(path: Path, *requests: EnqueueRolloutRequest, cancel: bool = False) -> list[str]:
    """Leave rollouts behind, as a process that was killed does."""

    async def run() -> list[str]:
        store = agl.SQLiteLightningStore(path)
        await store.add_resources({}, run_id="mine")
        made = await store.enqueue_many_rollouts(requests)
        if cancel:
            for rollout in made:
                await store.update_rollout(rollout.rollout_id, status="cancelled")
        await store.close()
        return [rollout.rollout_id for rollout in made]

    return asyncio.run(run())


@agl.algo
async def asks_one_by_one(*, store: LightningStore, train_dataset: list[int]) -> list[str]:
    """An algorithm of the user's: enqueues every task by itself and returns the ids."""
    await store.add_resources({})
    made = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
    ids = [rollout.rollout_id for rollout in made]
    await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
    return ids


def fit(path: Path, tasks: list[int], **settings: Any) -> Any:
    settings = {"algorithm": asks_one_by_one, "run_id": "mine", "strategy": "shm", **settings}
    trainer = agl.Trainer(store=f"sqlite:///{path}", **settings)
    trainer.fit(tenth, train_dataset=tasks)
    asyncio.run(trainer.store.close())
    return trainer.result


def test_equal_requests_are_answered_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    ids_left = enqueue(
        tmp_path / "run.db", *[EnqueueRolloutRequest(input=n, mode="train", run_id="mine") for n in (1, 2, 1)]
    )
    ids = fit(tmp_path / "run.db", [1, 1, 1, 2])
    assert [ids[0], ids[1], ids[3]] == [ids_left[0], ids_left[2], ids_left[1]]
    assert ids[2] not in ids_left


async def test_the_past_of_a_run_is_read_in_pages_and_kept_without_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "PAGE", 3)
    store = agl.InMemoryLightningStore()
    tasks = [f"task {number} " + "x" * 10_000 for number in range(8)]
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task) for task in tasks])
    past = await past_of(store, "named", set(), resumable=True)
    assert past is not None
    assert len(pickle.dumps(past._waiting)) < 2000
    answers = await past.answers([EnqueueRolloutRequest(input=task) for task in [*tasks[::-1], tasks[0]]])
    assert [answer and answer.rollout_id for answer in answers] == [r.rollout_id for r in made[::-1]] + [None]


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("outcome", ["infrastructure_fault", "policy_fault"])
@pytest.mark.parametrize("failed", ["before this start", "before it asked", "after it asked"])
async def test_what_a_runner_failed_at_because_its_model_had_moved_is_done_anew(
    moves: bool, outcome: Any, failed: str
) -> None:
    """A runner may claim what the last start left before the algorithm has asked for it again."""
    store = agl.InMemoryLightningStore()

    async def publish(port: int) -> str:
        resource = agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="m")
        return (await store.add_resources({"llm": resource})).resources_id

    async def fail() -> None:
        claimed = await store.dequeue_rollout(worker_id="w")
        assert claimed is not None
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed", outcome=outcome)

    rollout = await store.enqueue_rollout(1, resources_id=await publish(1))
    if failed == "before this start":
        await fail()
    opened = (await store.start_run("named")).last_heartbeat_time
    if failed == "before it asked":
        await fail()
    past = await past_of(store, "named", set(), resumable=True, opened=opened)
    assert past is not None
    if failed == "after it asked":
        await fail()
    request = EnqueueRolloutRequest(input=1, resources_id=await publish(2 if moves else 1))
    [answer] = await past.answers([request])
    is_done_anew = moves and failed != "before this start" and outcome == "infrastructure_fault"
    assert (answer and answer.rollout_id) == (None if is_done_anew else rollout.rollout_id)


async def leave_with_model(path: Path, port: int) -> str:
    """Leave a rollout behind whose model had this port."""
    store = agl.SQLiteLightningStore(path)
    resource = agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="m")
    resources_id = (await store.add_resources({"llm": resource}, run_id="mine")).resources_id
    request = EnqueueRolloutRequest(input=1, mode="train", run_id="mine", resources_id=resources_id)
    [rollout] = await store.enqueue_many_rollouts([request])
    await store.close()
    return rollout.rollout_id


def test_what_a_runner_failed_at_before_the_past_was_read_is_done_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_id = asyncio.run(leave_with_model(tmp_path / "run.db", 1))

    @agl.rollout
    def needs_model(task: int, llm: agl.LLM) -> float:
        if ":1/" in llm.endpoint:
            raise ConnectionError("nobody listens there")
        return 1.0

    @agl.algo
    async def asks(*, store: LightningStore, train_dataset: list[int]) -> Rollout:
        await store.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:2/v1", model="m")})
        made = await store.enqueue_rollout(train_dataset[0], mode="train")
        return (await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=30))[0]

    async def slow_past(store: LightningStore, *args: Any, **settings: Any) -> Any:
        [rollout] = await store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=30)
        assert rollout.status == "failed"
        return await past_of(store, *args, **settings)

    monkeypatch.setattr("agentlightning.trainer.bundles.past_of", slow_past)
    trainer = agl.Trainer(algorithm=asks, store=f"sqlite:///{tmp_path}/run.db", run_id="mine", strategy="shm")
    trainer.fit(needs_model, train_dataset=[1])
    asyncio.run(trainer.store.close())
    assert trainer.result.status == "succeeded"
    assert trainer.result.rollout_id != rollout_id


def test_a_run_of_another_name_and_one_without_do_everything_anew(tmp_path: Path) -> None:
    first = fit(tmp_path / "run.db", [1, 2])
    assert fit(tmp_path / "run.db", [1, 2]) == first
    assert not set(fit(tmp_path / "run.db", [1, 2], run_id="other")) & set(first)
    assert not set(fit(tmp_path / "run.db", [1, 2], run_id=None)) & set(first)


def test_two_fits_of_one_program_are_two_and_a_second_start_goes_on_with_both(tmp_path: Path) -> None:
    def program() -> list[list[str]]:
        trainer = agl.Trainer(
            algorithm=asks_one_by_one, store=f"sqlite:///{tmp_path}/run.db", run_id="mine", strategy="shm"
        )
        results: list[list[str]] = []
        for _ in range(2):
            trainer.fit(tenth, train_dataset=[1, 2])
            results.append(trainer.result)
        asyncio.run(trainer.store.close())
        return results

    first = program()
    assert not set(first[0]) & set(first[1])
    assert program() == first


def test_what_was_cancelled_is_done_again(tmp_path: Path) -> None:
    ids_left = enqueue(tmp_path / "run.db", EnqueueRolloutRequest(input=1, mode="train", run_id="mine"), cancel=True)
    assert fit(tmp_path / "run.db", [1]) != ids_left


def test_other_resources_are_other_requests(tmp_path: Path) -> None:
    @agl.algo
    async def two_prompts(*, store: LightningStore, trainer: agl.Trainer) -> list[str]:
        made: list[str] = []
        for text in trainer.texts:
            update = await store.add_resources({"p": agl.PromptTemplate(template=text, engine="f-string")})
            made.append((await store.enqueue_rollout(1, resources_id=update.resources_id)).rollout_id)
        await store.wait_for_rollouts(rollout_ids=made, timeout=30)
        return made

    results: list[list[str]] = []
    for texts in (["a", "b"], ["b", "c"]):
        trainer: Any = agl.Trainer(
            algorithm=two_prompts, store=f"sqlite:///{tmp_path}/r.db", run_id="m", strategy="shm"
        )
        trainer.texts = texts
        trainer.fit(tenth)
        asyncio.run(trainer.store.close())
        results.append(trainer.result)
    assert results[1][0] == results[0][1]
    assert results[1][1] not in results[0]


def test_an_open_rollout_whose_model_has_moved_is_cancelled_and_done_anew(tmp_path: Path) -> None:
    def llm(port: int) -> dict[str, Any]:
        return {"llm": agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="m")}

    async def leave() -> str:
        store = agl.SQLiteLightningStore(tmp_path / "run.db")
        update = await store.update_resources("default", llm(1), run_id="mine")
        request = EnqueueRolloutRequest(input=1, mode="train", resources_id=update.resources_id, run_id="mine")
        rollout = (await store.enqueue_many_rollouts([request]))[0]
        await store.close()
        return rollout.rollout_id

    @agl.rollout
    def agent(task: int, llm: agl.LLM) -> float:
        return float(llm.endpoint.count(":2/"))

    rollout_id = asyncio.run(leave())
    trainer = agl.Trainer(
        algorithm="baseline",
        store=f"sqlite:///{tmp_path}/run.db",
        run_id="mine",
        strategy="shm",
        max_rollouts=5,
        initial_resources=llm(2),
    )
    trainer.fit(agent, train_dataset=[1])
    assert trainer.result.rewards == [1.0], "what a runner made of the old address does not count"
    assert rollout_id in [rollout.rollout_id for rollout in rollouts_of(trainer.store)]


def test_an_algorithm_that_begins_anew_cancels_what_its_last_start_left_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Learner(agl.Algorithm):
        resumable = False

        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await self.get_store().add_resources({})

    requests = [EnqueueRolloutRequest(input=n, mode="train", run_id="mine") for n in (1, 2)]
    enqueue(tmp_path / "run.db", *requests)
    with caplog.at_level(logging.INFO, "agentlightning"):
        trainer = agl.Trainer(
            algorithm=Learner(),
            store=f"sqlite:///{tmp_path}/run.db",
            run_id="mine",
            strategy={"type": "cs", "server_port": 0},
        )
        trainer.fit(tenth)
    assert "Run mine starts from the beginning; " in caplog.text
    assert not [r for r in rollouts_of(trainer.store) if r.status in ("queuing", "running", "preparing")]


def test_the_name_of_a_run_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_RUN_ID", "of-the-environment")
    first = fit(tmp_path / "run.db", [1, 2], run_id=None)
    assert fit(tmp_path / "run.db", [1, 2], run_id=None) == first
    assert fit(tmp_path / "run.db", [1, 2], run_id="given") != first
