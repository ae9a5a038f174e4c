"""A server's answers hold no secret with a telling name; the input of an algorithm is returned whole."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.event_stream import EVENTS_PATH
from agentlightning.store.http.metrics import PROMETHEUS_PATH
from agentlightning.store.http.openapi import openapi_document
from agentlightning.store.http.operations import OPERATIONS, PREFIX
from agentlightning.types import LLM, PaginatedResult, ResourcesUpdate, RunRecord
from agentlightning.types.attempt_key import attempt_key
from agentlightning.types.runs import RecordKind
from tests.store.conftest import Serve
from tests.store.parts import required, span_of

SECRET = "planted-secret"
SHOWN: tuple[RecordKind, ...] = ("step", "ledger", "evaluation", "alarm", "checkpoint")


async def test_what_is_hidden_is_told_and_the_rest_and_the_store_itself_have_all(serve: Serve) -> None:
    config = {"llm": {"api_key": SECRET, "url": f"http://user:{SECRET}@host/v1"}, "lr": 1e-4, "eos_token": "</s>"}
    attributes: Any = {"llm.clientSecret": SECRET, "api_key": [SECRET], "gen_ai.usage.prompt_tokens": 11}
    server, client = await serve()
    await server.start_run("r", config=config)
    attempted = await client.start_rollout("x")
    sent = span_of(attempted, attributes=attributes)
    sent.resource.attributes.update({"service.password": SECRET, "service.name": "kept"})
    await client.add_span(sent)
    hidden = {**config, "llm": {"api_key": "[hidden]", "url": "http://user:[hidden]@host/v1"}}
    assert required(await client.get_run_by_id("r")).config == hidden
    (span,) = await client.query_spans(attempted.rollout_id)
    assert span.attributes == {**attributes, "llm.clientSecret": "[hidden]", "api_key": "[hidden]"}
    assert span.resource.attributes == {"service.password": "[hidden]", "service.name": "kept"}
    assert (await server.query_runs())[0].config == config
    (stored,) = await server.query_spans(attempted.rollout_id)
    assert stored.attributes == attributes


async def test_a_state_and_a_prompt_come_back_as_they_were_stored(serve: Serve) -> None:
    data = {"session": "abc", "text": "Say token: 12 and password=x"}
    kinds: tuple[RecordKind, ...] = ("state", "prompt")
    _, client = await serve()
    await client.start_run("r")
    await client.add_run_records("r", [RunRecord(kind=kind, step=2, data=data) for kind in kinds])
    assert [record.data for record in await client.query_run_records("r", kind_in=kinds)] == [data, data]


async def test_a_store_that_does_not_hide_keys_has_them_hidden_at_the_door(serve: Serve) -> None:
    class Careless(InMemoryLightningStore):
        async def query_resources(self, **filters: Any) -> PaginatedResult[ResourcesUpdate]:
            return PaginatedResult(items=[required(await self.get_latest_resources())], limit=-1, offset=0, total=1)

    store = Careless()
    llm = LLM(endpoint="http://m/v1", model="m", api_key=SECRET, sampling_parameters={"max_tokens": 7})
    await store.add_resources({"llm": llm})
    _, client = await serve(store)
    (listed,) = await client.query_resources()
    assert listed.resources["llm"] == llm.model_copy(update={"api_key": None})
    assert (await store.query_resources()).items[0].resources["llm"] == llm


async def test_the_token_is_in_no_refusal_and_no_log_line(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    token = "planted-agl-token"
    server, _ = await serve(token=token)
    caplog.set_level(logging.DEBUG)
    for key in (token[:-1], token + "x", attempt_key("ro-1", "at-1", token), ""):
        headers = {"Authorization": f"Bearer {key}", "X-Api-Key": SECRET, "Cookie": f"session={SECRET}"}
        async with aiohttp.request("GET", f"{server.endpoint}{PREFIX}/rollouts", headers=headers) as answer:
            shown = (str(answer.headers) + await answer.text()).replace(key, "")
        assert token not in shown
        assert SECRET not in shown + caplog.text
    assert token not in caplog.text.replace(token + "x", "")


# --- in every text of the interface ----------------------------------------------------------------------------------

PLANTED = "planted-in-every-text"
SHOWN_URL = f"http://user:{PLANTED}@host/v1?api_key={PLANTED} https://{PLANTED}@host https://{PLANTED}:@host"
FREE = {"api_key": PLANTED, "url": SHOWN_URL, "headers": [["Authorization", f"Bearer {PLANTED}"]], "lr": 1.5}
IDS = {
    "rollout_id": "ro-p", "attempt_id": "at-p", "worker_id": "w-p", "run_id": "r-p", "resources_id": "rs-p",
    "span_id": "a" * 16, "trace_id": "b" * 32, "parent_id": "c" * 16, "vocabulary_id": "v-p", "id": "id-p",
}  # fmt: skip
"""Fields by which a record is queried again; a record's name is a part of its identity, too."""
WHOLE = {
    "start_rollout", "start_attempt", "enqueue_many_rollouts", "dequeue_many_rollouts",
    "get_rollout_by_id", "wait_for_rollouts", "get_resources_by_id", "get_latest_resources", "add_resources",
    "update_resources",
}  # fmt: skip
"""Input of an agent or an algorithm: queried by id or as the latest, claimed, or answered to its author."""


