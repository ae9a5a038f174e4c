"""Bearer tokens of servers: checks of the bind address and of requests. Pure functions and an ASGI middleware."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentlightning.base.process_secrets import TOKEN
from agentlightning.base.process_secrets import server_token as server_token
from agentlightning.utils.env import resolve_bool_env_var
from agentlightning.utils.http.errors import refusal

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = TOKEN
INSECURE_VARIABLE = "AGL_INSECURE"
SHORTEST_TOKEN = 16
"""Minimum number of characters of a token for a server that other machines can reach."""


def auth_headers(token: str | None) -> dict[str, str]:
    """Return the request headers that contain `token`; none without a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach. Names other than `localhost` count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(host: str, token: str | None) -> None:
    """Refuse to serve an address beyond loopback without a token, or with a token that is easy to guess.

    Raises:
        RuntimeError: `host` is not loopback, the token is missing or shorter than `SHORTEST_TOKEN`, and `AGL_INSECURE`
            is not true.
    """
    if is_loopback(host) or resolve_bool_env_var(INSECURE_VARIABLE, fallback=False):
        return
    if token and len(token) >= SHORTEST_TOKEN:
        return
    if token:
        raise RuntimeError(
            f"Refusing to listen on {host}: {TOKEN_VARIABLE} has {len(token)} characters and other machines could "
            f"guess it; at least {SHORTEST_TOKEN} are required. Generate a token with: openssl rand -hex 32"
        )
    raise RuntimeError(
        f"Refusing to listen on {host}: other machines could reach it and no token is set. "
        f"Set {TOKEN_VARIABLE}=<secret> on every machine (generate one with openssl rand -hex 32), or "
        f"{INSECURE_VARIABLE}=1 to allow everyone. To serve only this machine, listen on 127.0.0.1."
    )


def bearer_token(scope: Scope) -> str | None:
    """Return the token in `Authorization: Bearer ...`; None without one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, credential = value.decode(errors="replace").partition(" ")
            return credential.strip() if kind.lower() == "bearer" else None
    return None


def same_token(presented: str | None, token: str) -> bool:
    """Compare in constant time; return False for None."""
    return presented is not None and hmac.compare_digest(presented.encode(), token.encode())


class BearerAuth:
    """ASGI middleware that requires the token in every request, except those that `is_open` accepts.

    Without a configured token, every request is accepted. A rejection is 401 with `error_type` `UnauthorizedError`.
    """

    def __init__(self, app: ASGIApp, token: str | None, is_open: Callable[[Scope], bool]) -> None:
        self.app = app
        self._token = token
        self._usual = f"Bearer {token}".encode()
        self._is_open = is_open

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if (
            self._token is None
            or scope["type"] != "http"
            or any(
                name == b"authorization" and hmac.compare_digest(value, self._usual) for name, value in scope["headers"]
            )
            or self._is_open(scope)
            or same_token(bearer_token(scope), self._token)
        ):
            return self.app(scope, receive, send)
        logger.info("401 for %s %.200a from %s", scope.get("method"), scope["path"], scope.get("client"))
        text = (
            f"The bearer token is missing or wrong; send the server's {TOKEN_VARIABLE} as 'Authorization: Bearer ...'"
        )
        reply = refusal(401, text, "UnauthorizedError")
        return reply._replace(extra=((b"www-authenticate", b"Bearer"),)).send(send)
