"""The dispatch of JSON operations on a real socket: paths, methods, bodies and their bounds, waits that end."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from agentlightning.errors import BusyError, GoneError
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.byte_budget import ByteBudget
from agentlightning.utils.http.dispatch import Endpoint, JsonDispatch, Request
from agentlightning.utils.http.errors import refusal
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.stubs.raw_http import Answer, exchange, read_answer, request


class Fields(TypedDict, total=False):
    wait: float
    fail: str
    more: list[int]


FIELDS = TypeAdapter(Fields)
FAILURES: dict[str, Exception] = {
    "busy": BusyError("full", retry_after=7.4),
    "gone": GoneError("dropped"),
    "value": ValueError("no such colour"),
    "type": TypeError("no text"),
    "number": OverflowError("too large"),
    "missing": NotImplementedError("not here"),
    "ours": KeyError("s3cret"),
}


class Served:
    """A dispatch with a few endpoints that echo what they got."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        endpoints = [
            Endpoint(method, path, read, self.call, encode, may_wait=waits)
            for method, path in (
                ("GET", "/things"),
                ("POST", "/things"),
                ("POST", "/things/search"),
                ("GET", "/things/{thing}"),
                ("POST", "/things/{thing}"),
                ("GET", "/things/{thing}/parts/latest"),
                ("GET", "/things/{thing}/parts/{part}"),
            )
        ]
        self.app = JsonDispatch(endpoints, self.fallback, max_body_bytes=100_000, budget=ByteBudget(200_000))

    async def call(self, request: Request, fields: dict[str, Any]) -> dict[str, Any]:
        if "wait" in fields:
            self.waiting.set()
            try:
                await asyncio.sleep(fields["wait"])
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if "fail" in fields:
            if fields["fail"] == "value of its own":
                FIELDS.validate_python({"wait": "s3cret"})
            raise FAILURES[fields["fail"]]
        return {"path": request.path, "query": request.query, "bytes": len(request.body), "token": request.token}

    async def fallback(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refusal(404, "elsewhere", "NotFound").send(send)


def read(request: Request) -> dict[str, Any]:
    return dict(FIELDS.validate_json(request.body or b"{}"))


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def waits(fields: dict[str, Any]) -> bool:
    return fields.get("wait", 0) > 0


@pytest.fixture
async def served() -> Served:
    return Served()


@pytest.fixture
async def server(served: Served) -> AsyncIterator[PythonServerLauncher]:
    made = PythonServerLauncher(served.app, PythonServerLauncherArgs(shutdown_timeout=5.0))
    await made.start()
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/things", {}),
        ("/things/a", {"thing": "a"}),
        ("/things/search", {"thing": "search"}),  # the literal path takes POST only
        ("/things/", {"thing": ""}),
        ("/things/..", {"thing": ".."}),
        ("/things/..%2f..%2Fetc", {"thing": "../../etc"}),
        ("/things/%2e%2e", {"thing": ".."}),
        ("/things/a%00b", {"thing": "a\0b"}),
        ("/things/%C3%A9", {"thing": "é"}),
        ("/things/a/parts/latest", {"thing": "a"}),
        ("/things/a/parts/b?x=1", {"thing": "a", "part": "b"}),
        ("/things/a%2Fparts%2Flatest", {"thing": "a/parts/latest"}),
    ],
)
async def test_a_path_is_found_and_its_parameters_are_taken_out(
    server: PythonServerLauncher, path: str, parameters: dict[str, str]
) -> None:
    answer = await exchange(server.port, request("GET", path))
    assert (answer.status, answer.json["path"]) == (200, parameters)


@pytest.mark.parametrize("path", ["/", "/things/a/b", "/thing", "/things%2Fa", "/things/../things", "//things"])
async def test_any_other_path_goes_to_the_fallback(server: PythonServerLauncher, path: str) -> None:
    assert (await exchange(server.port, request("GET", path))).status == 404