def planted(schema: Any, name: str, components: dict[str, Any]) -> Any:
    """Return a value of a schema with a secret in every free text."""
    if "$ref" in schema:
        return planted(components[schema["$ref"].rpartition("/")[2]], name, components)
    for choices in ("oneOf", "anyOf"):
        if choices in schema:
            return planted(schema[choices][0], name, components)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {key: planted(part, key, components) for key, part in schema["properties"].items()}
        return fields | (FREE if schema.get("additionalProperties") is True else {})
    if kind == "object":
        inner = schema.get("additionalProperties", True)
        return FREE if inner is True else {"a": planted(inner, "a", components)}
    if kind == "array":
        return [planted(schema["items"], name, components)] if "items" in schema else []
    if kind == "string":
        return IDS.get(name) or ("planted" if name == "task_id" else SHOWN_URL)
    if kind in ("integer", "number"):
        return schema.get("default", max(1, schema.get("minimum", 1)))
    return False if kind == "boolean" else None if kind == "null" else FREE


def body_of(operation: str, **changes: Any) -> Any:
    """Return a body for an operation with a secret in every text; the given fields are taken as they are."""
    document = openapi_document()
    (entry,) = [e for path in document["paths"].values() for e in path.values() if e.get("operationId") == operation]
    schema = entry["requestBody"]["content"]["application/json"]["schema"]
    made = planted(schema, "", document["components"]["schemas"])
    return {name: value for name, value in {**made, **changes}.items() if value is not ...}


async def fill(call: Callable[..., Any]) -> None:
    """Write by every operation that takes texts."""
    kinds = [
        openapi_document()["components"]["schemas"][n] for n in ("LLM", "ProxyLLM", "PromptTemplate", "CustomResource")
    ]
    schemas = openapi_document()["components"]["schemas"]
    resources = {schema["title"]: planted(schema, "", schemas) for schema in kinds}
    await call("POST", "/runs/r-p/start", body_of("start_run"))
    error = planted(schemas["AttemptError"], "", schemas)
    await call("POST", "/runs/r-p", body_of("update_run", best=..., state="failed", error=error))
    records = [{**planted(schemas["RunRecord"], "", schemas), "kind": kind, "time": None} for kind in SHOWN]
    await call("POST", "/runs/r-p/records", {"records": [{**record, "name": "n"} for record in records]})
    await call("POST", "/resources/rs-p", resources)
    await call("POST", "/resources", resources)
    task = {
        "metadata": {**FREE, "task": SHOWN_URL},
        "config": {},
        "priority": 0,
        "run_id": "r-p",
        "resources_id": "rs-p",
    }
    request = planted(schemas["EnqueueRolloutRequest"], "", schemas) | task | {"not_before": None}
    await call("POST", "/queues/rollouts/enqueue", {"rollouts": [request]})
    started = await call("POST", "/rollouts", body_of("start_rollout", **task))
    (claimed,) = await call("POST", "/queues/rollouts/dequeue", {"limit": 1, "worker_id": "w-p", "run_id": "r-p"})
    assert claimed["input"] == FREE  # as it was sent
    rollout_id, attempt_id = IDS["rollout_id"], IDS["attempt_id"] = (
        claimed["rollout_id"],
        claimed["attempt"]["attempt_id"],
    )
    for sequence_id, path in enumerate(("/spans", "/spans/batch"), start=1):
        status = {"status_code": "ERROR", "description": SHOWN_URL}
        fields = {"sequence_id": sequence_id, "status": status, "span_id": f"{sequence_id:016d}", "parent_id": None}
        fields |= {"parent": None, "kind": "CLIENT", "start_time": 1.0, "end_time": 2.0}
        span = body_of("add_span", **fields)
        span["attributes"] = {"url.full": SHOWN_URL, "api_key": PLANTED, **span["attributes"]}
        await call("POST", path, span if path == "/spans" else {"spans": [span]})
    IDS["span_id"] = "0" * 15 + "1"
    for path in ("/workers/w-p", "/workers/w-p/heartbeat"):
        await call("POST", path, {"heartbeat_stats": FREE, "run_id": "r-p"})
    await call("POST", f"/rollouts/{rollout_id}", {"input": FREE, "metadata": {**FREE, "task": SHOWN_URL}})
    ended = {"status": "failed", "outcome": "infrastructure_fault", "metadata": FREE, "outcome_reason": SHOWN_URL}
    await call("POST", f"/rollouts/{rollout_id}/attempts/{attempt_id}", {**ended, "error": error})
    await call("POST", "/history", {"rollouts": [], "spans": [body_of("add_span", rollout_id="ro-gone")]})
    IDS["rollout_id"] = started["rollout_id"]
    finish = {"attempt_id": started["attempt"]["attempt_id"], "response": FREE}
    await call("POST", f"/rollouts/{started['rollout_id']}/finish", finish)
    IDS["rollout_id"] = rollout_id


