"""Every fit leaves a run in its store, which says how it ended, whichever algorithm and strategy ran it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.execution import ExecutionStrategy
from agentlightning.execution.events import ThreadingEvent
from agentlightning.store import InMemoryLightningStore, LightningStore, SQLiteLightningStore
from agentlightning.store.http.metrics import prometheus_response
from agentlightning.training.records import RunLog
from agentlightning.types.runs import Run, RunRecord
from tests.stubs.processes import Terminal, run_program
from tests.trainer.parts import tenth

SECRET = "correct-horse-battery"


@agl.algo
async def logs(*, run: RunLog, store: LightningStore) -> str:
    """An asynchronous function that records two steps."""
    await run.step(1, {"loss": 2.0})
    run.step(2, {"loss": 1.0})
    return "done"


@agl.algo
def logs_in_turn(*, run: RunLog) -> str:
    """The same as a plain function."""
    run.step(1, {"loss": 2.0})
    run.step(2, {"loss": 1.0})
    return "done"


class Logs(agl.Algorithm):
    """A class with settings, one of which is secret."""

    def __init__(self) -> None:
        self.rate, self.api_key, self.model = 0.5, SECRET, object()

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> str:
        """Record two steps."""
        await self.log_metrics(1, loss=2.0)
        self.log_metrics(2, loss=1.0)
        return "done"


class Fails(agl.Algorithm):
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Fail with a text that holds a secret."""
        raise RuntimeError(f"no login: password={SECRET}")


def recorded(store: LightningStore) -> tuple[Run, list[RunRecord]]:

    async def read() -> tuple[Run, list[RunRecord]]:
        [run] = await store.query_runs()
        return run, list(await store.query_run_records(run.run_id))

    return asyncio.run(read())


@pytest.mark.parametrize("strategy", ["shm", "cs"])
@pytest.mark.parametrize("algorithm", [logs, logs_in_turn, Logs()], ids=["async function", "function", "class"])
def test_what_an_algorithm_logs_is_in_the_store(algorithm: Any, strategy: str) -> None:
    store = InMemoryLightningStore()
    spec = {"type": strategy, **({"server_port": 0} if strategy == "cs" else {})}
    trainer = agl.Trainer(algorithm=algorithm, strategy=spec, store=store)
    trainer.fit(tenth)
    run, records = recorded(store)
    assert trainer.result == "done"
    assert [(record.kind, record.step, record.data) for record in records] == [
        ("step", 1, {"loss": 2.0}), ("step", 2, {"loss": 1.0}),
    ]  # fmt: skip
    assert (run.state, run.last_step, run.starts) == ("succeeded", 2, 1)
    assert run.algorithm == getattr(algorithm, "__name__", "Logs")
    assert "python" in (run.versions or {})


def test_settings_are_recorded_without_secrets_and_without_what_is_no_setting() -> None:
    store = InMemoryLightningStore()
    agl.Trainer(algorithm=Logs(), strategy="shm", store=store, rollout_config={"timeout_seconds": 9}).fit(tenth)
    run, _ = recorded(store)
    assert run.config is not None
    assert run.config["algorithm"] == {"rate": 0.5, "api_key": "[hidden]"}
    assert run.config["trainer"]["rollout_config"]["timeout_seconds"] == 9
    assert run.config["trainer"]["agent"] == "tenth"
    assert SECRET not in run.model_dump_json()


def test_no_planted_secret_is_in_what_leaves_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", SECRET)
    caplog.set_level("DEBUG")

    @agl.rollout
    def agent(task: dict[str, str], llm: agl.LLM) -> float:
        if task["kind"] == "raises":
            raise ConnectionError(
                f"{llm.endpoint} with api_key={llm.api_key} refuses {SECRET}, password={task['password']}"
            )
        agl.emit_reward(0.5, attributes={"metadata.authorization": "Bearer planted-in-the-reward"})
        return 0.5

    class Planted(agl.Baseline):
        def __init__(self) -> None:
            super().__init__(span_verbosity="none")
            self.headers = {"Authorization": "Bearer planted-in-a-header"}
            self.url = "https://planted:planted-in-a-url@host/?token=planted-in-a-query"

    place = tmp_path / "run.db"
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1?key=planted-endpoint", model="m", api_key="planted-api-key")
    trainer = agl.Trainer(
        algorithm=Planted(), strategy="shm", store=f"sqlite:///{place}", initial_resources={"llm": llm}, run_id="r",
        progress="plain",
    )  # fmt: skip
    tasks = [{"kind": kind, "password": "planted-in-the-task"} for kind in ("raises", "good")]
    trainer.fit(agent, train_dataset=tasks)
    assert trainer.result.outcomes == {"infrastructure_fault": 1, "scored": 1}
    for command in (["show", "r"], ["show", "r", "--json"], ["list", "--json"], ["ledger", "r", "--json"]):
        assert main(["runs", *command, "--store", str(place)]) == 0
    assert main(["runs", "export", "r", "--out", str(tmp_path / "out"), "--store", str(place)]) == 0
    page = asyncio.run(prometheus_response(trainer.store))
    asyncio.run(trainer.store.close())
    messages = [*capfd.readouterr(), caplog.text, bytes(page.body).decode()]
    messages += [path.read_text() for path in (tmp_path / "out").iterdir()]
    run, records = recorded(SQLiteLightningStore(place))
    messages += [run.model_dump_json(), *(record.model_dump_json() for record in records)]
    for secret in (SECRET, "planted-api-key", "planted-endpoint", "planted-in-"):
        assert [text for text in messages if secret in text] == []