async def test_a_literal_segment_wins_over_a_parameter(server: PythonServerLauncher) -> None:
    assert (await exchange(server.port, request("POST", "/things/search"))).json["path"] == {}


async def test_other_methods_are_answered_with_those_that_there_are(server: PythonServerLauncher) -> None:
    wrong = await exchange(server.port, request("DELETE", "/things"))
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS, POST")
    assert wrong.json["error_type"] == "MethodNotAllowed"
    answer = await exchange(server.port, request("OPTIONS", "/things/a/parts/b"))
    assert (answer.status, answer.headers["allow"], answer.body) == (204, "GET, HEAD, OPTIONS", b"")
    head = await exchange(server.port, request("HEAD", "/things"), to_head=True)
    assert (head.status, int(head.headers["content-length"]) > 0) == (200, True)


async def test_query_and_token_reach_the_endpoint(server: PythonServerLauncher) -> None:
    answer = await exchange(server.port, request("GET", "/things?a=1&a=2&b=%C3%A9&c=", idempotency_key="k"))
    assert answer.json["query"] == [["a", "1"], ["a", "2"], ["b", "é"], ["c", ""]]
    assert answer.json["token"] == "k"


@pytest.mark.parametrize("path", ["/things/%ff", "/things?a=%ff", "/things?" + "a=1&" * 5000])
async def test_what_is_no_utf8_or_has_no_end_is_400(server: PythonServerLauncher, path: str) -> None:
    assert (await exchange(server.port, request("GET", path))).status == 400


def in_chunks(size: int, count: int) -> list[bytes]:
    chunk = b"%x\r\n" % size + b" " * size + b"\r\n"
    head = b"POST /things HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *([chunk] * count), b"2\r\n{}\r\n", b"0\r\n\r\n"]


async def test_a_body_up_to_the_bound_is_read_in_whatever_pieces(server: PythonServerLauncher) -> None:
    body = b" " * 99_998 + b"{}"
    assert (await exchange(server.port, request("POST", "/things", body))).json["bytes"] == 100_000
    assert (await exchange(server.port, *in_chunks(9_999, 10))).json["bytes"] == 99_992


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([request("POST", "/things", b" " * 100_001)], id="honest"),
        pytest.param([request("POST", "/things", content_length="99999999999")], id="announced"),
        pytest.param([request("POST", "/things", expect="100-continue", content_length="99999999999")], id="asked for"),
        pytest.param(in_chunks(9_999, 11), id="chunked"),
        pytest.param(in_chunks(150_000, 1), id="one chunk"),
    ],
)
async def test_a_body_beyond_the_bound_is_413_and_told_in_our_form(
    server: PythonServerLauncher, pieces: list[bytes]
) -> None:
    answer = await exchange(server.port, *pieces)
    assert (answer.status, answer.json["error_type"]) == (413, "TooLargeError")
    assert "100000 bytes" in answer.json["detail"]


async def test_a_connection_goes_on_after_a_body_beyond_the_bound(server: PythonServerLauncher) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", "/things", b" " * 300_000) + request("GET", "/things"))
    assert [(await read_answer(reader)).status for _ in range(2)] == [413, 200]
    writer.close()


async def test_a_length_that_says_less_than_comes_does_not_smuggle_a_request_in(server: PythonServerLauncher) -> None:
    inner = request("GET", "/things/inner")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", "/things", b"{}" + inner, content_length="2"))
    first, second = await read_answer(reader), await read_answer(reader)
    assert (first.json["bytes"], second.json["path"]) == (2, {"thing": "inner"})  # two requests, as RFC 9112 reads it
    writer.close()


async def test_a_compressed_body_is_refused_and_says_what_to_do(server: PythonServerLauncher) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    answer = await exchange(server.port, request("POST", "/things", bomb, content_encoding="gzip"))
    assert answer.status == 415
    assert "without Content-Encoding" in answer.json["detail"]


