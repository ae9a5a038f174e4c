"""Secrets are planted wherever one may occur, and searched for in everything that a store server sends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import WIRE_ERRORS
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.http.event_stream import EVENTS_PATH
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, PaginatedResult, ProxyLLM, ResourcesUpdate, Span
from agentlightning.types.attempt_key import attempt_key
from tests.store.conftest import Serve

TOKEN = "planted-agl-token"
PROVIDER_KEY = "planted-provider-key"
SAMPLING_KEY = "planted-sampling-key"
HEADER = "planted-header"
ATTRIBUTE = "planted-attribute"
PLANTED = (TOKEN, PROVIDER_KEY, SAMPLING_KEY, HEADER, ATTRIBUTE)

RESOURCES: dict[str, Any] = {
    "llm": LLM(endpoint="http://m/v1", model="m", api_key=PROVIDER_KEY, sampling_parameters={"n": 1}),
    "proxy": ProxyLLM(
        endpoint="http://m/v1",
        model="m",
        api_key=PROVIDER_KEY,
        sampling_parameters={"extra_headers": {"Authorization": SAMPLING_KEY}, "max_tokens": 7},
    ),
}
SECRET_ATTRIBUTES: dict[str, Any] = {
    "api_key": ATTRIBUTE,
    "http.request.header.authorization": [f"Bearer {ATTRIBUTE}"],
    "llm.clientSecret": ATTRIBUTE,
    "gen_ai.usage.prompt_tokens": 11,
    "kept": "kept",
}


def planted_span(attempted: Any) -> Span:
    span = Span.from_attributes(
        attributes=SECRET_ATTRIBUTES,
        rollout_id=attempted.rollout_id,
        attempt_id=attempted.attempt.attempt_id,
        sequence_id=-1,
    )
    document = span.model_dump()
    document["resource"] = {"attributes": {"service.password": ATTRIBUTE, "service.name": "kept"}, "schema_url": ""}
    document["events"] = [{"name": "e", "attributes": {"cookie": ATTRIBUTE}, "timestamp": None}]
    document["links"] = [{"context": document["context"], "attributes": {"access_token": ATTRIBUTE}}]
    document["headers"] = {"x-api-key": ATTRIBUTE}
    return Span.model_validate(document)


@pytest.fixture
async def server() -> AsyncIterator[LightningStoreServer]:
    made = LightningStoreServer(InMemoryLightningStore(), port=0, token=TOKEN)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(server: LightningStoreServer) -> AsyncIterator[LightningStoreClient]:
    made = LightningStoreClient(server.endpoint, token=TOKEN)
    yield made
    await made.close()


def assert_holds_none(text: str, what: object) -> None:
    for secret in PLANTED:
        assert secret not in text, (what, secret)


async def text_of(server: LightningStoreServer, method: str, path: str, body: Any = None, key: str = TOKEN) -> str:
    headers = {"Authorization": f"Bearer {key}", "X-Api-Key": HEADER, "Cookie": f"session={HEADER}"}
    data = None if method == "GET" else json.dumps(body or {})
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.endpoint + path, data=data, headers=headers) as answer,
    ):
        return str(answer.headers) + await answer.text()


async def test_a_key_comes_back_by_id_and_as_the_latest_and_in_no_list(
    server: LightningStoreServer, client: LightningStoreClient
) -> None:
    made = await client.add_resources(RESOURCES)
    for update in (await client.get_resources_by_id(made.resources_id), await client.get_latest_resources()):
        assert update is not None
        assert update.resources["llm"].api_key == PROVIDER_KEY  # type: ignore[union-attr]
        assert update.resources["proxy"].sampling_parameters["extra_headers"]["Authorization"] == SAMPLING_KEY  # type: ignore[union-attr]
    (listed,) = await client.query_resources()
    assert listed.resources["llm"].api_key is None  # type: ignore[union-attr]
    assert listed.resources["proxy"].sampling_parameters["max_tokens"] == 7  # type: ignore[union-attr]
    for query in ("", f"?resources_id={made.resources_id}", "?sort_by=create_time&limit=1"):
        assert_holds_none(await text_of(server, "GET", f"{PREFIX}/resources{query}"), query)


async def test_values_of_spans_under_secret_names_are_in_no_list(
    server: LightningStoreServer, client: LightningStoreClient
) -> None:
    attempted = await client.start_rollout("x")
    await client.add_span(planted_span(attempted))
    (span,) = await client.query_spans(attempted.rollout_id)
    assert span.attributes["api_key"] == "[hidden]"
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 11
    assert (span.attributes["kept"], span.resource.attributes["service.name"]) == ("kept", "kept")
    query = {"rollout_id": attempted.rollout_id}
    assert_holds_none(await text_of(server, "POST", f"{PREFIX}/spans/search", query), "search")
    assert_holds_none(await text_of(server, "GET", f"{PREFIX}/spans?rollout_id={attempted.rollout_id}"), "list")
    (stored,) = await server.query_spans(attempted.rollout_id)
    assert stored.attributes["api_key"] == ATTRIBUTE  # the owner of the store has what was stored


async def test_no_list_event_log_line_or_error_text_holds_a_planted_secret(
    server: LightningStoreServer, client: LightningStoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    following = asyncio.Event()
    events = asyncio.create_task(_follow(server, following, until="succeeded"))
    await asyncio.wait_for(following.wait(), 20)
    made = await client.add_resources(RESOURCES)
    rollout = await client.enqueue_rollout("x", resources_id=made.resources_id)
    attempted = await client.dequeue_rollout(worker_id="w")
    await client.add_many_spans([planted_span(attempted)])
    await client.update_worker("w", {"cpu": 1})
    await client.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    lists = ("/rollouts", f"/rollouts/{rollout.rollout_id}/attempts", "/workers", "/resources", "/statistics")
    for path in (*(PREFIX + path for path in lists), "/openapi.json", "/v1/prometheus", "/health", "/nothing"):
        assert_holds_none(await text_of(server, "GET", path), path)
    assert_holds_none(await events, "events")
    wrong = [
        ("POST", f"{PREFIX}/rollouts/nope", {"status": "failed"}),
        ("POST", f"{PREFIX}/resources", {"llm": {"resource_type": "llm", "api_key": PROVIDER_KEY}}),
        ("POST", f"{PREFIX}/resources", {"llm": {"resource_type": "llm", "endpoint": 1, "api_key": [PROVIDER_KEY]}}),
        ("POST", f"{PREFIX}/spans", {"attributes": {"api_key": {"nested": ATTRIBUTE}}}),
        ("POST", f"{PREFIX}/rollouts/search", {"sort_by": "api_key"}),
        ("DELETE", f"{PREFIX}/rollouts", {}),
    ]
    for method, path, body in wrong:
        assert_holds_none(await text_of(server, method, path, body), path)
    assert_holds_none(caplog.text, "log")


async def test_the_token_is_in_no_refusal_and_no_log_line(
    server: LightningStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (TOKEN[:-1], TOKEN + "x", attempt_key("ro-1", "at-1", TOKEN), ""):
        assert_holds_none((await text_of(server, "GET", f"{PREFIX}/rollouts", key=key)).replace(key, ""), key)
    assert_holds_none(caplog.text.replace(TOKEN + "x", ""), "log")


async def test_a_failure_of_the_store_says_nothing_of_what_it_held(
    server: LightningStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(**arguments: Any) -> Any:
        raise RuntimeError(f"could not reach http://m?key={PROVIDER_KEY}")

    monkeypatch.setattr(server.store, "query_resources", broken)
    text = await text_of(server, "GET", f"{PREFIX}/resources")
    assert_holds_none(text, "500")
    assert "RuntimeError" not in WIRE_ERRORS


async def test_a_store_that_does_not_hide_keys_has_them_hidden_at_the_door(serve: Serve) -> None:
    class Careless(InMemoryLightningStore):
        async def query_resources(self, **filters: Any) -> PaginatedResult[ResourcesUpdate]:
            update = await self.get_latest_resources()
            return PaginatedResult(items=[update] if update else [], limit=-1, offset=0, total=1)

    store = Careless()
    await store.add_resources(RESOURCES)
    server, _ = await serve(store, token=TOKEN)
    text = await text_of(server, "GET", f"{PREFIX}/resources")
    assert '"total":1' in text
    assert_holds_none(text, "list")
    assert (await store.query_resources()).items[0].resources["llm"].api_key == PROVIDER_KEY  # type: ignore[union-attr]


async def _follow(server: LightningStoreServer, following: asyncio.Event, *, until: str) -> str:
    text = ""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(server.endpoint + EVENTS_PATH, headers=headers) as answer,
    ):
        while until not in text:
            text += (await asyncio.wait_for(answer.content.readany(), 20)).decode()
            following.set()
    return text
