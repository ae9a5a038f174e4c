"""The store over HTTP: the bytes on the wire for each route, in each of its forms, and the text of errors."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.store import LightningStoreServer
from agentlightning.store.http.operations import API_AGL_PREFIX, OPERATIONS, PREFIX
from agentlightning.types import (
    AggregateGroup,
    Attempt,
    AttemptedRollout,
    ResourcesUpdate,
    Rollout,
    RolloutAggregate,
    RolloutConfig,
    RolloutSummary,
    Span,
    Worker,
)
from tests.store.conftest import Serve
from tests.store.parts import required, span_of


class Wire:
    """A server, and what it answers to single requests."""

    def __init__(self, server: LightningStoreServer, client: Any, session: aiohttp.ClientSession) -> None:
        self.store, self.client, self._session = server, client, session

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self.store.endpoint + PREFIX + path
        async with self._session.request(method, url, json=body) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def wire(serve: Serve) -> AsyncIterator[Wire]:
    async with aiohttp.ClientSession() as session:
        yield Wire(*await serve(), session)


def test_the_prefix_has_its_public_name() -> None:
    assert PREFIX == "/v1" + API_AGL_PREFIX == "/v1/agl"


async def test_every_field_is_on_the_wire_and_what_is_absent_is_null(wire: Wire) -> None:
    _, [queued] = await wire("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": None}]})
    assert set(queued) == set(Rollout.model_fields)
    assert (queued["input"], queued["end_time"], queued["run_id"]) == (None, None, None)
    assert set(queued["config"]) == set(RolloutConfig.model_fields) - {"mode"}, "it is that of the rollout"
    _, [claimed] = await wire("POST", "/queues/rollouts/dequeue")
    assert set(claimed) == set(AttemptedRollout.model_fields)
    assert set(claimed["attempt"]) == set(Attempt.model_fields)
    rollout_id, attempt_id = claimed["rollout_id"], claimed["attempt"]["attempt_id"]
    span = span_of((rollout_id, attempt_id), number=1)
    _, stored = await wire("POST", "/spans", {**span.model_dump(exclude={"kind", "scope"}), "my_field": {"x": 1}})
    assert set(stored) == {*Span.model_fields, "my_field"}
    await wire("POST", "/workers/w")
    await wire("POST", "/resources", {"p": {"resource_type": "llm", "endpoint": "e", "model": "m"}})
    for path, model in (
        ("/rollouts", AttemptedRollout),
        (f"/rollouts/{rollout_id}/attempts", Attempt),
        (f"/spans?rollout_id={rollout_id}", Span),
        ("/workers", Worker),
        ("/resources", ResourcesUpdate),
    ):
        _, page = await wire("GET", path)
        assert list(page) == ["items", "limit", "offset", "total", "cursor"]
        assert set(model.model_fields) <= set(page["items"][0]), path
    _, summaries = await wire("POST", "/rollouts/summaries", {"filter": {"has_reward": False}})
    assert list(summaries) == ["items", "limit", "offset", "total", "cursor"]
    assert set(summaries["items"][0]) == set(RolloutSummary.model_fields)
    _, outlines = await wire("GET", f"/spans/outlines?rollout_id={summaries['items'][0]['rollout_id']}")
    assert list(outlines) == ["items", "limit", "offset", "total", "cursor"]
    _, versions = await wire("GET", "/resources/unknown/versions")
    assert versions == {"items": [], "limit": 100, "offset": 0, "total": 0, "cursor": None}
    assert await wire("POST", "/vocabularies/unknown/texts", {"token_ids": [1]}) == (200, None)
    _, figures = await wire("POST", "/rollouts/aggregate", {"by": "status"})
    assert set(figures) == set(RolloutAggregate.model_fields)
    assert set(figures["groups"][0]) == set(AggregateGroup.model_fields)
    _, resources = await wire("GET", "/resources/latest")
    assert resources["resources"]["p"] == {
        **{"resource_type": "llm", "endpoint": "e", "model": "m", "api_key": None, "sampling_parameters": {}}
    }


async def test_creating_answers_201_and_the_rest_200(wire: Wire) -> None:
    status, started = await wire("POST", "/rollouts", {"input": 1})
    assert status == 201
    rollout_id = started["rollout_id"]
    ids = {"rollout_id": rollout_id, "attempt_id": started["attempt"]["attempt_id"]}
    span = span_of((ids["rollout_id"], ids["attempt_id"]), number=1).model_dump()
    expected: list[tuple[str, str, Any, int]] = [
        ("GET", "/health", None, 200),
        ("GET", "/statistics", None, 200),
        ("POST", "/queues/rollouts/enqueue", {"rollouts": []}, 201),
        ("POST", "/queues/rollouts/dequeue", {"limit": 0}, 200),
        ("POST", "/rollouts/search", {}, 200),
        ("GET", f"/rollouts/{rollout_id}", None, 200),
        ("POST", f"/rollouts/{rollout_id}", {"metadata": None}, 200),
        ("POST", f"/rollouts/{rollout_id}/attempts", None, 201),
        ("POST", f"/rollouts/{rollout_id}/attempts/search", {"sort_by": None}, 200),
        ("GET", f"/rollouts/{rollout_id}/attempts/latest", None, 200),
        ("POST", f"/rollouts/{rollout_id}/attempts/latest", {"worker_id": None}, 200),
        (
            "POST",
            "/history",
            {"rollouts": [{"rollout_id": "ro-h", "input": 1, "start_time": 1.0, "status": "failed"}]},
            201,
        ),
        ("POST", "/runs/r/start", {"algorithm": "a"}, 200),
        ("POST", "/runs/-", {"stop_reason": "x"}, 200),
        ("POST", "/runs/r/records", {"records": [{"kind": "step", "step": 1}]}, 201),
        ("POST", "/runs/r/records/search", {"kind_in": ["step"]}, 200),
        ("GET", "/runs/r/records?kind_in=step&kind_in=alarm&step_from=1", None, 200),
        ("POST", "/runs/r/rewind", {"step": 0}, 200),
        ("GET", "/runs/-", None, 200),
        ("GET", "/runs", None, 200),
        ("POST", "/runs/search", {}, 200),
        ("POST", "/runs/delete", {"run_ids": [""], "force": True}, 200),
        ("POST", "/vocabularies/v", ["a", "b"], 200),
        ("GET", "/vocabularies/v", None, 200),
        ("POST", "/workers/search", {}, 200),
        ("POST", "/metrics/observations", {"name": "latency", "value": 1.5}, 200),
        ("GET", "/workers/w", None, 200),
        ("POST", "/workers/w", {"heartbeat_stats": {}}, 200),
        ("POST", "/workers/w/heartbeat", None, 200),
        ("POST", "/resources", {}, 201),
        ("POST", "/resources/r", {}, 200),
        ("PUT", "/resources/r", {}, 200),
        ("GET", "/resources/r", None, 200),
        ("POST", "/spans", span, 201),
        ("POST", "/spans/batch", {"spans": [span]}, 201),
        ("POST", "/spans/search", {"rollout_id": rollout_id}, 200),
        ("POST", "/spans/next", ids, 200),
        ("POST", "/waits/rollouts", {"rollout_ids": [rollout_id], "timeout": 0}, 200),
        ("POST", f"/rollouts/{rollout_id}/finish", {"response": "done"}, 200),
    ]
    for method, path, body, code in expected:
        assert (await wire(method, path, body))[0] == code, (method, path)
    assert (await wire("POST", "/spans", span)) == (201, None)
    assert (await wire("POST", "/spans/next", ids)) == (200, {"sequence_id": 3})


async def test_both_forms_of_a_list_give_the_same(wire: Wire) -> None:
    for status in ("failed", "succeeded", "cancelled"):
        made = await wire.store.enqueue_rollout("x")
        await wire.store.update_rollout(made.rollout_id, status=status)
    await wire.store.enqueue_rollout("y")
    both = ["failed", "cancelled"]
    _, by_query = await wire("GET", "/rollouts?status_in=failed&status_in=cancelled&sort_by=status&limit=5")
    _, by_body = await wire("POST", "/rollouts/search", {"status_in": both, "sort_by": "status", "limit": 5})
    assert by_query == by_body
    assert [row["status"] for row in by_query["items"]] == sorted(both)
    assert (await wire("POST", "/rollouts/search", {"status_in": None}))[1]["total"] == 4
    assert (await wire("POST", "/rollouts/search", {"status_in": []}))[1]["total"] == 0
    assert (await wire("GET", "/rollouts?status_in=failed&unknown=1&mode_in=train"))[1]["total"] == 1
    assert (await wire("POST", "/rollouts/search", {"unknown": 1}))[1]["total"] == 4


ERRORS: list[tuple[str, str, Any, int, str]] = [
    (
        "GET",
        "/rollouts?sort_by=colour",
        None,
        400,
        r"Invalid sort_by: colour, allowed fields are: rollout_id, start_time",
    ),
    ("GET", "/rollouts?limit=0", None, 400, "Limit must be greater than 0 or -1 for no limit"),
    ("POST", "/rollouts/search", {"limit": -2}, 400, "Limit must be greater than 0 or -1 for no limit"),
    ("GET", "/workers?offset=-1", None, 400, "Offset must be greater than or equal to 0"),
    ("GET", "/rollouts?sort_order=up", None, 422, "sort_order"),
    ("GET", "/rollouts?filter_logic=xor", None, 422, "filter_logic"),
    ("GET", "/workers?status_in=gone", None, 422, "status_in"),
    ("GET", "/spans", None, 422, "rollout_id"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": 1}, 422, "rollouts"),
    ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"input": 1, "colour": 2}]}, 422, "colour"),
    ("POST", "/rollouts", {}, 422, "input"),
    ("POST", "/rollouts", {"input": 1, "config": {"max_attempts": 0}}, 422, "max_attempts"),
    ("POST", "/resources", {"p": {"resource_type": "odd"}}, 422, "resource_type"),
    ("POST", "/rollouts/ID", {"status": None}, 400, r"status is invalid; it cannot be a null value\."),
    ("POST", "/rollouts/ID", {"config": None}, 400, r"config is invalid; it cannot be a null value\."),
    ("POST", "/rollouts/ID/attempts/latest", {"status": None}, 400, r"status is invalid; it cannot be a null value\."),
    ("POST", "/workers/w", {"heartbeat_stats": None}, 400, r"heartbeat_stats is invalid; it cannot be a null value\."),
    ("POST", "/rollouts/ro-no", {}, 404, "ro-no"),
    ("POST", "/rollouts/ID/attempts/at-no", {}, 404, "at-no"),
    ("POST", "/rollouts/delete", {"rollout_ids": ["ID"]}, 409, "has not ended"),
    ("POST", "/resources/latest", {}, 400, "latest"),
    ("DELETE", "/rollouts/ID", None, 405, "Method Not Allowed"),
    ("GET", "/nothing", None, 404, "Not Found"),
    ("POST", "/rollouts/ro-no/start", None, 404, "ro-no"),
    ("POST", "/rollouts/ro-no/attempt", {"worker_id": "w"}, 404, "ro-no"),
    ("POST", "/rollouts/ID/attempt/at-no/finish", None, 404, "at-no"),
    ("POST", "/rollouts/ID/attempt/latest/finish", {"status": "done"}, 422, "'preparing', 'running'"),
    ("POST", "/workers", {}, 422, "worker_id"),
]


async def test_the_routes_of_the_manual_start_and_finish_attempts_and_register_workers(wire: Wire) -> None:
    code, worker = await wire("POST", "/workers", {"worker_id": "w", "heartbeat_stats": {"queue_depth": 1}})
    assert (code, worker["worker_id"], worker["heartbeat_stats"]) == (200, "w", {"queue_depth": 1})
    queued = await wire.store.enqueue_rollout("x", mode="val")
    code, started = await wire("POST", f"/rollouts/{queued.rollout_id}/start", {"worker_id": "w"})
    assert (code, started["status"], started["attempt"]["worker_id"]) == (201, "preparing", "w")
    code, again = await wire("POST", f"/rollouts/{queued.rollout_id}/attempt")
    assert (code, again["attempt"]["sequence_id"]) == (201, 2)
    finish = f"/rollouts/{queued.rollout_id}/attempt/{again['attempt']['attempt_id']}/finish"
    code, finished = await wire("POST", finish)
    assert (code, finished["status"], finished["attempt_id"]) == (200, "succeeded", again["attempt"]["attempt_id"])
    assert (await wire("POST", finish, {"status": "completed"}))[0] == 200  # the same again
    assert (await wire("POST", finish, {"status": "failed"}))[0] == 409
    code, body = await wire("GET", "/rollouts?status_in=completed&sort_by=create_time")
    assert [each["rollout_id"] for each in body["items"]] == [queued.rollout_id]
    failing = await wire.store.start_rollout("y", worker_id="w")
    path = f"/rollouts/{failing.rollout_id}/attempt/latest/finish"
    assert (await wire("POST", path, {"status": "timeout"}))[1]["status"] == "timeout"
    code, workers = await wire("GET", "/workers?status_in=offline")
    assert [(each["worker_id"], each["status"]) for each in workers["items"]] == [("w", "unknown")]


@pytest.mark.parametrize(("method", "path", "body", "code", "text"), ERRORS)
async def test_an_error_says_in_json_what_was_wrong(
    wire: Wire, method: str, path: str, body: Any, code: int, text: str
) -> None:
    started = await wire.store.start_rollout("x")
    filled_in = json.loads(json.dumps([path, body]).replace("ID", started.rollout_id))
    status, answer = await wire(method, *filled_in)
    assert status == code, answer
    assert set(answer) == {"detail", "error_type"}
    shown = answer["detail"] if isinstance(answer["detail"], str) else json.dumps(answer["detail"])
    assert re.search(text.replace("ID", started.rollout_id), shown)
    if code == 422:
        assert all({"type", "loc", "msg"} <= set(part) for part in answer["detail"])


async def test_any_id_may_be_in_a_path(wire: Wire) -> None:
    client = wire.client
    names = [
        *("a/b", "?x=1", "#", ".", "..", "../../health", "%2F", "é☃", "search", "heartbeat", "a b", "a\nb", "\0", ";")
    ]
    for name in names:
        await client.update_worker(name, {"name": name})
        stored_worker = required(await client.get_worker_by_id(name))
        assert (stored_worker.worker_id, stored_worker.heartbeat_stats) == (name, {"name": name})
        assert (await client.update_resources(name, {})).resources_id == name
        assert await client.get_resources_by_id(name) is not None
    assert {worker.worker_id for worker in await client.query_workers()} == set(names)


def test_every_row_of_the_table_is_asked_in_this_file() -> None:
    """Require a test of the wire form for each new route."""
    text = Path(__file__).read_text() + (Path(__file__).parent / "http" / "test_operations.py").read_text()
    ways = {path for operation in OPERATIONS.values() for _, path in operation.declared.ways}
    last = {path.rsplit("/", 1)[1] for path in ways if not path.endswith("}")}
    assert {part for part in last if f"/{part}" not in text} <= {"search"}
