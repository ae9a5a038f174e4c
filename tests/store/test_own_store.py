"""A store that a user wrote, for an earlier form of the contract, works wherever the framework takes a store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.errors import BadRequestError
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.store import LightningStore, LightningStoreThreaded
from agentlightning.store.operations import names_of
from agentlightning.store.utils import rollout_status_from_attempt, scan_unhealthy_rollouts
from agentlightning.store.wrappers import LightningStoreScoped, complete
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptError,
    EnqueueRolloutRequest,
    RolloutConfig,
    RolloutFilter,
)
from tests.store.conftest import Serve
from tests.store.parts import required, span_of
from tests.stubs.model_server import ModelServer
from tests.stubs.redis_like_store import KeyValueServer, RedisLikeStore


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer() as running:
        yield running


@pytest.fixture
def own(server: KeyValueServer) -> RedisLikeStore:
    return RedisLikeStore(server.url)


@pytest.fixture(params=["completed", "threaded", "run", "client"])
async def store(
    request: pytest.FixtureRequest, own: RedisLikeStore, serve: Serve, stack: AsyncExitStack
) -> LightningStore:
    """The user's store behind each of the framework's."""
    if request.param == "completed":
        return complete(own)
    if request.param == "run":
        return LightningStoreScoped(own, "run-1")
    if request.param == "client":
        return (await serve(own))[1]
    threaded = LightningStoreThreaded(own)
    stack.push_async_callback(threaded.close)
    return threaded


# --- the framework's operations over it --------------------------------------------------------------------------


async def test_a_claim_waits_for_work_that_comes_later(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("w", timeout=20))
    await asyncio.sleep(0.05)
    made = await store.enqueue_rollout({"q": 1})
    claimed = required(await asyncio.wait_for(waiting, 10))
    assert (claimed.rollout_id, claimed.attempt.worker_id) == (made.rollout_id, "w")
    assert await store.dequeue_rollout(timeout=0.02) is None


async def test_batches_are_made_of_single_calls(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(3)])
    claims = await store.dequeue_many_rollouts(limit=2, worker_id="w")
    assert [claim.input for claim in claims] == [0, 1]
    pairs = [(claim.rollout_id, claim.attempt.attempt_id) for claim in (claims[0], claims[1], claims[0])]
    assert await store.get_many_span_sequence_ids(pairs) == [1, 1, 2]


async def test_spans_that_ask_for_a_number_get_one(store: LightningStore) -> None:
    await store.enqueue_rollout("x")
    claimed = required(await store.dequeue_rollout())
    asking = span_of(claimed)
    stored = await store.add_many_spans([asking, span_of(claimed, number=7)])
    assert [s.sequence_id for s in stored] == [1, 7]
    assert await store.add_span(asking) is None
    assert [s.sequence_id for s in await store.query_spans(claimed.rollout_id)] == [1, 7]


async def test_lists_are_sorted_and_cut(store: LightningStore) -> None:
    made = [await store.enqueue_rollout(i, mode=mode) for i, mode in enumerate(("val", "train", "test"))]
    assert [rollout.input for rollout in await store.query_rollouts(limit=2, offset=1)] == [1, 2]
    page = await store.query_rollouts(sort_by="mode", sort_order="desc", limit=2)
    assert ([rollout.input for rollout in page], page.total, page.limit) == ([0, 1], 3, 2)
    await store.start_attempt(made[0].rollout_id)
    assert (await store.query_attempts(made[0].rollout_id, limit=5, sort_order="desc")).total == 1
    with pytest.raises(BadRequestError, match="allowed fields are"):
        await store.query_rollouts(sort_by="colour")


class PlainLists(RedisLikeStore):
    """Takes a limit and answers with a list; gives spans no numbers."""

    async def query_rollouts(self, *, limit: int = -1) -> Any:
        rollouts = list(await super().query_rollouts())
        return rollouts if limit == -1 else rollouts[:limit]

    get_next_span_sequence_id = LightningStore.get_next_span_sequence_id


class PlainListsInMemory(agl.InMemoryLightningStore):
    """A store of the package, of which a list is overridden."""

    async def query_rollouts(self, **filters: Any) -> Any:
        return list(await super().query_rollouts(**filters))


@pytest.mark.parametrize("kind", [PlainLists, PlainListsInMemory])
async def test_a_plain_list_reaches_every_caller_as_a_page(
    kind: type[Any], server: KeyValueServer, serve: Serve
) -> None:
    own: LightningStore = kind() if kind is PlainListsInMemory else kind(server.url)
    for number in range(3):
        await own.enqueue_rollout(number)
    threaded = LightningStoreThreaded(own)
    _, client = await serve(own)
    for store in (complete(own), threaded, client):
        page = await store.query_rollouts(limit=1, sort_by="start_time", sort_order="desc")
        assert ([row.input for row in page], page.limit, page.total) == ([2], 1, 3)
        assert (await store.query_rollouts()).total == 3
    await threaded.close()


async def test_spans_of_a_store_that_gives_no_numbers_follow_those_that_it_has(server: KeyValueServer) -> None:
    own = PlainLists(server.url)
    claimed = await own.start_rollout("x")
    store = complete(own)
    await store.add_span(span_of(claimed, number=4))
    pair = (claimed.rollout_id, claimed.attempt.attempt_id)
    assert await store.get_many_span_sequence_ids([pair, pair]) == [5, 6]
    stored = await asyncio.gather(*(store.add_span(span_of(claimed)) for _ in range(5)))
    assert sorted(each.sequence_id for each in stored if each is not None) == [7, 8, 9, 10, 11]


async def test_a_tracer_by_hand_takes_a_store_of_ones_own(server: KeyValueServer) -> None:
    own = PlainLists(server.url)
    claimed = await own.start_rollout("x")
    tracer = agl.OtelTracer(store=own)

    def trace() -> None:
        tracer.open_rollout(claimed.rollout_id)
        tracer.open_attempt()
        tracer.emit_span("by hand")
        tracer.close_attempt()
        tracer.close_rollout()

    await asyncio.to_thread(trace)
    assert [(span.name, span.sequence_id) for span in await own.query_spans(claimed.rollout_id)] == [("by hand", 1)]


async def test_how_an_attempt_ended_is_kept(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    error = AttemptError(type="builtins.ValueError", message="no")
    await store.update_attempt(started.rollout_id, "latest", metadata={"mine": 1})
    ended = await store.update_attempt(
        started.rollout_id, started.attempt.attempt_id, status="failed", outcome="policy_fault", error=error
    )
    latest = await store.get_latest_attempt(started.rollout_id)
    [listed] = await store.query_attempts(started.rollout_id)
    for attempt in (ended, latest, listed):
        assert attempt is not None
        assert (attempt.status, attempt.outcome, attempt.error) == ("failed", "policy_fault", error)
        assert (attempt.metadata or {})["mine"] == 1


async def test_summaries_and_figures_are_made_of_its_rollouts_and_spans(store: LightningStore) -> None:
    for number in range(3):
        await store.enqueue_rollout({"number": number}, mode="train", metadata={"step": number // 2})
    claimed = required(await store.dequeue_rollout("w"))
    rewarded = span_of(claimed)
    rewarded.attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
    await store.add_span(rewarded)
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    if isinstance(store, LightningStoreScoped):  # this store does not separate runs: its rollouts are of none
        assert (await store.query_rollout_summaries()).total == 0
        return
    page = await store.query_rollout_summaries(sort_by="reward", limit=2)
    assert (page.total, len(page)) == (3, 2)
    first = page[0]
    assert (first.rollout_id, first.reward, first.spans) == (claimed.rollout_id, 0.5, 1)
    rest = await store.query_rollout_summaries(sort_by="reward", limit=2, cursor=page.cursor)
    assert [summary.reward for summary in [*page, *rest]] == [0.5, None, None]
    summaries = await store.query_rollout_summaries(filter=RolloutFilter(input_contains='"NUMBER": 2'))
    assert [summary.input_preview for summary in summaries] == ['{"number": 2}']
    figures = (await store.aggregate_rollouts()).groups
    assert [(group.key, group.count, group.mean) for group in figures] == [(0, 2, 0.5), (1, 1, None)]


async def test_outlines_versions_and_spans_are_made_of_what_it_answers(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    stored = required(await store.add_span(span_of(started)))
    [outline] = await store.query_span_outlines(started.rollout_id)
    assert (outline.span_id, outline.attributes) == (stored.span_id, len(stored.attributes))
    stored_span = required(await store.get_span(started.rollout_id, started.attempt.attempt_id, stored.span_id))
    assert stored_span.span_id == stored.span_id
    published = await store.add_resources({})
    assert [update.version for update in await store.query_resource_versions(published.resources_id)] == [1]
    with pytest.raises(NotImplementedError, match="does not store runs"):
        await store.get_token_texts("v", [1])


async def test_what_it_cannot_do_is_an_error_that_names_it(store: LightningStore) -> None:
    with pytest.raises(NotImplementedError, match="RedisLikeStore does not implement delete_rollouts"):
        await store.delete_rollouts(rollout_ids=["x"])
    with pytest.raises(NotImplementedError, match="RedisLikeStore does not implement update_worker"):
        await store.update_worker("w")
    with pytest.raises(BadRequestError, match=r"RedisLikeStore.*does not support .*'priority'"):
        await store.enqueue_rollout("x", priority=1)
    with pytest.raises(BadRequestError, match=r"RedisLikeStore\.query_spans does not support 'name_contains'"):
        await store.query_spans("ro-1", name_contains="x")


async def test_a_store_that_keeps_no_runs_says_so(store: LightningStore) -> None:
    for call in (store.start_run("r"), store.query_runs(), store.add_run_records("r", []), store.get_vocabulary("v")):
        with pytest.raises(NotImplementedError, match="does not store runs"):
            await call
    assert (await store.enqueue_rollout("x")).status == "queuing"  # and it works on


async def test_a_store_of_the_contract_before_runs_is_used_as_it_is_and_says_that_it_keeps_none() -> None:
    class BeforeRuns(agl.InMemoryLightningStore):
        """Has each operation but those of runs."""

    for name in names_of("run"):
        setattr(BeforeRuns, name, getattr(LightningStore, name))
    store = BeforeRuns()
    assert complete(store) is store
    with pytest.raises(NotImplementedError, match="BeforeRuns does not store runs"):
        await complete(store).start_run("r")


async def test_a_claim_that_nobody_waits_for_goes_back_to_the_queue(own: RedisLikeStore) -> None:
    """The store has handed the rollout out, and the caller has left before the answer arrives."""
    event = asyncio.Event()

    class Slow(RedisLikeStore):
        async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
            claimed = await super().dequeue_rollout(worker_id)
            event.set()
            await asyncio.sleep(0.05)
            return claimed

    made = await own.enqueue_rollout("x")
    slow = Slow("kv://{}:{}".format(*own._address))
    asking = asyncio.create_task(complete(slow).dequeue_rollout(timeout=10))
    await event.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    again = required(await own.dequeue_rollout())
    assert (again.rollout_id, again.attempt.sequence_id) == (made.rollout_id, 2)


async def test_a_store_that_is_not_thread_safe_has_one_call_at_a_time_while_others_wait(own: RedisLikeStore) -> None:
    threaded = LightningStoreThreaded(own)
    waiting = [asyncio.create_task(threaded.dequeue_rollout(timeout=0.3)) for _ in range(4)]
    await asyncio.gather(*(threaded.get_rollout_by_id("x") for _ in range(40)), *waiting)
    await threaded.close()
    assert own.most_running == 1


async def test_runs_that_it_does_not_know_are_told_of_once(
    own: RedisLikeStore, caplog: pytest.LogCaptureFixture
) -> None:
    view = LightningStoreScoped(own, "run-1")
    with caplog.at_level(logging.WARNING, "agentlightning"):
        await view.enqueue_rollout("x")
        await view.dequeue_rollout()
    assert [record.getMessage() for record in caplog.records] == [
        "RedisLikeStore does not separate runs; use a separate store for each run"
    ]


async def test_a_store_that_knows_the_contract_is_used_as_it_is() -> None:
    class Counting(agl.InMemoryLightningStore):
        """Overrides an operation without changing its form."""

        claims = 0

        async def start_attempt(self, *args: Any, **kwargs: Any) -> AttemptedRollout:
            self.claims += 1
            return await super().start_attempt(*args, **kwargs)

    counting = Counting()
    assert complete(counting) is counting
    assert complete(LightningStoreThreaded(counting)).__class__ is LightningStoreThreaded
    await counting.start_attempt((await counting.enqueue_rollout(1)).rollout_id)
    assert counting.claims == 1


async def test_a_tracer_alone_delivers_to_it(own: RedisLikeStore) -> None:
    claimed = await own.start_rollout("x")
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    tracer = agl.OtelTracer()
    with tracer.lifespan(own):
        async with tracer.trace_context("work", **ids):
            agl.emit_reward(1.0)
        with pytest.warns(DeprecationWarning, match="pass the store to init_worker"):
            async with tracer.trace_context("more", store=own, **ids):
                agl.emit_reward(0.5)
    assert agl.find_final_reward([*await own.query_spans(claimed.rollout_id)]) == 0.5


async def test_a_gateway_alone_records_in_it(server: KeyValueServer) -> None:
    own = RedisLikeStore(server.url, thread_safe=True)
    claimed = await own.start_rollout("x")
    with ModelServer() as model:
        proxy = agl.LLMProxy(model_list=[model.entry("policy")], store=own)
        await proxy.start()
        resource = proxy.as_resource().with_attempted_rollout(claimed)
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{resource.get_base_url()}/chat/completions", json=body) as reply,
        ):
            assert reply.status == 200, await reply.text()
        await proxy.stop()
    [triplet] = agl.TracerTraceToTriplet().adapt([*await own.query_spans(claimed.rollout_id)])
    assert triplet.response["token_ids"]


# --- a whole run -------------------------------------------------------------------------------------------------


@agl.rollout
def tenth(task: int) -> float:
    """An agent: a tenth of the task, and for one task a fault of the policy."""
    if task == 3:
        raise agl.PolicyFault("three", reward=-1.0)
    return task / 10


class OwnTrainer(agl.Trainer):
    """A Trainer whose store is the user's, made where the Trainer makes its store."""

    url = ""
    kind: type[RedisLikeStore] = RedisLikeStore

    def _make_store(self, store: Any, strategy: ExecutionStrategy) -> LightningStore:
        return self.kind(url=self.url, thread_safe=False)


