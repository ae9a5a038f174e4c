"""The operation table is whole: every operation has a method, a script behind it and a row, on both ends alike."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.errors import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    StoreUnreachableError,
    UnauthorizedError,
)
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.http.openapi import openapi_document
from agentlightning.store.http.operations import OPERATIONS, PREFIX
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.operations import names_of
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.chaos.proxy import FaultyProxy
from tests.store.conftest import Serve
from tests.store.parts import serving


def test_every_operation_has_a_row_and_an_implementation() -> None:
    sent_as_others = {"enqueue_rollout", "dequeue_rollout", "add_otel_span"}
    assert set(names_of()) - sent_as_others <= set(OPERATIONS)
    made_of_others = {"query_resource_versions", "get_token_texts", "add_otel_span"}
    assert {n for n in names_of() if getattr(EngineStore, n) is getattr(LightningStore, n)} == made_of_others


def test_the_published_interface_is_the_one_that_is_served() -> None:
    written = Path(__file__).parents[3] / "docs" / "reference" / "openapi.json"
    assert json.loads(written.read_text()) == json.loads(json.dumps(openapi_document())), (
        "the HTTP interface changed; write it down with: python -m agentlightning.store.http.openapi > " + str(written)
    )


async def test_a_client_with_the_token_comes_in_and_one_without_is_told_why(serve: Serve) -> None:
    guarded, client = await serve(token="right")
    assert (await client.enqueue_rollout("x")).status == "queuing"
    stranger = LightningStoreClient(guarded.endpoint)
    with pytest.raises(UnauthorizedError, match="AGL_TOKEN"):
        await stranger.statistics()
    await stranger.close()


def test_a_server_beyond_loopback_without_a_token_refuses_and_names_both_ways_out() -> None:
    with pytest.raises(RuntimeError, match=r"AGL_TOKEN=.*AGL_INSECURE=1"):
        LightningStoreServer(InMemoryLightningStore(), host="0.0.0.0", port=0)
    LightningStoreServer(InMemoryLightningStore(), host="0.0.0.0", port=0, token="a-token-of-16-or-more")


async def test_a_port_that_is_taken_is_said_before_anything_starts(serve: Serve) -> None:
    server, _ = await serve()
    port = server.server_launcher.port
    with pytest.raises(RuntimeError, match=str(port)):
        LightningStoreServer(InMemoryLightningStore(), port=port).bind()


async def test_an_outage_is_an_error_that_says_what_was_tried() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    client = LightningStoreClient(server.endpoint, deadline=0.2)
    server.server_launcher.bind()
    await server.start()
    await server.stop()
    with pytest.raises(StoreUnreachableError, match=r"did not respond to get_rollout_by_id \(tried \d+ times"):
        await client.get_rollout_by_id("x")
    with pytest.raises(StoreUnreachableError):
        await client.dequeue_rollout()
    await client.close()


async def test_a_client_goes_on_when_the_server_comes_back() -> None:
    store = InMemoryLightningStore()
    async with serving(store) as (server, client):
        await client.enqueue_rollout("before")
        await server.stop()
        again = LightningStoreServer(store, port=server.server_launcher.port)
        waiting = asyncio.create_task(client.enqueue_rollout("during"))
        await asyncio.sleep(0.1)
        await again.start()
        assert (await asyncio.wait_for(waiting, 15)).input == "during"
        assert (await store.query_rollouts()).total == 2
    await again.stop()


async def test_errors_cross_the_wire_as_the_class_that_the_store_raised(serve: Serve) -> None:
    _, client = await serve()
    rollout = await client.start_rollout("x")
    await client.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    with pytest.raises(ConflictError, match="is succeeded"):
        await client.update_attempt(rollout.rollout_id, "latest", status="failed")
    with pytest.raises(NotFoundError):
        await client.start_attempt("nope")
    with pytest.raises(BadRequestError):
        await client.query_rollouts(sort_by="nope")


def test_the_addresses_aliases_and_their_mistakes() -> None:
    for client in (LightningStoreClient(endpoint="http://h:1/"), LightningStoreClient(base_url="http://h:1")):
        assert client.server_address == "http://h:1/v1/agl"
        with pytest.raises(NotImplementedError, match="add_many_spans"):
            client.otlp_traces_endpoint()
    with pytest.raises(TypeError, match="exactly one address"):
        LightningStoreClient("http://h:1", endpoint="http://h:1")
    with pytest.raises(ValueError, match="http://"):
        LightningStoreClient("h:1")


def test_launcher_arguments_exclude_the_single_ones() -> None:
    with pytest.raises(ValueError, match="launcher_args"):
        LightningStoreServer(InMemoryLightningStore(), port=1, launcher_args=PythonServerLauncherArgs())


@pytest.mark.parametrize("variable", [False, True])
async def test_an_address_with_a_user_and_a_token_is_refused_without_a_word_of_the_secret(
    variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "http://me:pa55word@127.0.0.1:4747"
    if variable:
        monkeypatch.setattr("agentlightning.store.http.client.server_token", lambda: "t0ken")
    with pytest.raises(BadRequestError, match="AGL_TOKEN sets a token" if variable else "token= sets a token") as error:
        LightningStoreClient(address, token=None if variable else "t0ken")
    assert "pa55word" not in str(error.value)
    assert "t0ken" not in str(error.value)
    monkeypatch.setattr("agentlightning.store.http.client.server_token", lambda: None)
    await LightningStoreClient(address).close()


async def test_fields_of_a_filter_may_stand_in_a_query_string() -> None:
    store = InMemoryLightningStore()
    for number in range(4):
        await store.enqueue_rollout(f"Number {number}", mode="train" if number else "val", metadata={"step": number})
    operation = OPERATIONS["query_rollout_summaries"]
    pairs = [("mode_in", "train"), ("mode_in", "test"), ("step_to", "2"), ("input_contains", "number"), ("limit", "1")]
    arguments = operation.read_query(pairs)
    page = await store.query_rollout_summaries(**arguments)
    assert (page.total, [summary.step for summary in page]) == (2, [2])
    written = operation.read_answer(operation.write_answer(page))
    assert written == page
    assert written.cursor is not None
    fields = {p["name"] for p in openapi_document()["paths"][f"{PREFIX}/rollouts/summaries"]["get"]["parameters"]}
    assert {"mode_in", "step_from", "limit", "cursor"} <= fields
    assert "filter" not in fields


async def test_a_span_whose_reply_was_lost_is_answered_all_the_same(serve: Serve) -> None:
    server, _ = await serve()
    tracer = TracerProvider().get_tracer("tests")
    async with FaultyProxy(server.server_launcher.port, 0, chances={"pass": 1.0}) as proxy:
        client = LightningStoreClient(proxy.endpoint, retry_delays=(0.01,))
        rollout = await client.start_rollout("x")
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        spans = [tracer.start_span(f"{number}") for number in range(20)]
        for span in spans:
            span.end()
        proxy.plan_nth("/v1/agl/spans", "lost answer", 3, 11)
        stored = await asyncio.gather(*(client.add_otel_span(*ids, span) for span in spans))  # type: ignore[arg-type]
        assert proxy.seen["lost answer"] == 2
        assert [span and span.name for span in stored] == [f"{number}" for number in range(20)]
        assert (await client.query_spans(rollout.rollout_id)).total == 20
        await client.close()
