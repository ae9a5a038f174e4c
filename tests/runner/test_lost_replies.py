"""One reply of the store gets lost on a connection that stays open, while heartbeats pass on another one: every rollout
is run once all the same. And the store is away while finished work waits: it is kept, or made again and marked.

A proxy stands between the runner and a real server. It swallows the reply to the n-th claim, delivery or report.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentlightning.emitter import emit_message
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.http.operations import OPERATIONS
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Attempt, RolloutConfig
from tests.chaos.proxy import Fate, FaultyProxy
from tests.chaos.stores import SPECS, Place, fresh_place
from tests.stubs.running import serving

pytestmark = pytest.mark.heavy

LEASE = 6.0
SHORT_LEASE = 1.0
LIMIT_SECONDS = 90.0
"""Seconds after which a call that hangs ends."""
CLAIM, SPANS = "/v1/agl/queues/rollouts/dequeue", "/v1/agl/spans/batch"
REPORT, RESOURCES = "/v1/agl/rollouts/ro-[^/]+/attempts/at-.*", "/v1/agl/resources/.*"
SEVERAL_TRIES: dict[str, Any] = {"request_timeout": 0.5, "deadline": 10.0}
ONE_TRY: dict[str, Any] = {"request_timeout": 0.5, "retry_delays": ()}


class ProxiedStore:
    """A store behind a server behind a proxy, and an agent that counts how often each task is run."""

    def __init__(self, store: LightningStore, proxy: FaultyProxy) -> None:
        self.store, self.proxy = store, proxy
        self.runs: Counter[int] = Counter()
        self.slow = 0.0

        @rollout
        async def agent(task: int) -> float:
            self.runs[task] += 1
            emit_message(f"task {task}")
            await asyncio.sleep(self.slow)
            return float(task)

        self.agent = agent

    async def run_tasks(self, tasks: int, client: dict[str, Any], **settings: Any) -> list[list[Attempt]]:
        """Run tasks to their end with a runner behind the proxy; return the attempts of each."""
        config = RolloutConfig(infrastructure_retries=10)
        ids = [(await self.store.enqueue_rollout(task, config=config)).rollout_id for task in range(tasks)]
        stop, behind = threading.Event(), LightningStoreClient(self.proxy.endpoint, **client)
        options: dict[str, Any] = {"heartbeat_interval": 0.2, "interval_jitter": 0.0, "poll_interval": 0.3, **settings}
        runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), **options)
        with runner.run_context(agent=self.agent, store=behind):
            serving = asyncio.create_task(runner.iter(event=stop))
            try:
                waiting = asyncio.create_task(self.store.wait_for_rollouts(rollout_ids=ids, timeout=LIMIT_SECONDS))
                await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                ended = await waiting
            finally:
                stop.set()
                await serving
        await behind.close()
        assert [rollout.status for rollout in ended] == ["succeeded"] * tasks
        return [list(await self.store.query_attempts(rollout_id)) for rollout_id in ids]

    async def run_until_one_attempt_was_lost(self, path: str, fate: Fate) -> list[list[Attempt]]:
        """Run one task; requests to this path fail until an attempt has ended without them."""
        self.proxy.plan_nth(path, fate, *range(1, 10_000))

        async def come_back() -> None:
            while not any(w.last_idle_time for w in await self.store.query_workers()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self.proxy.plan_nothing()

        coming = asyncio.create_task(come_back())
        attempts = await self.run_tasks(1, ONE_TRY, store_unreachable_timeout=0.5)
        await coming
        return attempts


@contextlib.asynccontextmanager
async def proxied_at(place: Place, lease_seconds: float) -> AsyncIterator[ProxiedStore]:
    async with place.opened(lease_seconds=lease_seconds, scan_debounce_seconds=0.1, synchronous="NORMAL") as store:
        await store.add_resources({})
        async with (
            serving(store) as server,
            FaultyProxy(urlsplit(server.endpoint).port or 0, 1, chances={"pass": 1}) as proxy,
        ):
            yield ProxiedStore(store, proxy)


@pytest.fixture(params=SPECS)
async def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ProxiedStore]:
    async with proxied_at(fresh_place(request.param, request, tmp_path), LEASE) as proxied:
        yield proxied


@pytest.fixture
async def in_memory(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ProxiedStore]:
    async with proxied_at(fresh_place("memory", request, tmp_path), SHORT_LEASE) as proxied:
        yield proxied


# --- one lost reply --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [SEVERAL_TRIES, ONE_TRY], ids=["several tries", "one try"])
@pytest.mark.parametrize("path", [CLAIM, SPANS, REPORT], ids=["claim", "spans", "report"])
async def test_a_reply_that_is_lost_on_an_open_connection_costs_no_rollout_and_repeats_none(
    proxied: ProxiedStore, path: str, client: dict[str, Any]
) -> None:
    proxied.proxy.plan_nth(path, "silence", 1)
    attempts = await proxied.run_tasks(3, client)
    assert proxied.proxy.seen["silence"] == 1
    assert proxied.runs == {0: 1, 1: 1, 2: 1}
    assert [[(a.status, a.outcome) for a in each] for each in attempts] == [[("succeeded", "scored")]] * 3


@pytest.mark.parametrize("fate", ["silence", "deaf"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("path", [CLAIM, SPANS, REPORT, RESOURCES], ids=["claim", "spans", "report", "resources"])
async def test_whichever_reply_is_lost_with_several_lanes_nothing_is_stranded(
    in_memory: ProxiedStore, path: str, number: int, fate: Fate
) -> None:
    in_memory.proxy.plan_nth(path, fate, number)
    attempts = await in_memory.run_tasks(6, ONE_TRY, concurrency=3)
    assert [each[-1].outcome for each in attempts] == ["scored"] * 6
    lost = [a.outcome_reason for each in attempts for a in each[:-1]]
    assert set(lost) <= {"lease_expired"}, "an attempt before the last one can only have lost its lease"


async def test_a_claim_that_its_worker_never_heard_of_goes_to_another_while_the_worker_beats(
    in_memory: ProxiedStore,
) -> None:
    store = in_memory.store
    in_memory.slow = 3 * SHORT_LEASE
    claims: list[Any] = []

    async def steal() -> None:
        """Claim in the name of the runner, with a request whose reply and token are lost."""
        while not (workers := [w.worker_id for w in await store.query_workers(status_in=["busy"])]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        claims.append(await store.dequeue_rollout(workers[0]))

    stealing = asyncio.create_task(steal())
    attempts = await in_memory.run_tasks(2, SEVERAL_TRIES)
    await stealing
    [stolen] = claims
    assert in_memory.runs == {0: 1, 1: 1}
    for each in attempts:
        reasons = [(a.status, a.outcome_reason) for a in each]
        lost = [("unresponsive", "lease_expired")] if each[0].attempt_id == stolen.attempt.attempt_id else []
        assert reasons == [*lost, ("succeeded", None)]


async def test_a_report_that_is_never_answered_lets_the_lease_run_out(
    in_memory: ProxiedStore, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = await in_memory.run_until_one_attempt_was_lost(REPORT, "deaf")
    untold = caplog.text.count("its lease will run out")
    assert untold >= 1
    assert in_memory.runs == {0: untold + 1}
    lapsed = [("unresponsive", "lease_expired")] * untold
    assert [(a.status, a.outcome_reason) for a in attempts[0]] == [*lapsed, ("succeeded", None)]


# --- the store is away while finished work waits ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [SPANS, REPORT], ids=["spans", "report"])
async def test_finished_work_waits_for_as_long_as_the_runner_waits_for_the_store(
    in_memory: ProxiedStore, path: str
) -> None:
    in_memory.proxy.plan_nth(path, "lost request", 1, 2, 3, 4, 5)
    attempts = await in_memory.run_tasks(1, ONE_TRY, store_unreachable_timeout=LIMIT_SECONDS)
    assert in_memory.proxy.seen["lost request"] == 5
    assert in_memory.runs == {0: 1}
    assert [(a.status, a.outcome) for a in attempts[0]] == [("succeeded", "scored")]


@pytest.mark.parametrize(
    ("path", "reason"), [(SPANS, "spans_lost"), (RESOURCES, "store_unreachable")], ids=["spans", "resources"]
)
async def test_what_was_lost_because_the_store_was_away_is_marked_and_made_again(
    in_memory: ProxiedStore, path: str, reason: str
) -> None:
    attempts = await in_memory.run_until_one_attempt_was_lost(path, "lost request")
    *lost, last = [(a.status, a.outcome, a.outcome_reason) for a in attempts[0]]
    assert set(lost) == {("failed", "infrastructure_fault", reason)}
    assert last == ("succeeded", "scored", None)
    assert in_memory.runs == {0: 1 + (len(lost) if path == SPANS else 0)}


# --- the client's bounds ---------------------------------------------------------------------------------------------


async def test_a_silent_connection_gets_a_part_of_the_deadline_and_the_next_try_another_connection(
    in_memory: ProxiedStore,
) -> None:
    client = LightningStoreClient(in_memory.proxy.endpoint)
    row, spent, tries = OPERATIONS["dequeue_many_rollouts"], 0.0, 0
    while spent < client._deadline:
        tries += 1
        spent += client._limit(row, tries, spent, None)
    assert (tries, spent) == (3, client._deadline), "three tries, which fill the deadline"
    await client.close()
