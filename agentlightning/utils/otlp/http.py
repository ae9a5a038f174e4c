"""OTLP over HTTP for any signal: reads a request up to a limit, passes its message on, and responds in its form.

https://opentelemetry.io/docs/specs/otlp/#otlphttp: 200 with a response message (which may report a partial success), or
a `google.rpc.Status`. A sender retries a request after 429 or 503 and drops it after another 4xx, so those two are only
for requests that may succeed later.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import AgentLightningError, BusyError, StoreUnreachableError
from agentlightning.utils.http.byte_budget import ClientLeftError, client_hold, read_body
from agentlightning.utils.otlp.body import JSON_CT, PROTOBUF_CT, Form, form_of, parse_body
from agentlightning.utils.otlp.caps import Rejections

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
_INLINE_BYTES = 64 * 1024
"""Size above which a body is parsed in a thread to keep the loop responsive; compressed bodies always are."""
_TRY_LATER_SECONDS = 5.0
_parsing: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def handle_otlp_export(
    request: Request,
    request_cls: type[M],
    response_cls: type[Message],
    callback: Callable[[M], Awaitable[object]] | None,
    signal_name: str,
) -> Response:
    """Handle an export request of one signal: parse it, await `callback` with the message, respond with success."""

    async def take(message: M, rejections: Rejections) -> Message:
        if callback is not None:
            await callback(message)
        return response_cls()

    return await answer_export(request, request_cls, take, signal_name)


async def answer_export(
    request: Request, kind: type[M], take: Callable[[M, Rejections], Awaitable[Message]], signal: str
) -> Response:
    """Respond to an export request with the message that `take` returns, or with an error status.

    `take` gets the parsed request and its malformed parts. The status is 429 for `BusyError` and 503 for an error that
    the sender did not cause, both with `Retry-After`; other errors of this package have their own status.
    """
    form: Form = JSON_CT
    hold = client_hold(request.scope)
    try:
        form = form_of(request.headers.get("content-type", ""))
        body = await read_body(request.scope, request.receive, hold)
        encoding, rejections = request.headers.get("content-encoding", ""), Rejections()
        arguments = kind, body, form, encoding, signal, rejections, hold
        if encoding or len(body) > _INLINE_BYTES:
            # one at a time for each loop: several threads that parse would take the interpreter from it
            async with _parsing.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                message = await asyncio.to_thread(parse_body, *arguments)
        else:
            message = parse_body(*arguments)
        return _reply(request, form, 200, await take(message, rejections))
    except ClientLeftError:
        return Response(status_code=400)  # nobody reads it
    except BusyError as error:
        return _reply(request, form, error.http_status, Status(message=str(error)), retry_after=error.retry_after)
    except AgentLightningError as error:
        if error.http_status < 500 and not isinstance(error, StoreUnreachableError):
            return _reply(request, form, error.http_status, Status(message=str(error)))
        logger.warning("OTLP %s: the store failed, the sender will retry: %s", signal, error)
        return _reply(request, form, 503, Status(message=str(error)), retry_after=_TRY_LATER_SECONDS)
    except Exception:  # the boundary: the sender keeps its data and retries
        logger.exception("OTLP %s: the request failed, the sender will retry", signal)
        status = Status(message="The server failed; retry later")
        return _reply(request, form, 503, status, retry_after=_TRY_LATER_SECONDS)
    finally:
        hold.close()


def _reply(
    request: Request, form: Form, status: int, message: Message, *, retry_after: float | None = None
) -> Response:
    body = message.SerializeToString() if form == PROTOBUF_CT else MessageToJson(message, indent=None).encode()
    headers: dict[str, str] = {}
    if retry_after is not None:
        headers["retry-after"] = str(max(1, round(retry_after)))
    # a sender that names no encodings can read the one that it used
    if "gzip" in request.headers.get("accept-encoding", request.headers.get("content-encoding", "")):
        body, headers["content-encoding"] = gzip.compress(body, compresslevel=1), "gzip"
    return Response(body, status, headers, media_type=form)