async def test_large_bodies_beyond_what_is_held_at_once_are_told_to_come_back(server: PythonServerLauncher) -> None:
    begun = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    for _, writer in begun:
        writer.write(request("POST", "/things", b" " * 90_000, content_length="100000"))
    answers = [asyncio.create_task(read_answer(reader)) for reader, _ in begun]
    done, waiting = await asyncio.wait(answers, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    refused = done.pop().result()
    assert (refused.status, refused.json["error_type"]) == (429, "BusyError")
    assert int(refused.headers["retry-after"]) >= 1
    for _, writer in begun:
        writer.write(b" " * 9_998 + b"{}")
    assert {(await answer).status for answer in waiting} == {200}
    for _, writer in begun:
        writer.close()
    assert (await exchange(server.port, request("POST", "/things", b" " * 90_000 + b"{}"))).status == 200


@pytest.mark.parametrize(
    ("failure", "status", "error_type"),
    [
        ("busy", 429, "BusyError"),
        ("gone", 410, "GoneError"),
        ("value", 400, "ValueError"),
        ("type", 400, "TypeError"),
        ("number", 400, "OverflowError"),
        ("missing", 501, "NotImplementedError"),
    ],
)
async def test_an_error_of_the_request_is_answered_with_its_class_and_logged_in_one_line(
    server: PythonServerLauncher, failure: str, status: int, error_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer = await exchange(server.port, request("POST", "/things", json.dumps({"fail": failure}).encode()))
    assert (answer.status, answer.json) == (status, {"detail": str(FAILURES[failure]), "error_type": error_type})
    assert answer.headers.get("retry-after") == ("7" if failure == "busy" else None)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]


async def test_a_failure_of_ours_is_500_without_details_and_logged_once_with_its_traceback(
    server: PythonServerLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await exchange(server.port, request("POST", "/things", b'{"fail": "ours"}'))
    assert (answer.status, answer.json["detail"]) == (500, "Internal server error")
    assert b"s3cret" not in answer.body
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [("ERROR", True)]


async def test_a_wrong_shape_says_where_and_holds_back_the_values(server: PythonServerLauncher) -> None:
    answer = await exchange(server.port, request("POST", "/things", b'{"wait": "s3cret"}'))
    assert (answer.status, answer.json["error_type"]) == (422, "ValidationError")
    assert answer.json["detail"][0]["loc"] == ["body", "wait"]
    assert b"s3cret" not in answer.body


async def test_a_value_that_only_the_work_itself_finds_wrong_is_told_in_the_same_way(
    server: PythonServerLauncher,
) -> None:
    answer = await exchange(server.port, request("POST", "/things", b'{"fail": "value of its own"}'))
    assert (answer.status, answer.json["detail"][0]["loc"]) == (422, ["arguments", "wait"])
    assert b"s3cret" not in answer.body


async def test_a_body_full_of_wrong_values_gets_a_short_answer(server: PythonServerLauncher) -> None:
    for count in (100, 10_000):
        body = json.dumps({"more": ["x"] * count}, separators=(",", ":")).encode()
        answer = await exchange(server.port, request("POST", "/things", body))
        assert answer.status == 422
        assert len(answer.body) < 4_000


async def test_work_that_waits_is_cancelled_when_its_client_leaves(
    server: PythonServerLauncher, served: Served
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", "/things", b'{"wait": 60}'))
    await asyncio.wait_for(served.waiting.wait(), 10)
    writer.close()
    await asyncio.wait_for(served.cancelled.wait(), 10)


async def test_work_that_waits_ends_at_once_when_the_server_stops(server: PythonServerLauncher, served: Served) -> None:
    waiting = asyncio.create_task(exchange(server.port, request("POST", "/things", b'{"wait": 60}')))
    await asyncio.wait_for(served.waiting.wait(), 10)
    await asyncio.wait_for(server.stop(), 3)  # less than its patience with requests
    answer: Answer = await waiting
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
