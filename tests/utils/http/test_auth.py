"""Addresses that may be bound, and clients that may connect."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.utils.http.auth import (
    BearerAuth,
    Message,
    Receive,
    Scope,
    Send,
    auth_headers,
    check_bind,
    server_token,
)


async def welcome(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


async def ask(app: Any, headers: dict[str, str], path: str = "/v1/agl/rollouts") -> tuple[int, bytes]:
    """Drive the app as a server would and return status and body."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "path": path, "headers": raw}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def guarded(token: str | None = "s3cret") -> BearerAuth:
    return BearerAuth(welcome, token, is_open=lambda scope: scope["path"] == "/health")


async def test_the_right_token_comes_in() -> None:
    assert await ask(guarded(), auth_headers("s3cret")) == (200, b"in")


@pytest.mark.parametrize(
    "header", ["", "Bearer wrong", "Bearer", "Basic s3cret", "Bearer s3cret2", "Bearer s3cr\u00e9t"]
)
async def test_anything_but_the_token_is_401_with_the_error_class(header: str) -> None:
    status, body = await ask(guarded(), {"Authorization": header} if header else {})
    assert status == 401
    assert b'"error_type": "UnauthorizedError"' in body
    assert b"s3cret" not in body


async def test_an_open_path_needs_no_token() -> None:
    assert await ask(guarded(), {}, path="/health") == (200, b"in")


async def test_without_a_configured_token_everything_passes() -> None:
    assert await ask(guarded(None), {}) == (200, b"in")


def test_an_empty_token_variable_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "")
    assert server_token() is None
    assert auth_headers(server_token()) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_may_be_bound_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_INSECURE", raising=False)
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-box"])
def test_other_addresses_need_a_token_and_the_refusal_names_both_ways_out(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_INSECURE", raising=False)
    with pytest.raises(RuntimeError, match=r"AGL_TOKEN=.*AGL_INSECURE=1"):
        check_bind(host, None)
    with pytest.raises(RuntimeError, match=r"AGL_TOKEN has 15 characters.*at least 16.*openssl rand -hex 32"):
        check_bind(host, "t" * 15)
    check_bind(host, "t" * 16)
    monkeypatch.setenv("AGL_INSECURE", "1")
    check_bind(host, None)
    check_bind(host, "t")
