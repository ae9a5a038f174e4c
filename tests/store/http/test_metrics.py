"""Metrics of a store and its server: every call, every real end of a rollout, every request; and the scraped page."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import override

from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore, LightningStoreStatistics
from agentlightning.store.http.metrics import (
    MOST_RUNS,
    HttpMetrics,
    path_templates,
    prometheus_response,
    prometheus_routes,
)
from agentlightning.store.http.operations import OPERATIONS, PREFIX
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import RolloutConfig
from agentlightning.types.runs import RunRecord
from agentlightning.utils.http.auth import Message, Receive, Scope, Send
from agentlightning.utils.metrics import ImmediateBackend, PrometheusMetricsBackend
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.store.conftest import open_store
from tests.store.parts import required


class Tally(ImmediateBackend):
    """Keeps counts and values by name and labels."""

    def __init__(self) -> None:
        self.labels: dict[str, tuple[str, ...]] = {}
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.values: dict[tuple[str, ...], list[float]] = {}
        self.ended = threading.Event()

    @override
    def register_counter(self, name: str, label_names: Sequence[str] | None = None, **_: Any) -> None:
        self.labels[name] = tuple(label_names or ())

    @override
    def register_histogram(self, name: str, label_names: Sequence[str] | None = None, *_: Any, **__: Any) -> None:
        self.labels[name] = tuple(label_names or ())

    @override
    def count(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        self.counts[self._key(name, labels)] += int(amount)
        if name == "agl.rollouts.total":
            self.ended.set()

    @override
    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self.values.setdefault(self._key(name, labels), []).append(value)

    def _key(self, name: str, labels: Mapping[str, str] | None) -> tuple[str, ...]:
        values = labels or {}
        assert set(values) == set(self.labels[name])
        return (name, *(values[label] for label in self.labels[name]))

    def of(self, name: str) -> dict[tuple[str, ...], int]:
        return {key[1:]: count for key, count in self.counts.items() if key[0] == name}


Counted = tuple[LightningStore, Tally]


@pytest.fixture(params=["memory", "sqlite"])
async def counted(request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack) -> Counted:
    """A store with a tracker, and the tracker."""
    tally = Tally()
    settings = {"tracker": tally, "scan_debounce_seconds": 0.0}
    return (await open_store(request.param, request, tmp_path, stack, settings)).store, tally


# --- operations --------------------------------------------------------------------------------------------------


async def test_each_call_is_counted_and_timed_once_with_how_it_ended(counted: Counted) -> None:
    store, tally = counted
    await store.enqueue_rollout(input={})
    await store.enqueue_rollout(input={})
    with pytest.raises(NotFoundError):
        await store.update_rollout("ro-none", mode="train")
    await store.add_resources({})
    calls = tally.of("agl.store.total")
    assert calls["add_resources", "add_resources", "OK"] == 1
    assert calls["update_resources", "add_resources", "OK"] == 1, "with the operation that the caller called"
    assert calls["enqueue_rollout", "enqueue_rollout", "OK"] == 2
    assert calls["update_rollout", "update_rollout", "NotFoundError"] == 1
    [failed] = tally.values["agl.store.latency", "update_rollout", "update_rollout", "NotFoundError"]
    assert 0 < failed < 60


async def test_a_call_that_is_cancelled_is_counted_as_such() -> None:
    tally = Tally()
    store = InMemoryLightningStore(tracker=tally)
    waiting = asyncio.create_task(store.dequeue_rollout(worker_id="w", timeout=60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert tally.of("agl.store.total")["dequeue_rollout", "dequeue_rollout", "CancelledError"] == 1


async def test_a_store_without_a_tracker_is_left_as_it_is() -> None:
    assert "enqueue_rollout" not in vars(InMemoryLightningStore())


# --- ends of rollouts --------------------------------------------------------------------------------------------


async def test_a_rollout_counts_once_for_each_time_it_really_ends(counted: Counted) -> None:
    store, tally = counted
    done = await store.start_rollout(input={}, mode="train")
    for _ in range(3):
        await store.update_attempt(done.rollout_id, "latest", status="succeeded")
        await store.update_rollout(done.rollout_id, status="succeeded")
    cancelled = await store.enqueue_rollout(input={})
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    retried = await store.start_rollout(
        input={}, mode="val", config=RolloutConfig(max_attempts=2, retry_condition=["failed"])
    )
    await store.update_attempt(retried.rollout_id, "latest", status="failed")  # it is queued again: no end
    await store.update_attempt(required(await store.dequeue_rollout()).rollout_id, "latest", status="failed")
    await store.delete_rollouts(rollout_ids=[done.rollout_id])
    assert tally.of("agl.rollouts.total") == {
        ("succeeded", "train"): 1,
        ("cancelled", "unknown"): 1,
        ("failed", "val"): 1,
    }
    [seconds] = tally.values["agl.rollouts.duration", "succeeded", "train"]
    assert 0 <= seconds < 60
    await store.update_rollout(cancelled.rollout_id, status="queuing")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    assert tally.of("agl.rollouts.total")["cancelled", "unknown"] == 2


async def test_an_end_that_nobody_called_for_counts_too(counted: Counted) -> None:
    store, tally = counted
    await store.start_rollout(input={}, config=RolloutConfig(timeout_seconds=0.001))
    assert await asyncio.to_thread(tally.ended.wait, 30.0)
    assert tally.of("agl.rollouts.total") == {("failed", "unknown"): 1}


# --- attempts, claims and model calls ----------------------------------------------------------------------------


async def test_an_attempt_counts_once_with_how_it_ended(counted: Counted) -> None:
    store, tally = counted
    scored = await store.start_rollout(input={})
    for _ in range(2):
        await store.update_attempt(scored.rollout_id, "latest", status="succeeded", outcome="scored")
    failed = await store.start_rollout(input={})
    await store.fail_rollout(failed.rollout_id, reason="out of luck")
    await store.start_rollout(input={}, config=RolloutConfig(timeout_seconds=0.001))
    while ("timeout", "cancelled", "timeout") not in tally.of("agl.attempts.total"):
        await asyncio.to_thread(tally.ended.wait, 30.0)
        tally.ended.clear()
    assert tally.of("agl.attempts.total") == {
        ("succeeded", "scored", ""): 1,
        ("failed", "infrastructure_fault", "out of luck"): 1,
        ("timeout", "cancelled", "timeout"): 1,
    }


async def test_the_way_from_the_queue_to_a_runner_is_timed_for_first_claims(counted: Counted) -> None:
    store, tally = counted
    await store.enqueue_rollout(
        input={}, mode="train", config=RolloutConfig(max_attempts=2, retry_condition=["failed"])
    )
    for _ in range(2):
        await store.fail_rollout(required(await store.dequeue_rollout()).rollout_id)
    [delay] = tally.values["agl.rollouts.claim_delay", "train"]
    assert 0 <= delay < 60


async def test_words_of_programs_make_no_series_without_end() -> None:
    tally = Tally()
    store = InMemoryLightningStore(tracker=tally)
    for number in range(100):
        rollout = await store.start_rollout(input={})
        await store.fail_rollout(rollout.rollout_id, reason=f"reason {number}")
    counts = tally.of("agl.attempts.total")
    assert len(counts) == 33
    assert counts["failed", "infrastructure_fault", "other"] == 68


# --- requests ----------------------------------------------------------------------------------------------------


async def answer(request: Request) -> Response:
    if "fail" in request.path_params.values():
        raise KeyError("a bug")
    return Response("x", 201)


@pytest.fixture
def app() -> tuple[HttpMetrics, Tally]:
    tally = Tally()
    routes = [Route("/v1/things/latest", answer, methods=["GET"]), Route("/v1/things/{thing_id}", answer)]
    return HttpMetrics(Starlette(routes=routes), tally, ["/v1/things/latest", "/v1/things/{thing_id}"]), tally


async def test_requests_are_labelled_by_template_and_status(app: tuple[HttpMetrics, Tally]) -> None:
    served, tally = app
    server = PythonServerLauncher(served, PythonServerLauncherArgs(launch_mode="asyncio"))
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:
        for path in ("/v1/things/latest", "/v1/things/one", "/v1/things/two", "/v1/things/fail", "/any/a", "/any/b"):
            async with session.get(path) as reply:
                await reply.read()
        async with session.delete("/v1/things/latest") as reply:
            await reply.read()
    await server.stop()
    assert tally.of("agl.http.total") == {
        ("/v1/things/latest", "GET", "201"): 1,
        ("/v1/things/{thing_id}", "GET", "201"): 2,
        ("/v1/things/{thing_id}", "GET", "500"): 1,
        ("other", "GET", "404"): 2,
        ("/v1/things/latest", "DELETE", "405"): 1,
    }
    assert len(tally.values["agl.http.latency", "/v1/things/{thing_id}", "GET", "201"]) == 2


@pytest.mark.parametrize(("leaves", "status"), [(True, "499"), (False, "520")])
async def test_a_request_without_an_answer_says_who_left(leaves: bool, status: str) -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def receive() -> Message:
        return {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""}

    async def send(message: Message) -> None: ...

    tally = Tally()
    scope = {"type": "http", "method": "BREW", "path": "/pot", "headers": []}
    await HttpMetrics(silent, tally, ["/pot"])(scope, receive, send)
    assert tally.of("agl.http.total") == {("/pot", "other", status): 1}


def test_every_operation_has_its_template() -> None:
    paths = [PREFIX + operation.path for operation in OPERATIONS.values()]
    template_of = path_templates(paths)
    for path in paths:
        parts = ["a%2Fb" if part.startswith("{") else part for part in path.split("/")]
        raw = "/".join(parts)
        assert template_of({"path": raw.replace("%2F", "/"), "raw_path": raw.encode() + b"?x=1"}) == path
    assert template_of({"path": "/v1/agl/rollouts/a/b/c/d"}) == "other"


# --- the page ----------------------------------------------------------------------------------------------------


async def page(store: LightningStore, accept: str = "") -> dict[str, Any]:
    reply = await prometheus_response(store, accept)
    return {family.name: family.samples for family in text_string_to_metric_families(bytes(reply.body).decode())}


async def test_the_page_tells_sizes_and_the_process_without_a_tracker() -> None:
    store = InMemoryLightningStore()
    await store.enqueue_rollout(input={})
    families = await page(store)
    assert families["agl_store_up"][0].value == 1
    assert families["agl_store_rollouts"][0].value == 1
    assert families["agl_store_uptime_seconds"][0].value > 0
    assert families["process_resident_memory_bytes"][0].value > 0


async def test_the_page_holds_what_the_tracker_counted() -> None:
    store = InMemoryLightningStore(tracker=PrometheusMetricsBackend())
    await store.start_rollout(input={})
    [family] = [samples for name, samples in (await page(store)).items() if name == "agl_store"]
    assert {"method": "start_rollout", "store_pubmeth": "start_rollout", "status": "OK"} in [s.labels for s in family]


async def test_a_store_that_fails_is_shown_as_down(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(LightningStore):
        @override
        async def statistics(self) -> LightningStoreStatistics:
            raise OSError("disk gone")

    families = await page(Broken())
    assert families["agl_store_up"][0].value == 0
    assert "process_resident_memory_bytes" in families
    assert "cannot read the statistics of the store" in caplog.text


async def test_the_page_is_served_in_the_format_that_is_asked_for() -> None:
    store = InMemoryLightningStore()
    server = PythonServerLauncher(
        Starlette(routes=prometheus_routes(lambda: store)), PythonServerLauncherArgs(launch_mode="asyncio")
    )
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:
        for path in ("/v1/prometheus", "/v1/prometheus/"):
            async with session.get(path, allow_redirects=False) as reply:
                assert reply.status == 200
                assert reply.headers["content-type"].startswith("text/plain; version=")
        headers = {"accept": "application/openmetrics-text; version=1.0.0"}
        async with session.get("/v1/prometheus", headers=headers) as reply:
            assert reply.headers["content-type"].startswith("application/openmetrics-text")
            assert (await reply.text()).endswith("# EOF\n")
    await server.stop()


# --- figures of training runs ---------------------------------------------------------------------------------------


async def lines_of_runs(store: LightningStore) -> list[str]:
    """Return the lines of the page about runs."""
    response = await prometheus_response(store)
    return [line for line in bytes(response.body).decode().splitlines() if line.startswith("agl_run_")]


async def test_the_last_step_of_each_run_is_told() -> None:
    store = InMemoryLightningStore()
    await store.start_run("grpo")
    figures = {
        "mean_reward": 0.5,
        "update": {"loss": 0.25},
        "calls_trained": 8,
        "calls_excluded": {"helper": 1, "x": 2},
    }
    earlier = RunRecord(kind="step", step=1, data={"mean_reward": 0.0})
    await store.add_run_records("grpo", [RunRecord(kind="step", step=2, data=figures), earlier])
    await store.start_run("")
    await store.add_run_records("", [RunRecord(kind="step", step=1, data={"loss": None, "reward": "high"})])
    assert sorted(await lines_of_runs(store)) == [
        'agl_run_calls_excluded{run="grpo"} 3.0', 'agl_run_calls_trained{run="grpo"} 8.0',
        'agl_run_loss{run="grpo"} 0.25', 'agl_run_reward{run="grpo"} 0.5',
        'agl_run_step{run="-"} 1.0', 'agl_run_step{run="grpo"} 2.0',
    ]  # fmt: skip


async def test_the_runs_on_the_page_are_bounded() -> None:
    store = InMemoryLightningStore()
    for number in range(MOST_RUNS + 5):
        await store.start_run(f"r{number}")
        await store.add_run_records(f"r{number}", [RunRecord(kind="step", step=1, data={})])
    assert len(await lines_of_runs(store)) == MOST_RUNS


class NoRuns(InMemoryLightningStore):
    """A store of a user's own that does not store runs."""

    query_runs = LightningStore.query_runs


async def test_a_store_without_runs_has_the_rest_of_the_page() -> None:
    response = await prometheus_response(NoRuns())
    assert b"agl_store_up 1.0" in response.body
    assert b"agl_run_step{" not in response.body


async def test_a_damaged_record_leaves_out_the_figures_of_its_own_run_only(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "runs.db")
    for run_id in ("whole", "damaged"):
        await store.start_run(run_id)
        await store.add_run_records(run_id, [RunRecord(kind="step", step=1, data={"reward": 0.5})])
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as db, db:
        db.execute("UPDATE run_records SET body = '{\"kind\": 1' WHERE run_id = 'damaged'")
    assert sorted(await lines_of_runs(store)) == ['agl_run_reward{run="whole"} 0.5', 'agl_run_step{run="whole"} 1.0']