@pytest.mark.parametrize("store", [RedisLikeStore, PlainLists])
@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "shm"},
        {"type": "shm", "managed_store": False},
        {"type": "cs", "server_port": 0},
    ],
    ids=["threads", "threads, as it is", "processes"],
)
def test_fit_runs_to_its_end_over_it(
    server: KeyValueServer, strategy: dict[str, Any], store: type[RedisLikeStore]
) -> None:
    class Mine(OwnTrainer):
        url = server.url
        kind = store

    trainer = Mine(algorithm=agl.Baseline(), strategy=strategy, n_runners=1)
    trainer.fit(tenth, train_dataset=[1, 2, 3, 4])
    assert trainer.result.rewards == [0.1, 0.2, -1.0, 0.4]
    assert trainer.result.outcomes == {"scored": 3, "policy_fault": 1}


async def test_a_runner_alone_runs_its_queue_and_says_that_it_sends_no_heartbeats(
    own: RedisLikeStore, caplog: pytest.LogCaptureFixture
) -> None:
    made = [await own.enqueue_rollout(task) for task in (1, 3)]
    runner = agl.LitAgentRunner[int](agl.OtelTracer(), max_rollouts=2, heartbeat_interval=0.02)
    with caplog.at_level(logging.WARNING, "agentlightning.runner"), runner.run_context(agent=tenth, store=own):
        await runner.iter()
    assert caplog.text.count("the store has no heartbeats: lost workers are not detected") == 1
    assert "heartbeat failed" not in caplog.text
    ended = await own.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made], timeout=5)
    assert [rollout.status for rollout in ended] == ["succeeded", "failed"]
    spans = await own.query_spans(made[0].rollout_id)
    assert agl.find_final_reward(list(spans)) == 0.1


