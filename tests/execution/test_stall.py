"""A stalled run reports once what each part waits for, and ends with that report if a setting asks for it."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution import (
    AlgorithmDiedError,
    ClientServerExecutionStrategy,
    ExecutionEvent,
    SharedMemoryExecutionStrategy,
    StalledError,
)
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types import Dataset
from agentlightning.types.runs import RunRecord
from tests.execution.bundles import Serve, Tasks, deaf_runner

QUICK: dict[str, Any] = {"stall_timeout": 0.5, "on_stall": "raise"}


def shm(**settings: Any) -> SharedMemoryExecutionStrategy:
    return SharedMemoryExecutionStrategy(graceful_delay=0.3, **{**QUICK, **settings})


def cs(**settings: Any) -> ClientServerExecutionStrategy:
    return ClientServerExecutionStrategy(**{"server_port": 0, "graceful_timeout": 0.3, **QUICK, **settings})


@pytest.mark.parametrize("strategy", [shm, cs, lambda: shm(n_runners=2)], ids=["shm", "cs", "shm-2"])
def test_work_that_nobody_claims_ends_the_run_with_a_report_of_every_part(strategy: Any) -> None:
    with pytest.raises(StalledError) as raised:
        strategy().execute(Tasks(3), deaf_runner, InMemoryLightningStore())
    report = str(raised.value)
    assert "No progress for 0.5 s (stall_timeout). What each part waits for:" in report
    assert re.search(r"queue: 3 unclaimed rollouts; ro-\w+ has waited longest, for \d+ s", report)
    assert "runners: none has requested work of this run" in report
    assert "gateway: not in use" in report
    assert re.search(r"algorithm: .*execution/bundles.py:\d+ in __call__ > .* in wait_for_rollouts", report)


def test_with_the_algorithm_in_a_child_the_report_comes_from_there() -> None:
    with pytest.raises(AlgorithmDiedError, match=r"StalledError: No progress for 0\.5 s"):
        cs(main_process="runner", graceful_timeout=1.0).execute(Tasks(1), deaf_runner, InMemoryLightningStore())


def test_a_stall_is_told_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    signal = asyncio.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "No progress" in record.getMessage():
                signal.set()

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        await store.enqueue_rollout("nobody claims this")
        await signal.wait()
        await asyncio.sleep(1.2)
        return "went on"

    handler = Handler()
    logging.getLogger("agentlightning.execution.stall").addHandler(handler)
    try:
        run = shm(main_thread="algorithm", on_stall="report").execute
        assert run(algorithm, deaf_runner, InMemoryLightningStore()) == "went on"
    finally:
        logging.getLogger("agentlightning.execution.stall").removeHandler(handler)
    assert caplog.text.count("No progress for 0.5 s") == 1


def test_slow_but_steady_progress_is_no_stall() -> None:
    class Slow(Serve):
        async def work(self) -> None:
            await asyncio.sleep(0.25)

    patient = SharedMemoryExecutionStrategy(stall_timeout=2.0, on_stall="raise")
    assert len(patient.execute(Tasks(12), Slow(), InMemoryLightningStore())) == 12


def test_a_heartbeat_is_no_progress_and_hides_none() -> None:
    async def beats(store: LightningStore, event: ExecutionEvent) -> None:
        await store.enqueue_rollout("nobody claims it")
        while True:
            await store.update_run("", heartbeat=True)
            await asyncio.sleep(0.05)

    async def records(store: LightningStore, event: ExecutionEvent) -> int:
        for step in range(30):
            await store.add_run_records("", [RunRecord(kind="step", step=step)])
            await asyncio.sleep(0.1)
        return 30

    with pytest.raises(StalledError):
        shm().execute(beats, deaf_runner, InMemoryLightningStore())
    patient = SharedMemoryExecutionStrategy(stall_timeout=2.0, on_stall="raise")
    assert patient.execute(records, deaf_runner, InMemoryLightningStore()) == 30


def test_a_trainer_says_which_rollout_its_runner_has_in_hand_and_which_it_ended_last() -> None:
    @agl.rollout
    async def agent(task: str) -> float:
        if task == "hangs":
            await asyncio.Event().wait()
        return 1.0

    @agl.algo
    async def algorithm(*, store: LightningStore, train_dataset: Dataset[str]) -> None:
        ids: list[str] = []
        await store.add_resources({})
        for task in train_dataset:
            ids.append((await store.enqueue_rollout(task)).rollout_id)
            await store.wait_for_rollouts(rollout_ids=ids, timeout=60)

    proxy = agl.LLMProxy(
        model_list=[
            {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://127.0.0.1:1/v1"}},
        ]
    )
    strategy = {"type": "shm", "graceful_delay": 0.2, **QUICK}
    trainer = agl.Trainer(algorithm=algorithm, strategy=strategy, llm_proxy=proxy)
    with pytest.raises(StalledError) as raised:
        trainer.fit(agent, train_dataset=["ends", "hangs"])
    text = str(raised.value)
    assert re.search(r"runner \S+-0: runs ro-\w+ \(attempt 1\) for \d+ s; last heartbeat \d+ s ago", text)
    assert "queue: empty" in text
    assert "gateway: 0 calls at model servers, 0 waiting for a weight change" in text
    assert re.search(r"algorithm: .* > execution/test_stall.py:\d+ in algorithm > ", text)


@pytest.mark.parametrize("strategy", [SharedMemoryExecutionStrategy, ClientServerExecutionStrategy])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stall_timeout": -1.0}, "stall_timeout must be a finite number"),
        ({"on_stall": "stop"}, "on_stall must be one"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(strategy: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategy(**settings)
