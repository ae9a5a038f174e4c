"""The HTTP application of the embedded engine: `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`.

A call for a stream gets each whole completion in its first frames: sequences are decoded together and short, so there
is little to gain by sending pieces. A client that closes the connection ends its completions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.engine.request.fields import RequestError
from agentlightning.engine.service import ChatService
from agentlightning.errors import BusyError, TooLargeError
from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.llm_proxy.dialects.json_values import json_bytes
from agentlightning.semconv import ATTEMPT_HEADER
from agentlightning.utils.http.byte_budget import ClientLeftError, Hold, client_hold, read_body
from agentlightning.utils.http.whole_answer import send_whole

_CHAT: Final = "/v1/chat/completions"


def make_app(service: ChatService, health: Callable[[], dict[str, object]]) -> ASGIApp:
    """Return the application; `health` adds to the answer of `/health`."""

    async def chat_completions(request: Request) -> Response | bytes:
        """Return the answer, or the JSON of a good one."""
        try:
            with client_hold(request.scope) as hold:
                body = await _json_body(request, hold)
                reply = await _while_connected(request, service.reply(body, request.headers.get(ATTEMPT_HEADER)))
            if isinstance(body, dict) and body.get("stream"):
                return Response(CHAT.stream_of(reply, body), media_type="text/event-stream")
            return json_bytes(reply)
        except ClientLeftError:
            return Response(status_code=400)  # nobody reads it
        except RecursionError:
            return JSONResponse(RequestError("the body is nested too deeply", code="too_deep").body(), status_code=400)
        except RequestError as error:
            headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
            return JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def models(_: Request) -> Response:
        model = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "agentlightning"}
        return JSONResponse({"object": "list", "data": [model]})

    async def healthy(_: Request) -> Response:
        return JSONResponse({"status": "ok", **health()})

    routes = [
        Route("/v1/models", models),
        Route("/health", healthy),
    ]
    others = Starlette(routes=[Route(_CHAT, _not_allowed), *routes])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _CHAT or scope["method"] != "POST":
            await others(scope, receive, send)
            return
        answer = await chat_completions(Request(scope, receive))  # past the layers of routes, a third of its time
        if isinstance(answer, bytes):
            await send_whole(send, 200, b"application/json", answer)
        else:
            await answer(scope, receive, send)

    return app


def _not_allowed(_: Request) -> Response:
    return Response("Method Not Allowed", 405, {"Allow": "POST"})


async def _while_connected(request: Request, answer: Coroutine[Any, Any, dict[str, object]]) -> dict[str, object]:
    """Return the answer.

    Raises:
        ClientLeftError: The client closed the connection first; the answer was cancelled.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, gone = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientLeftError("the client closed the connection before it was answered")
        return answering.result()
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _json_body(request: Request, hold: Hold) -> object:
    try:
        body = await read_body(request.scope, request.receive, hold)
    except TooLargeError as error:
        raise RequestError(str(error), status=413, code="body_too_large") from error
    except BusyError as error:
        raise RequestError(str(error), status=429, code="too_many_bytes", retry_after=1) from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
