"""Access to a store server: every route of the app, present and future, is tried with every kind of key."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.routing import Route

from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http.openapi import openapi_document
from agentlightning.store.http.operations import OPERATIONS, PREFIX
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types.attempt_key import attempt_key
from agentlightning.utils.metrics import PrometheusMetricsBackend
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from agentlightning.utils.version import VERSION
from tests.store.conftest import Serve
from tests.stubs.raw_http import Answer, exchange, request

TOKEN = "the-token-of-this-server"
OPEN = {("GET", "/health"), ("GET", f"{PREFIX}/health")}
"""Routes without a token; a further entry needs a ruling."""
FILES = {("GET", "/"), ("GET", "/assets/{name}")}
"""The page, without a token too: it holds no data."""
KEYS = {
    "no key": "",
    "wrong token": "Bearer wrong-token",
    "part of the token": "Bearer right",
    "more than the token": "Bearer right-token2",
    "token in another scheme": "Basic right-token",
    "attempt key": f"Bearer {attempt_key('ro-1', 'at-1', TOKEN)}",
    "attempt key of a server without a token": f"Bearer {attempt_key('ro-1', 'at-1', None)}",
    "bytes that are no text": "Bearer \xff\xfe",
}

Ways = set[tuple[str, str]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_TOKEN", "AGL_ALLOWED_HOSTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def guarded(serve: Serve) -> LightningStoreServer:
    return (await serve(token=TOKEN))[0]


def served_ways(server: LightningStoreServer) -> Ways:
    """Return (method, path) of everything that the app answers, as the app itself has it."""
    ways = {(endpoint.method, endpoint.path) for endpoint in server.app.dispatch.endpoints}
    for route in server.app.others.routes:
        assert isinstance(route, Route), f"{route!r} is of a kind that this walk does not know: teach it"
        ways |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    return ways


def described_ways() -> Ways:
    return {(method.upper(), path) for path, methods in openapi_document()["paths"].items() for method in methods}


async def ask(server: LightningStoreServer, method: str, path: str, **headers: str) -> Answer:
    filled = path.replace("{", "").replace("}", "")
    return await exchange(server.server_launcher.port, request(method, filled, **headers), to_head=method == "HEAD")


def test_the_description_names_exactly_what_is_served() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    assert described_ways() == served_ways(server)
    rows = {(operation.method, PREFIX + operation.path) for operation in OPERATIONS.values()}
    assert rows <= described_ways()


def test_the_description_says_what_needs_no_token() -> None:
    document = openapi_document()
    assert document["security"] == [{"token": []}]
    without = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, entry in methods.items()
        if entry.get("security") == []
    }
    assert without == OPEN | FILES


@pytest.mark.parametrize("key", KEYS)
async def test_no_route_lets_anyone_in_without_the_token(guarded: LightningStoreServer, key: str) -> None:
    ways = served_ways(guarded) | described_ways()
    ways |= {(method, path) for _, path in ways for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")}
    ways |= {("GET", path) for path in ("/anything", f"{PREFIX}/nothing", "/docs", "/assets", "/assets/x/y.js")}
    for method, path in sorted(ways - OPEN - FILES):
        if method != "GET" and ("GET", path) in OPEN | FILES:
            continue
        answer = await ask(guarded, method, path, authorization=KEYS[key])
        assert answer.status == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-agl-version"] == VERSION
        if method != "HEAD":
            assert answer.json["error_type"] == "UnauthorizedError"
            assert TOKEN.encode() not in answer.body


async def test_every_route_lets_the_token_in(guarded: LightningStoreServer) -> None:
    for method, path in sorted(served_ways(guarded) - FILES):
        answer = await ask(guarded, method, path, authorization=f"bearer  {TOKEN}")
        assert answer.status not in (401, 403, 405), (method, path, answer)
        assert answer.status < 500, (method, path, answer)
        assert answer.headers["x-agl-version"] == VERSION
        assert answer.status != 404 or answer.json["error_type"] == "NotFoundError", (method, path)


async def test_what_is_open_stays_open_whatever_key_comes_with_it(guarded: LightningStoreServer) -> None:
    for method, path in OPEN:
        for key in KEYS.values():
            assert (await ask(guarded, method, path, authorization=key)).status == 200


@pytest.mark.parametrize(
    "path",
    [
        f"{PREFIX}/rollouts/",
        f"/{PREFIX}/rollouts",
        "/%76%31/agl/rollouts",
        "/v1%2fagl%2frollouts",
        "/health/",
        "/health/../v1/agl/rollouts",
        "/health%2f..%2fv1%2fagl%2frollouts",
        "/health;/v1/agl/rollouts",
        "/HEALTH",
        f"{PREFIX}/health/../rollouts",
        f"{PREFIX}/rollouts/health",
        "/%2e%2e/health/x",
        "/health%00",
    ],
)
async def test_no_spelling_of_a_path_gets_around_the_token(guarded: LightningStoreServer, path: str) -> None:
    assert (await ask(guarded, "GET", path)).status == 401


async def test_a_token_of_any_letters_works(serve: Serve) -> None:
    _, client = await serve(token="schlüssel-鍵")
    assert (await client.statistics())["total_rollouts"] == 0


# --- Host ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4747", "127.0.0.1.evil.example", ""])
async def test_every_route_refuses_a_name_that_is_not_the_servers(serve: Serve, host: str) -> None:
    server, _ = await serve()
    for method, path in sorted(served_ways(server) | {("GET", "/"), ("OPTIONS", "/health")}):
        answer = await ask(server, method, path, host=host)
        assert (answer.status, answer.json["error_type"]) == (403, "HostNotAllowed"), (method, path)
        assert "AGL_ALLOWED_HOSTS=" in answer.json["detail"]
        assert answer.headers["x-agl-version"] == VERSION


async def test_the_loopback_names_and_added_ones_are_answered(serve: Serve) -> None:
    server, _ = await serve(allowed_hosts=["store.example"])
    for host in ("localhost", "localhost:1", "127.0.0.1:4747", "[::1]:4747", "store.example:80"):
        assert (await ask(server, "GET", f"{PREFIX}/rollouts", host=host)).status == 200, host


async def test_two_host_headers_are_refused(serve: Serve) -> None:
    server, _ = await serve()
    twice = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    assert (await exchange(server.server_launcher.port, twice)).status == 400


async def test_clients_that_use_the_address_they_were_told_notice_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "gateway.example")
    for settings in ({}, {"host": "127.0.0.1"}, {"host": "localhost"}, {"host": "0.0.0.0", "token": TOKEN}):
        _, client = await serve(**settings)
        assert (await client.enqueue_rollout("x")).status == "queuing"


async def test_beyond_loopback_the_token_protects_and_any_name_is_answered(serve: Serve) -> None:
    server, _ = await serve(host="0.0.0.0", token=TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert (await ask(server, "GET", f"{PREFIX}/rollouts", host="some.cluster.name", **headers)).status == 200
    assert (await ask(server, "GET", f"{PREFIX}/rollouts", host="some.cluster.name")).status == 401


async def test_the_access_host_of_launcher_arguments_is_a_name_of_the_server() -> None:
    args = PythonServerLauncherArgs(port=0, launch_mode="thread", access_host="tunnel.example")
    server = LightningStoreServer(InMemoryLightningStore(), launcher_args=args)
    await server.start()
    assert (await ask(server, "GET", "/health", host="tunnel.example:80")).status == 200
    await server.stop()


# --- pages of other origins ------------------------------------------------------------------------------------------

PAGE = "https://page.example"
PREFLIGHT = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}


def cors_headers(answer: Answer) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


async def test_without_named_origins_no_answer_has_a_cors_header(serve: Serve) -> None:
    for origins in (None, ["", " "]):
        server, _ = await serve(token=TOKEN, cors_allow_origins=origins)
        for method, path in (("GET", "/health"), ("OPTIONS", f"{PREFIX}/rollouts"), ("GET", "/nothing")):
            assert not cors_headers(await ask(server, method, path, origin=PAGE, **PREFLIGHT))


async def test_a_preflight_of_a_named_origin_needs_no_token_and_another_one_is_refused(
    serve: Serve,
) -> None:
    server, _ = await serve(token=TOKEN, cors_allow_origins=[PAGE, " "])
    for method, path in sorted(served_ways(server)):
        preflight = {**PREFLIGHT, "access_control_request_method": method}
        good = await ask(server, "OPTIONS", path, origin=PAGE, **preflight)
        assert (good.status, good.headers["access-control-allow-origin"]) == (200, PAGE)
        assert good.headers["access-control-allow-headers"] == "authorization"
        bad = await ask(server, "OPTIONS", path, origin="https://evil.example", **preflight)
        assert (bad.status, bad.json["error_type"], cors_headers(bad)) == (403, "OriginNotAllowed", set())


async def test_errors_carry_the_cors_headers_too_so_that_a_page_can_read_them(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = await serve(token=TOKEN, cors_allow_origins=PAGE)

    async def broken(rollout_id: str) -> None:
        raise RuntimeError("s3cret")

    monkeypatch.setattr(server.store, "get_rollout_by_id", broken)
    request_headers = {"authorization": f"Bearer {TOKEN}"}
    cases = [
        (401, "GET", f"{PREFIX}/rollouts", {}),
        (404, "GET", "/nothing", request_headers),
        (404, "POST", f"{PREFIX}/rollouts/x/attempts", request_headers),
        (405, "DELETE", f"{PREFIX}/rollouts", request_headers),
        (422, "POST", f"{PREFIX}/rollouts", request_headers),
        (500, "GET", f"{PREFIX}/rollouts/x", request_headers),
        (200, "GET", f"{PREFIX}/rollouts", request_headers),
    ]
    for status, method, path, headers in cases:
        answer = await ask(server, method, path, origin=PAGE, **headers)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, PAGE), (method, path)
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert b"s3cret" not in answer.body
        assert not cors_headers(await ask(server, method, path, origin="https://evil.example", **headers))


async def test_a_star_lets_every_page_read_without_credentials(serve: Serve) -> None:
    server, _ = await serve(cors_allow_origins=["https://a.example", "*"])
    answer = await ask(server, "GET", f"{PREFIX}/rollouts", origin="https://b.example")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


async def test_without_a_token_a_page_of_another_origin_cannot_write(serve: Serve) -> None:
    server, _ = await serve(cors_allow_origins=PAGE)
    path = f"{PREFIX}/queues/rollouts/dequeue"
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        answer = await ask(server, "POST", path, origin=origin, content_type="text/plain")
        assert (answer.status, answer.json["error_type"]) == (403, "OriginNotAllowed")
        assert "AGL_TOKEN" in answer.json["detail"]
    own = f"127.0.0.1:{server.server_launcher.port}"
    assert (await ask(server, "POST", path, host=own, origin=f"http://{own}")).status == 200
    assert (await ask(server, "POST", path, origin=PAGE)).status == 200
    assert (await ask(server, "POST", path)).status == 200


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_told_where_the_operations_are(serve: Serve) -> None:
    server, _ = await serve()
    answer = await ask(server, "GET", "/v2/agl/rollouts")
    assert (answer.status, answer.json["error_type"]) == (404, "NotFound")
    assert PREFIX in answer.json["detail"]
    assert "/openapi.json" in answer.json["detail"]


async def test_other_methods_are_405_with_those_that_there_are(serve: Serve) -> None:
    server, _ = await serve()
    for path, allowed in (("/health", "GET, HEAD"), ("/v1/traces", "POST"), (f"{PREFIX}/events", "GET, HEAD")):
        answer = await ask(server, "DELETE", path)
        assert (answer.status, answer.json["error_type"]) == (405, "MethodNotAllowed")
        assert sorted(answer.headers["allow"].split(", ")) == sorted(allowed.split(", "))


async def test_a_failure_beside_the_operations_is_500_without_details_and_logged_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = await serve()

    async def broken(request: Any) -> Any:
        raise RuntimeError("s3cret")

    server.app.others.router.routes.append(Route("/broken", broken))
    answer = await ask(server, "GET", "/broken")
    assert (answer.status, answer.json["detail"]) == (500, "Internal server error")
    assert b"s3cret" not in answer.body
    await server.stop()  # the line comes after the answer
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["ERROR"]


async def test_a_tracker_counts_requests_by_the_path_they_fit_and_refused_ones_too(serve: Serve) -> None:
    server, _ = await serve(token=TOKEN, tracker=PrometheusMetricsBackend())
    headers = {"authorization": f"Bearer {TOKEN}"}
    await ask(server, "GET", f"{PREFIX}/rollouts/one", **headers)
    await ask(server, "GET", f"{PREFIX}/rollouts/two")
    await ask(server, "GET", "/no/such/path", **headers)
    page = (await ask(server, "GET", "/v1/prometheus", **headers)).body.decode()
    for path, status in ((f"{PREFIX}/rollouts/{{rollout_id}}", 200), (f"{PREFIX}/rollouts/{{rollout_id}}", 401)):
        assert f'agl_http_total{{method="GET",path="{path}",status="{status}"}}' in page
    assert "/no/such/path" not in page
