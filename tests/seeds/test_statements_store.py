"""Statements of the documents about data, the store, its server and traces; the rows are in `statements/`."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.store.client_server import API_AGL_PREFIX
from agentlightning.types import core, tracer
from tests.seeds.parts import claimed, traced

# --- data ------------------------------------------------------------------------------------------------------------

FIELDS: dict[type[Any], str] = {
    agl.Rollout: "rollout_id input start_time end_time mode status config metadata resources_id",
    agl.Attempt: "attempt_id rollout_id status sequence_id reward start_time end_time",
    agl.Triplet: "prompt response reward",
    agl.Worker: "worker_id status heartbeat_stats last_heartbeat_time current_rollout_id current_attempt_id",
    agl.ResourcesUpdate: "resources_id version create_time update_time resources",
    agl.Span: "rollout_id attempt_id sequence_id trace_id span_id parent_id name status attributes events links "
    "start_time end_time context parent resource",
    agl.LLM: "endpoint model sampling_parameters",
}
"""Classes of the documents, and the fields that their tables give them."""


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_a_class_has_the_fields_of_its_table(kind: Any) -> None:
    assert set(FIELDS[kind].split()) <= set(kind.model_fields)


def test_the_types_of_tasks_traces_and_queries_are_in_their_modules() -> None:
    for name in ("Task", "TaskInput", "TaskIfAny", "Dataset", "RolloutConfig", "RolloutMode", "RolloutStatus"):
        assert getattr(core, name) is getattr(agl, name)
    for name in ("FilterOptions", "FilterField", "SortOptions", "PaginatedResult", "Worker", "WorkerStatus"):
        assert getattr(core, name) is getattr(agl, name)
    for name in ("Span", "SpanCoreFields", "OtelResource", "TraceStatus"):
        assert getattr(tracer, name) is getattr(agl, name)


async def test_a_task_has_no_fields_of_the_manual() -> None:
    assert not {"task_id", "instance_id", "dataset"} & set(agl.Task.model_fields)


# --- store -----------------------------------------------------------------------------------------------------------


async def test_a_rollout_from_the_queue_to_its_end() -> None:
    store = agl.InMemoryLightningStore()
    queued = await store.enqueue_rollout({"prompt": "Solve this problem"}, mode="train")
    claim = await store.dequeue_rollout(worker_id="worker-1")
    assert claim is not None
    assert (claim.rollout_id, claim.attempt.worker_id) == (queued.rollout_id, "worker-1")
    [busy] = await store.query_workers()
    assert (busy.status, busy.current_rollout_id, busy.current_attempt_id) == (
        "busy", claim.rollout_id, claim.attempt.attempt_id,
    )  # fmt: skip
    await store.finish_rollout(claim.rollout_id, response={"answer": 42})
    [idle] = await store.query_workers()
    assert (idle.status, idle.current_rollout_id) == ("idle", None)
    ended = await store.get_rollout_by_id(queued.rollout_id)
    assert ended is not None
    assert ended.status == "succeeded"
    assert isinstance(ended, agl.AttemptedRollout)
    assert (ended.worker_id, [attempt.status for attempt in ended.attempts]) == ("worker-1", ["succeeded"])


async def test_the_words_of_the_life_of_a_rollout_are_operations() -> None:
    store = agl.InMemoryLightningStore()
    first = await store.start_rollout(1)
    await store.fail_rollout(first.rollout_id, reason="a wrong answer")
    failed = await store.get_rollout_by_id(first.rollout_id)
    again = await store.start_attempt(first.rollout_id)
    await store.finish_attempt(first.rollout_id, again.attempt.attempt_id)
    done = await store.get_rollout_by_id(first.rollout_id)
    assert failed is not None
    assert done is not None
    assert (failed.status, done.status) == ("failed", "succeeded")
    assert [attempt.sequence_id for attempt in await store.query_attempts(first.rollout_id)] == [1, 2]
    stopped = await store.update_rollout((await store.enqueue_rollout(2)).rollout_id, status="cancelled")
    assert stopped.status == "cancelled"


async def test_a_heartbeat_keeps_its_statistics_and_time() -> None:
    store = agl.InMemoryLightningStore()
    worker = await store.update_worker("worker-1", heartbeat_stats={"queue_depth": 2})
    assert worker.heartbeat_stats == {"queue_depth": 2}
    assert worker.last_heartbeat_time is not None


async def test_a_store_in_memory_says_how_large_its_spans_are() -> None:
    store = agl.InMemoryLightningStore()
    ids = await claimed(store)
    before = (await store.statistics())["total_span_bytes"]
    await traced(lambda: agl.emit_message("x" * 1000), agl.OtelTracer(store=store), **ids)
    assert (await store.statistics())["total_span_bytes"] > before


# --- server ----------------------------------------------------------------------------------------------------------


Rest = Callable[..., Awaitable[Any]]


@pytest.fixture
async def rest(server: agl.LightningStoreServer) -> AsyncIterator[Rest]:
    """Sends a request to the REST API and gives its answer."""
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, body: Any = None) -> Any:
            address = f"{server.endpoint}/v1{API_AGL_PREFIX}{path}"
            async with session.request(method, address, json=body) as answer:
                assert answer.status in (200, 201), (path, answer.status, await answer.text())
                return await answer.json()

        yield ask


async def test_the_routes_of_rollouts_and_attempts(rest: Rest) -> None:
    [rollout] = await rest("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": "x"}]})
    path = f"/rollouts/{rollout['rollout_id']}"
    assert (await rest("GET", path))["status"] == "queuing"
    assert (await rest("POST", f"{path}/start"))["attempt"]["sequence_id"] == 1
    second = await rest("POST", f"{path}/attempt")
    await rest("POST", f"{path}/attempt/{second['attempt']['attempt_id']}/finish", {})
    assert (await rest("GET", path))["status"] == "succeeded"
    other = await rest("POST", "/rollouts", {"input": "y"})
    await rest("POST", f"/rollouts/{other['rollout_id']}/finish", {"response": "done"})
    assert (await rest("GET", f"/rollouts/{other['rollout_id']}"))["status"] == "succeeded"


async def test_a_post_of_a_rollout_starts_it(rest: Rest) -> None:
    started = await rest("POST", "/rollouts", {"input": "x"})
    assert (started["status"], started["attempt"]["sequence_id"]) == ("preparing", 1)


async def test_the_routes_of_spans(rest: Rest) -> None:
    started = await rest("POST", "/rollouts", {"input": "x"})
    ids = {"rollout_id": started["rollout_id"], "attempt_id": started["attempt"]["attempt_id"]}
    span = agl.Span.from_attributes(attributes={"tool": "web_search"}, sequence_id=1, **ids)
    await rest("POST", "/spans", json.loads(span.model_dump_json()))
    page = await rest("POST", "/spans/search", ids)
    assert [item["attributes"]["tool"] for item in page["items"]] == ["web_search"]


async def test_the_routes_of_resources(rest: Rest) -> None:
    prompt = agl.PromptTemplate(template="Hello", engine="f-string").model_dump()
    made = await rest("POST", "/resources", {"main_prompt": prompt})
    path = f"/resources/{made['resources_id']}"
    assert (await rest("GET", path))["version"] == 1
    assert (await rest("PUT", path, {"main_prompt": prompt}))["version"] == 2


async def test_the_routes_of_workers_and_statistics(rest: Rest) -> None:
    assert (await rest("POST", "/workers", {"worker_id": "worker-1"}))["worker_id"] == "worker-1"
    beat = await rest("POST", "/workers/worker-1/heartbeat", {"heartbeat_stats": {"queue_depth": 2}})
    assert beat["heartbeat_stats"] == {"queue_depth": 2}
    assert [worker["worker_id"] for worker in (await rest("GET", "/workers"))["items"]] == ["worker-1"]
    assert (await rest("GET", "/statistics"))["total_rollouts"] == 0


async def test_a_server_describes_its_routes(server: agl.LightningStoreServer) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.endpoint}/openapi.json") as answer:
            assert "/v1/agl/rollouts/{rollout_id}/start" in (await answer.json())["paths"]
        async with session.get(f"{server.endpoint}/docs") as answer:
            assert answer.status == 404


async def test_a_server_in_another_process_is_a_client(server: agl.LightningStoreServer) -> None:
    away = pickle.loads(pickle.dumps(server))
    made = await server.enqueue_rollout("x")
    rollout = await away.get_rollout_by_id(made.rollout_id)
    assert (rollout.input, type(server).__name__) == ("x", "LightningStoreServer")
    await away.close()


async def test_a_tracer_writes_to_the_store_of_a_server(
    server: agl.LightningStoreServer, client: agl.LightningStoreClient
) -> None:
    ids = await claimed(client)
    await traced(lambda: agl.emit_reward(0.5), agl.OtelTracer(store=client), **ids)
    assert agl.find_final_reward(await server.query_spans(ids["rollout_id"])) == 0.5


def test_a_client_of_a_store_speaks_http_alone() -> None:
    with pytest.raises(ValueError, match="http"):
        agl.LightningStoreClient("grpc://127.0.0.1:4747")