# --- the rules, for whoever writes one ---------------------------------------------------------------------------


def attempt(status: Any, number: int = 1, **fields: Any) -> Attempt:
    values = {"rollout_id": "ro-1", "attempt_id": f"at-{number}", "sequence_id": number, "start_time": 0.0}
    return Attempt.model_construct(**{**dict(Attempt(**values)), "status": status, **fields})


@pytest.mark.parametrize(
    ("status", "number", "expected"),
    [
        ("preparing", 1, "preparing"),
        ("running", 1, "running"),
        ("succeeded", 2, "succeeded"),
        ("failed", 1, "requeuing"),
        ("failed", 2, "failed"),
        ("timeout", 1, "failed"),
        ("unresponsive", 1, "requeuing"),
    ],
)
async def test_the_status_of_a_rollout_follows_from_its_latest_attempt(status: str, number: int, expected: str) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed", "unresponsive"])
    assert await rollout_status_from_attempt(attempt(status, number), config) == expected


async def test_an_attempt_without_a_status_gives_none() -> None:
    with pytest.raises(ValueError, match="Invalid attempt status: odd"):
        await rollout_status_from_attempt(attempt("odd"), RolloutConfig())


async def test_unhealthy_attempts_are_found_with_what_they_become() -> None:
    def held(config: RolloutConfig, **fields: Any) -> AttemptedRollout:
        latest = attempt("running", **fields)
        rollout = {"rollout_id": "ro-1", "input": 1, "start_time": 0.0, "config": config}
        return AttemptedRollout.model_construct(**rollout, attempt=latest)

    now = time.time()
    rollouts = [
        held(RolloutConfig(timeout_seconds=1.0), number=1, last_heartbeat_time=now),
        held(RolloutConfig(unresponsive_seconds=1.0), number=2),
        held(RolloutConfig(unresponsive_seconds=60.0), number=3, last_heartbeat_time=now),
        held(RolloutConfig(), number=4),
        AttemptedRollout.model_construct(rollout_id="ro-2", config=RolloutConfig(timeout_seconds=1.0), attempt=None),
    ]
    assert await scan_unhealthy_rollouts(rollouts) == {("ro-1", "at-1"): "timeout", ("ro-1", "at-2"): "unresponsive"}
