"""The host names that a server accepts. A page on the internet can make its own name resolve to 127.0.0.1 (DNS
rebinding) and then read a loopback server as if it were its own server. The `Host` header contains that name, so a
server can detect this.

The same check stops writes that need no response: a page of another origin may post to the loopback address, with the
right `Host`. Its browser sends the origin in `Origin`. Only pages of listed origins can be allowed (CORS).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware

from agentlightning.utils.env import resolve_str_env_var
from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send, is_loopback
from agentlightning.utils.http.errors import ErrorReply, refusal

logger = logging.getLogger(__name__)

HOSTS_VARIABLE = "AGL_ALLOWED_HOSTS"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_READS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing, and are useless to a page that may not read the response."""
_REMEMBERED = 256


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_~!$&'()*+,;=%.-]+?)\.?)(?::[0-9]{1,5})?")
"""RFC 9112, section 3.2: a name or an address and a port, without a user."""


def host_name(header: str) -> str:
    """Return the name in a `Host` header or the host of a URL: lower case, without port, brackets and final dot.

    An invalid header is returned in lower case: it equals no name.
    """
    text = header.lower()
    match = _HOST.fullmatch(text)
    return text if match is None else match[1] or match[2]


@dataclass(frozen=True)
class AllowedHosts:
    """The allowed names; None allows every name."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, bind_host: str, told_host: str, allowed: str | Sequence[str] | None) -> AllowedHosts:
        """Return the rule for a server that binds `bind_host` and publishes `told_host`.

        `allowed` (or `AGL_ALLOWED_HOSTS`, separated by commas) adds names; `*` allows all. A server that is bound
        beyond loopback without such names allows every name: the token protects it.
        """
        names = allowed if allowed is not None else resolve_str_env_var(HOSTS_VARIABLE) or ""
        names = names.split(",") if isinstance(names, str) else names
        listed = [name.strip() for name in names if name.strip()]
        if "*" in listed or (not listed and not is_loopback(bind_host)):
            return cls(None)
        return cls(frozenset(host_name(name) for name in (*_LOOPBACK_NAMES, bind_host, told_host, *listed) if name))

    def allows(self, header: str) -> bool:
        """Return True if a request with this `Host` is accepted."""
        return self.names is None or host_name(header) in self.names


class HostDoor:
    """ASGI middleware: accepts a request only with an allowed host name, for any path.

    With `same_origin`, it also rejects writes by pages of other origins that are not in `origins`. This is for servers
    without a token, which accept every request that reaches the port.
    """

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, *, same_origin: bool = False, origins: Sequence[str] = ()
    ) -> None:
        self.app = app
        self._hosts = hosts
        self._same_origin = same_origin and "*" not in origins
        self._origins = frozenset(origins)
        self._known: set[bytes] = set()
        """Headers that were allowed before."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self.app(scope, receive, send)
        host: bytes | None = None
        origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None and host != value:
                    return refusal(400, "The request has two Host headers", "BadRequestError").send(send)
                host = value
            elif name == b"origin":
                if origin is not None and origin != value:
                    return refusal(400, "The request has two Origin headers", "BadRequestError").send(send)
                origin = value
        header = (host or b"").decode("latin-1")
        if self._hosts.names is not None and host not in self._known:
            if host is None or not self._hosts.allows(header):
                shown, name = header[:100], host_name(header)[:100] or "<name>"
                text = f"The Host header is {shown!r}, which is not a name of this server. "
                way = f"Use the address that the server printed, or set on the server: {HOSTS_VARIABLE}={name}"
                return _refused("HostNotAllowed", text + way).send(send)
            if len(self._known) < _REMEMBERED:
                self._known.add(host)
        if origin is not None and self._same_origin and scope["method"] not in _READS:
            page = origin.decode("latin-1")
            own = (f"http://{header}", f"https://{header}") if _HOST.fullmatch(header.lower()) else ()
            if page not in self._origins and page not in own:
                text = f"The request is from a page of another origin, {page[:100]!r}. Allow that origin "
                way = "(cors_allow_origins, or --cors-origin), or set AGL_TOKEN on the server and send it"
                return _refused("OriginNotAllowed", text + way).send(send)
        return self.app(scope, receive, send)


def _refused(error_type: str, text: str) -> ErrorReply:
    logger.info("403 %s: %.200a", error_type, text)
    return refusal(403, text, error_type)


def listed_origins(origins: str | Sequence[str] | None) -> list[str]:
    """Return the origins without blanks; `*` means all origins."""
    listed = [origins] if isinstance(origins, str) else list(origins or [])
    listed = [origin.strip() for origin in listed if origin.strip()]
    return ["*"] if "*" in listed else listed


class NamedOrigins:
    """ASGI middleware that lets pages of `origins` read responses, including errors, and answers their preflights.

    It runs before the check of the token, since a preflight has none. A request from another origin gets no CORS
    header, so that its page may not read the response; its preflight is rejected. `*` allows every origin, without
    credentials.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials="*" not in origins,
            expose_headers=["*"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is not None and self._cors.is_allowed_origin(origin.decode("latin-1")):
            await self._cors(scope, receive, send)
        elif origin is not None and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            shown = origin.decode("latin-1")[:100]
            text = f"The origin {shown!r} is not allowed; allow it with cors_allow_origins, or --cors-origin"
            await refusal(403, text, "OriginNotAllowed").send(send)
        else:
            await self._app(scope, receive, send)
