"""The files of the dashboard: one document at `/`, and its assets at `/assets/`.

The dashboard may only run its own files. Its Content-Security-Policy forbids inline scripts and other hosts. A nonce
allows the styles that its components create. Addresses within the dashboard follow `#`, so `/` is the only document.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

STATIC: Final = Path(__file__).parent / "static"
NONCE: Final = "__CSP_NONCE__"
"""Placeholder for the nonce in the built document."""
_YEAR: Final = "public, max-age=31536000, immutable"
_TEXT: Final = frozenset((".js", ".css", ".html", ".svg", ".json", ".txt"))
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_NOT_BUILT: Final = (
    "The store is running, but the dashboard is not built in this installation. "
    "In a clone of the repository, build it with: make dashboard\n"
    "The data of the store is available under /v1/agl (see /openapi.json) and with `agl runs list`.\n"
)


PATHS: Final[dict[str, Any]] = {
    "/": {
        "get": {
            "operationId": "page",
            "summary": "Return the dashboard. It requires no token, but its data does",
            "security": [],
            "responses": {
                "200": {"description": "The dashboard", "content": {"text/html": {"schema": {"type": "string"}}}},
                "404": {"description": "The dashboard is not built", "content": {"text/plain": {}}},
            },
        }
    },
    "/assets/{name}": {
        "get": {
            "operationId": "page_file",
            "summary": "Return a file of the dashboard. It requires no token",
            "security": [],
            "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": {
                "200": {"description": "The file", "content": {"*/*": {}}},
                "304": {"description": "The file has not changed"},
                "404": {"description": "The file does not exist", "content": {"text/plain": {}}},
            },
        }
    },
}
"""OpenAPI description of these paths."""


class _File(NamedTuple):
    """A file of the dashboard, read once."""

    body: bytes
    packed: bytes | None
    """The body compressed with gzip; None if that is not shorter."""
    tag: str
    media_type: str


class Pages:
    """Server for the files of a `vite build` folder. Files are read once and cached. All are below a megabyte."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._assets: dict[str, _File] = {}

    def routes(self) -> list[Route]:
        """Return the paths of the dashboard."""
        methods = ["GET", "HEAD"]
        return [Route("/", self._page, methods=methods), Route("/assets/{name}", self._asset, methods=methods)]

    def is_open(self, path: str) -> bool:
        """Return True for the paths of the dashboard, which contain no data."""
        return path == "/" or (path.startswith("/assets/") and path.count("/") == 2)

    @cached_property
    def _document(self) -> str | None:
        try:
            return (self._folder / "index.html").read_text("utf-8")
        except FileNotFoundError:
            return None

    @cached_property
    def _names(self) -> frozenset[str]:
        """Names of the files that may be requested. No other file can be read."""
        assets = self._folder / "assets"
        return frozenset(file.name for file in assets.iterdir() if file.is_file()) if assets.is_dir() else frozenset()

    async def _page(self, request: Request) -> Response:
        if self._document is None:
            return PlainTextResponse(_NOT_BUILT, 404, {"cache-control": "no-store", **_HEADERS})
        nonce = secrets.token_urlsafe(16)
        headers = {**_HEADERS, "content-security-policy": policy(nonce), "cache-control": "no-store"}
        return Response(self._document.replace(NONCE, nonce), 200, headers, media_type="text/html")

    async def _asset(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in self._names:
            text = f"Not Found: the dashboard has no file {name[:100]!a}. Reload the page, it may be outdated\n"
            return PlainTextResponse(text, 404, {"cache-control": "no-store", **_HEADERS})
        file = self._assets.get(name) or self._read(name)
        headers = {**_HEADERS, "cache-control": _YEAR, "etag": file.tag, "vary": "accept-encoding"}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = file.body
        if file.packed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
            body, headers["content-encoding"] = file.packed, "gzip"
        return Response(body, 200, headers, media_type=file.media_type)

    def _read(self, name: str) -> _File:
        path = self._folder / "assets" / name
        body = path.read_bytes()
        packed = gzip.compress(body, 9, mtime=0) if path.suffix in _TEXT else None
        media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        file = _File(body, packed if packed and len(packed) < len(body) else None, tag, media_type)
        self._assets[name] = file
        return file


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy of a response (W3C, Content Security Policy Level 3)."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}'",
            f"style-src 'self' 'nonce-{nonce}'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _takes_gzip(header: str) -> bool:
    """Return True if an Accept-Encoding header accepts gzip (RFC 9110, section 12.5.3)."""
    for each in header.split(","):
        coding, _, rest = each.partition(";")
        if coding.strip().lower() in ("gzip", "*"):
            return rest.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