WRONG: list[tuple[str, str, Any]] = [
    ("POST", "/rollouts/nope", {"status": "failed", "metadata": FREE}),
    ("POST", "/resources", {"llm": {"resource_type": "llm", "api_key": PLANTED}}),
    ("POST", "/resources", {"llm": {"resource_type": "llm", "endpoint": 1, "api_key": [PLANTED]}}),
    ("POST", "/spans", {"attributes": {"api_key": {"nested": PLANTED}}}),
    ("POST", "/rollouts/search", {"sort_by": "api_key"}),
    ("DELETE", "/rollouts", {}),
]


async def test_a_secret_in_any_text_comes_back_only_by_id_and_to_whoever_works_with_it(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server, _ = await serve()
    leaks: list[str] = []
    whole: set[str] = set()

    async with aiohttp.ClientSession() as session:

        async def call(method: str, path: str, body: Any = None, *, expect: int = 201) -> Any:
            async with session.request(method, server.endpoint + PREFIX + path, json=body) as answer:
                text = await answer.text()
                assert answer.status <= expect, (path, text)
            name = operation_of(method, path)
            if PLANTED in text:
                (whole.add(name) if name in WHOLE else leaks.append(f"{method} {path}: {text}"))
            return json.loads(text)

        following = asyncio.Event()
        event_texts = asyncio.create_task(follow(session, server.endpoint + EVENTS_PATH, following, until='"failed"'))
        await asyncio.wait_for(following.wait(), 20)
        await fill(call)
        assert PLANTED not in await event_texts
        for path, entries in openapi_document()["paths"].items():
            if not path.startswith(PREFIX) or path == EVENTS_PATH:
                continue
            route = path.removeprefix(PREFIX).format_map(IDS)
            if "get" in entries:
                query = {"/comparison": "?before=resources:rs-p@1&after=resources:rs-p@1"}.get(route)
                outlined = f"?rollout_id={IDS['rollout_id']}" if route in ("/spans", "/spans/outlines") else ""
                await call("GET", route + (query or outlined), expect=400 if query else 200)
            if "post" in entries and route.endswith(("/search", "/summaries", "/aggregate")):
                ids = {"rollout_id": IDS["rollout_id"]} if route == "/spans/search" else {}
                events = {"after": "0"} if route == "/events/search" else {}
                await call("POST", route, {**ids, **events, **({"by": "task"} if route.endswith("aggregate") else {})})
        await call("POST", "/waits/rollouts", {"rollout_ids": [IDS["rollout_id"]], "timeout": 0})
        await call("POST", f"/rollouts/{IDS['rollout_id']}/attempts", {"worker_id": "w-p"})
        for method, path, body in WRONG:
            await call(method, path, body, expect=499)
        for path in ("/openapi.json", PROMETHEUS_PATH, "/health", "/nothing"):
            async with session.get(server.endpoint + path) as answer:
                assert PLANTED not in await answer.text()
    assert PLANTED not in caplog.text
    assert not leaks, "\n".join(leaks)
    assert whole == WHOLE


def operation_of(method: str, path: str) -> str:
    """Return the operation behind a path without its ids."""
    for operation in OPERATIONS.values():
        if (method, path.partition("?")[0]) in [(its, way.format_map(IDS)) for its, way in operation.declared.ways]:
            return operation.name
    return path


async def follow(session: aiohttp.ClientSession, url: str, following: asyncio.Event, *, until: str) -> str:
    text = ""
    async with session.get(url) as answer:
        while until not in text:
            text += (await asyncio.wait_for(answer.content.readany(), 20)).decode()
            following.set()
    return text


async def test_a_program_that_lists_rollouts_works_with_their_inputs_as_they_were_sent(serve: Serve) -> None:
    store = InMemoryLightningStore()
    _, client = await serve(store)
    inputs = [{"token": f"word {number}"} for number in range(40)]
    for each in inputs:
        await client.enqueue_rollout(each, metadata={"password": each["token"]})
    listed = await client.query_rollouts(sort_by="start_time")
    assert [rollout.input for rollout in listed] == inputs
    assert [rollout.metadata for rollout in listed] == [{"password": each["token"]} for each in inputs]
    assert (listed.total, listed.limit) == (40, -1)
    cancelled = await client.update_rollout(listed[3].rollout_id, status="cancelled")
    assert (cancelled.status, cancelled.input, cancelled.metadata) == ("cancelled", inputs[3], listed[3].metadata)
