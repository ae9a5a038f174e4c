"""Cross-origin requests from pages (CORS): allowed for named origins, and for those only."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware

from agentlightning.utils.http.auth import ASGIApp, Receive, Scope, Send
from agentlightning.utils.http.errors import refusal


def listed_origins(origins: str | Sequence[str] | None) -> list[str]:
    """Return the origins without blanks; `*` stands for all of them."""
    listed = [origins] if isinstance(origins, str) else list(origins or [])
    listed = [origin.strip() for origin in listed if origin.strip()]
    return ["*"] if "*" in listed else listed


class NamedOrigins:
    """ASGI middleware that lets pages of `origins` read the answers, errors included, and answers their preflights.

    It stands before the token is asked for, since a preflight carries none. What comes from another origin gets no CORS
    header, so that the page behind it may not read the answer; its preflight is refused. `*` allows every origin,
    without credentials.
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
            text = f"The origin {shown!r} is not allowed here; allow it with cors_allow_origins, or --cors-origin"
            await refusal(403, text, "OriginNotAllowed").send(send)
        else:
            await self._app(scope, receive, send)
