"""`agl dashboard`: the dashboard of a run, a database or a running server."""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser
from urllib.parse import urlsplit

import typer

from agentlightning.cli.output import log_to_stderr, say, spec_of_place
from agentlightning.errors import BadRequestError

_PLACE = typer.Argument(
    "agl.db", metavar="PLACE", help="Folder of a run, a store file, a database, or a server (http://127.0.0.1:4747)"
)
_PATIENCE_SECONDS = 5.0


def dashboard(
    place: str = _PLACE,
    port: int = typer.Option(0, min=0, max=65535, help="Port of the dashboard; 0 selects a free port"),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open a browser if a display is available"),
) -> None:
    """Open the dashboard of a run, a store file, a database or a server.

    A folder, a file or a database is served on this machine until you press Ctrl+C. A server has its own dashboard,
    which is opened.

    Example: agl dashboard runs/20260101-120000
    """
    log_to_stderr("WARNING", json_lines=False)
    if place.startswith(("http://", "https://")):
        if port:
            raise BadRequestError(f"--port {port} has no effect: {place} serves its own dashboard")
        url = asyncio.run(_page_of(place))
        say(f"dashboard: {url}")
        _open(url, browser)
        return
    from agentlightning.cli.store import serve_store

    spec = spec_of_place(place, "PLACE")

    def ready(url: str) -> None:
        say(f"dashboard: {url}   (press Ctrl+C to stop)")
        _open(url, browser)

    asyncio.run(serve_store(spec, {}, {"port": port}, ready))


async def _page_of(place: str) -> str:
    """Return the address of a server's dashboard."""
    import aiohttp

    parts = urlsplit(place)
    if not parts.hostname:
        raise BadRequestError(f"{place!r} is not the address of a server. Expected http://host:port")
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/"
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            media, version = reply.content_type, reply.headers.get("x-agl-version")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or "no response in time"
        raise BadRequestError(f"Cannot reach a server at {url}: {reason}. Start one with: agl store") from None
    if media != "text/html" or version is None:
        problem = "is not a store server" if version is None else f"has version {version} and no dashboard"
        raise BadRequestError(f"The server at {url} {problem}. Open its data instead: agl dashboard FILE_OR_DATABASE")
    return url


def _open(url: str, enabled: bool) -> None:
    """Open the address in a browser if this is a terminal with a display."""
    screen = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if enabled and screen and sys.stdout.isatty():
        webbrowser.open(url)
