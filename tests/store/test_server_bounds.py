"""Invalid requests: each gets a 4xx, or the right answer where it is legal, and one line of log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http import app
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Rollout
from tests.store.conftest import Serve
from tests.stubs.raw_http import Answer, exchange, request

MEGABYTE = "x" * 1_000_000
DEEP = 100_000


@pytest.fixture
async def server(local: LightningStore, serve: Serve) -> LightningStoreServer:
    return (await serve(local))[0]


async def ask(server: LightningStoreServer, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    return await exchange(server.server_launcher.port, request(method, PREFIX + path, body, **headers))


def assert_told_quietly(answer: Answer, caplog: pytest.LogCaptureFixture, what: object) -> None:
    """Check that the answer has nothing internal, and the log at most one line, none long, no traceback."""
    assert b"Traceback" not in answer.body, what
    assert b"site-packages" not in answer.body, what
    if answer.status >= 400:
        assert set(answer.json) == {"detail", "error_type"}, what
        assert len(answer.body) < 5_000, what
    lines = [record for record in caplog.records if not record.name.startswith(("asyncio", "aiohttp"))]
    assert len(lines) <= 1, (what, caplog.text)
    for record in lines:
        assert record.levelno < logging.ERROR, what
        assert record.exc_info is None, what
        assert len(record.getMessage()) < 1_000, what
        assert record.getMessage().isprintable(), what
    caplog.clear()


def nested(opening: bytes, middle: bytes, closing: bytes, depth: int = DEEP) -> bytes:
    return opening * depth + middle + closing * depth


BODIES: list[tuple[str, bytes, int]] = [
    ("deep list", b'{"input":' + nested(b"[", b"", b"]") + b"}", 422),
    ("deep object", b'{"input":' + nested(b'{"a":', b"1", b"}") + b"}", 422),
    ("deep and unclosed", nested(b"[", b"", b""), 422),
    ("deep metadata", b'{"input":1,"metadata":' + nested(b'{"a":', b"1", b"}") + b"}", 422),
    ("5000 digits", b'{"input":' + b"9" * 5_000 + b"}", 422),
    ("4000 digits", b'{"input":' + b"9" * 4_000 + b"}", 201),
    ("1e400", b'{"input":1e400}', 201),
    ("NaN", b'{"input":[NaN,Infinity,-Infinity,1e999]}', 201),
    ("NaN in metadata", b'{"input":1,"metadata":{"a":NaN}}', 201),
    ("invalid UTF-8", b'{"input":"\xff\xfe"}', 422),
    ("overlong UTF-8", b'{"input":"\xc0\xaf"}', 422),
    ("UTF-16", '{"input":1}'.encode("utf-16"), 422),
    ("byte order mark", b"\xef\xbb\xbf" + b'{"input":1}', 422),
    ("lone surrogate", b'{"input":"\\ud800"}', 422),
    ("null byte", b'{"input":"\\u0000","metadata":{"\\u0000":"\\u0000"}}', 201),
    ("raw null byte", b'{"input":"\x00"}', 422),
    ("same key twice", b'{"input":1,"input":2}', 201),
    ("list", b"[]", 422),
    ("number", b"1", 422),
    ("null", b"null", 422),
    ("empty", b"", 422),
    ("two documents", b'{"input":1}{"input":2}', 422),
    ("trailing comma", b'{"input":1,}', 422),
    ("single quotes", b"{'input':1}", 422),
    ("huge attempts", b'{"input":1,"config":{"max_attempts":1e400}}', 422),
    ("unknown config", b'{"input":1,"config":{"colour":1}}', 422),
    ("wrong mode", b'{"input":1,"mode":"play"}', 422),
    ("long run", b'{"input":1,"run_id":"' + MEGABYTE.encode() + b'"}', 400),
    ("long worker", b'{"input":1,"worker_id":"' + MEGABYTE.encode() + b'"}', 400),
    ("long resources", b'{"input":1,"resources_id":"' + MEGABYTE.encode() + b'"}', 400),
    ("long input", b'{"input":"' + MEGABYTE.encode() + b'"}', 201),
]


async def test_whatever_was_taken_can_be_read_again_by_a_client(serve: Serve, local: LightningStore) -> None:
    server, client = await serve(local)
    deepest = 0
    for depth in range(150, 230):
        body = b'{"rollouts":[{"input":' + nested(b'{"a":', b"1", b"}", depth) + b"}]}"
        answer = await ask(server, "POST", "/queues/rollouts/enqueue", body)
        if answer.status != 201:
            break
        deepest = depth
        rollout_id = answer.json[0]["rollout_id"]
        assert (await client.query_rollouts(rollout_id_in=[rollout_id])).total == 1
    assert 150 <= deepest < 229
    while await client.dequeue_many_rollouts(limit=10):
        pass


PATHS: list[tuple[str, int]] = [
    ("/rollouts/..", 200),
    ("/rollouts/..%2f..%2fetc%2fpasswd", 200),
    ("/rollouts/%2e%2e%2f", 200),
    ("/rollouts/../../etc/passwd", 404),
    ("/rollouts/%00", 200),
    ("/rollouts/a%00b", 200),
    ("/rollouts/%ff%fe", 400),
    ("/rollouts/%C3%28", 400),
    ("/rollouts/%", 200),
    ("/rollouts/%zz", 200),
    ("/rollouts/%0d%0aSet-Cookie:%20a=b", 200),
    ("/rollouts/" + "x" * 513, 400),
    ("/rollouts/" + "x" * 20_000, 400),
    ("/rollouts/" + MEGABYTE, 414),
    ("/rollouts/" + "%41" * 400_000, 414),
    ("/workers/" + MEGABYTE, 414),
    ("/rollouts?status_in=%ff", 400),
    ("/rollouts?limit=" + "9" * 30, 400),
    ("/rollouts?limit=" + "9" * 5_000, 422),
    ("/rollouts?limit=1e400", 422),
    ("/rollouts?limit=NaN", 422),
    ("/rollouts?offset=-1", 400),
    ("/rollouts?sort_by=__class__", 400),
    ("/rollouts?sort_by=config", 400),
    ("/rollouts?sort_order=up", 422),
    ("/rollouts?filter_logic=xor", 422),
    ("/rollouts?" + "status_in=failed&" * 1_900, 200),
    ("/rollouts?" + "a&" * 5_000, 400),
    ("/rollouts?rollout_id_contains=%00", 200),
    ("/spans?rollout_id=" + "x" * 20_000, 400),
    ("/resources/x?version=" + "9" * 25, 400),
    ("/resources/x?version=-1", 200),
    ("/events?after=" + "9" * 25_000, 400),
]


SPAN: dict[str, Any] = {
    "trace_id": "t", "parent_id": None, "name": "n", "status": {"status_code": "OK"}, "attributes": {}, "events": [],
    "links": [], "start_time": 1.0, "end_time": 2.0, "context": None, "parent": None, "sequence_id": -1,
    "resource": {"attributes": {}, "schema_url": ""},
}  # fmt: skip
SPANS: list[tuple[str, dict[str, Any], set[int]]] = [
    ("large number", {"sequence_id": 2**53 + 1}, {400}),
    ("larger number", {"sequence_id": 10**30}, {400}),
    ("infinite time", {"start_time": 1e400}, {201}),
    ("null in a list", {"attributes": {"a": [1, None]}}, {422}),
    ("nested attribute", {"attributes": {"a": {"b": 1}}}, {422}),
    ("large attribute", {"attributes": {"a": 10**400}}, {201, 400}),
    ("null bytes", {"name": "\0", "attributes": {"\0": "\0"}}, {201}),
    ("deep extra", {"extra": json.loads("[" * 150 + "]" * 150)}, {201}),
    ("long trace", {"trace_id": MEGABYTE}, {201, 400}),
    ("unknown rollout", {"rollout_id": MEGABYTE}, {400, 404}),
    ("unknown attempt", {"attempt_id": "../.."}, {404}),
]


CALLS: list[tuple[str, dict[str, Any], set[int]]] = [
    ("/rollouts/search", {"limit": 2**53, "offset": 2**53}, {200}),
    ("/rollouts/search", {"limit": 2**60}, {400}),
    ("/queues/rollouts/dequeue", {"limit": 2**53}, {200}),
    ("/queues/rollouts/dequeue", {"limit": -(2**53)}, {200}),
    ("/queues/rollouts/dequeue", {"timeout": float("nan")}, {400}),
    ("/queues/rollouts/dequeue", {"timeout": float("-inf")}, {400}),
    ("/queues/rollouts/dequeue", {"timeout": -1}, {200}),
    ("/waits/rollouts", {"rollout_ids": [MEGABYTE], "timeout": 0}, {200}),
    ("/waits/rollouts", {"rollout_ids": ["\0"], "timeout": 0}, {200}),
    ("/events/search", {"after": "not a cursor"}, {400}),
    ("/events/search", {"limit": 0}, {400}),
    ("/rollouts/x/attempts/y", {"last_heartbeat_time": float("inf")}, {400}),
    ("/rollouts/" + "x" * 600, {"status": "failed"}, {400}),
    ("/rollouts/..", {"status": "failed"}, {404}),
    ("/spans/next", {"rollout_id": "..", "attempt_id": "\0"}, {404}),
    ("/resources/latest", {}, {400}),
    ("/resources/x", {"a": {"resource_type": MEGABYTE}}, {422}),
    ("/resources/x", {MEGABYTE: {}}, {422}),
]


def requests_of(own: dict[str, str]) -> Iterator[tuple[str, str, str, bytes, set[int]]]:
    """Yield name, method, path, body and the statuses that may answer; `own` are the ids of an attempt."""
    for name, body, status in BODIES:
        yield name, "POST", "/rollouts", body, {status}
    for path, status in PATHS:
        yield path[:60], "GET", path, b"", {status}
    for number, (name, changes, statuses) in enumerate(SPANS):
        body = json.dumps({**own, "span_id": str(number), **SPAN, **changes}).encode()
        yield name, "POST", "/spans", body, statuses
    yield "what was taken of these", "GET", f"/spans?rollout_id={own['rollout_id']}", b"", {200}
    for path, fields, statuses in CALLS:
        yield f"{path[:60]} {str(fields)[:100]}", "POST", path, json.dumps(fields).encode(), statuses


async def test_a_request_is_answered_or_refused_but_never_breaks_anything(
    server: LightningStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = await server.start_rollout("x")
    caplog.set_level(logging.INFO, logger="agentlightning")
    caplog.clear()
    own = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    for name, method, path, body, statuses in requests_of(own):
        answer = await ask(server, method, path, body)
        assert answer.status in statuses, (name, answer.body[:300])
        assert "set-cookie" not in answer.headers
        assert_told_quietly(answer, caplog, name)
    assert (await server.query_rollouts()).total == 1 + sum(status == 201 for *_, status in BODIES)


async def test_a_body_of_wrong_values_without_end_is_refused_in_short(server: LightningStoreServer) -> None:
    body = json.dumps({"rollout_ids": [1] * 100_000}).encode()
    answer = await ask(server, "POST", "/waits/rollouts", body)
    assert (answer.status, len(answer.body) < 5_000) == (422, True)


async def test_a_key_for_repeats_has_a_length(server: LightningStoreServer) -> None:
    assert (await ask(server, "POST", "/rollouts", b'{"input":1}', idempotency_key="k" * 512)).status == 201
    assert (await ask(server, "POST", "/rollouts", b'{"input":1}', idempotency_key="k" * 513)).status == 400


async def test_the_body_bound_is_32_mib_whatever_the_request_says(server: LightningStoreServer) -> None:
    bound = 32 * 1024 * 1024
    fits = b'{"input":"' + b"x" * (bound - 12) + b'"}'
    assert (await ask(server, "POST", "/rollouts", fits)).status == 201
    assert (await ask(server, "POST", "/rollouts", fits + b" ")).status == 413
    assert (await ask(server, "POST", "/rollouts", content_length=str(bound + 1))).status == 413
    head = f"POST {PREFIX}/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = [b"%x\r\n" % len(fits) + fits + b"\r\n", b"1\r\n \r\n0\r\n\r\n"]
    assert (await exchange(server.server_launcher.port, head, *chunks)).status == 413


@pytest.mark.parametrize("case", ["the description", "a history"])
async def test_the_loop_goes_on_while_a_server_makes_what_takes_long(case: str) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = turns
    if case == "a history":
        ended = [Rollout(rollout_id=f"ro-{n}", input=n, start_time=1.0, status="failed") for n in range(100)]
        await InMemoryLightningStore().import_history(rollouts=ended)
    else:
        app._document.cache_clear()
        await app._openapi(cast("Any", None))
    assert turns > before
    counting.cancel()