def test_a_baseline_leaves_a_run_with_its_results() -> None:
    store = InMemoryLightningStore()
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", store=store)
    trainer.fit(tenth, train_dataset=[1, 2, 3])
    run, records = recorded(store)
    assert (run.algorithm, run.state) == ("Baseline", "succeeded")
    [evaluation] = records
    assert (evaluation.kind, evaluation.data["rewards"]) == ("evaluation", [0.1, 0.2, 0.3])
    assert run.best is not None
    assert run.best.value == pytest.approx(0.2)


def test_an_evaluation_is_a_run_of_its_own_with_its_rewards() -> None:
    store = InMemoryLightningStore()
    trainer = agl.Trainer(strategy="shm", store=store)
    result = trainer.evaluate(tenth, [1, 2], n_samples=2)
    run, [record] = recorded(store)
    assert (run.run_id, run.algorithm, run.state) == (result.run_id, "Evaluator", "succeeded")
    assert (record.kind, record.step, record.data["rewards"]) == ("evaluation", 0, [0.1, 0.2])


class Bare(ExecutionStrategy):
    """A strategy of a user's own that knows nothing of runs."""

    n_runners = 1

    def execute(self, algorithm: Any, runner: Any, store: LightningStore) -> Any:
        return asyncio.run(algorithm(store, ThreadingEvent()))


@pytest.mark.parametrize(("algorithm", "state"), [(logs, "succeeded"), (Fails(), "failed")])
def test_a_strategy_of_a_users_own_leaves_a_run_too(algorithm: Any, state: str) -> None:
    store = InMemoryLightningStore()
    with contextlib.suppress(RuntimeError):
        agl.Trainer(algorithm=algorithm, strategy=Bare(), store=store).fit(tenth)
    run, records = recorded(store)
    assert (run.state, len(records)) == (state, 2 if state == "succeeded" else 0)


PROGRAM = """
import asyncio, os, sys
import agentlightning as agl

@agl.rollout
def agent(task: int) -> float:
    return 1.0

@agl.algo
async def forever(*, run, store):
    await run.step(1, {"loss": 1.0})
    print("begun", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    import agentlightning.training.records as log
    log.HEARTBEAT_SECONDS = 0.2
    strategy = {"type": sys.argv[2], **({"server_port": 0} if sys.argv[2] == "cs" else {})}
    if len(sys.argv) > 3:
        strategy["main_process"] = "runner"
    agl.Trainer(algorithm=forever, strategy=strategy, store=f"sqlite:///{sys.argv[1]}", run_id="r").fit(agent)
"""

ENDS: dict[str, Any] = {
    "Ctrl+C": (signal.SIGINT, "interrupted"),
    "SIGTERM": (signal.SIGTERM, "interrupted"),
    "agl run stop": (None, "stopped"),
    "kill -9": (signal.SIGKILL, "running"),
}
LAYOUTS = {"shm": ["shm"], "cs": ["cs"], "cs, algorithm in a child": ["cs", "child"]}


@pytest.mark.heavy
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_end_of_a_process_is_told_by_its_run(
    tmp_path: Path, terminal: Terminal, end: Any, layout: list[str]
) -> None:
    signal_number, state = end
    place = tmp_path / "run.db"
    (tmp_path / "program.py").write_text(PROGRAM)
    process = terminal(["python", "program.py", place, *layout])
    process.until("begun")
    if signal_number is None:
        run_program("agl", "run", "stop", "r", "--store", place, "--reason", "enough")
        process.ended()
    elif signal_number == signal.SIGINT:
        os.killpg(process.popen.pid, signal.SIGINT)
        process.ended()
    else:
        process.interrupted(signal_number)
    time.sleep(1.5 if state == "running" else 0)  # a child whose parent was killed ends
    run, records = recorded(SQLiteLightningStore(place))
    assert (run.state, len(records)) == (state, 1)
    assert run.last_heartbeat_time is not None
    assert (run.end_time is None) == (state == "running")
    assert run.stop_reason == ("enough" if state == "stopped" else None)
    assert run.error is None


def test_a_heartbeat_tells_that_an_idle_run_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.training.records.HEARTBEAT_SECONDS", 0.01)

    @agl.algo
    async def idle(*, store: LightningStore) -> list[float]:
        loads: list[float] = []
        while len(set(loads)) < 3:
            [run] = await store.query_runs()
            loads.append(run.last_heartbeat_time or 0.0)
            await asyncio.sleep(0.01)
        return loads

    trainer = agl.Trainer(algorithm=idle, strategy="shm", store=InMemoryLightningStore())
    trainer.fit(tenth)
    assert len(set(trainer.result)) == 3


class NoRuns(InMemoryLightningStore):
    """A store of a user's own that does not store runs."""

    start_run = LightningStore.start_run
    update_run = LightningStore.update_run
    get_run_by_id = LightningStore.get_run_by_id
    add_run_records = LightningStore.add_run_records


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_a_store_that_keeps_no_runs_trains_and_says_so_once(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trainer = agl.Trainer(algorithm=logs, strategy=strategy, store=NoRuns(), run_id="r")
    trainer.fit(tenth)
    assert trainer.result == "done"
    assert len([record for record in caplog.records if "does not store runs" in record.message]) == 1
