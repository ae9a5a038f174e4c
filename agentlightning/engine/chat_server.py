"""The HTTP server of a model: `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`, on its own thread.

`InferenceEngine` uses it to serve the embedded engine. `ChatServer` serves a client that takes and returns tokens, for
another system that generates, such as VERL or Tinker.

A stream has each full completion in its first frames, because sequences are short and decoded together. A client that
closes the connection ends its completions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.completion import Adjustments, Completion, GrammarState
from agentlightning.engine.request import Constraint, RequestError
from agentlightning.engine.seeds import ArrivalSeeds
from agentlightning.engine.service import ChatService, ServedAs
from agentlightning.errors import BusyError, TooLargeError
from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.llm_proxy.dialects.json_values import json_bytes
from agentlightning.semconv import ATTEMPT_HEADER
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import BearerAuth
from agentlightning.utils.http.byte_budget import ClientLeftError, client_hold, read_body
from agentlightning.utils.http.dispatch import unless_left
from agentlightning.utils.http.protocol import HttpBounds
from agentlightning.utils.http.sockets import bracket, listen
from agentlightning.utils.http.uvicorn_server import AsgiServer

_PATIENCE: Final = 1.0
_START_SECONDS: Final = 20.0


class ChatServer:
    """Serves a client that generates. Create it on the client's event loop."""

    def __init__(self, client: Any, tokenizer: Any, served: ServedAs, *, token: str | None) -> None:
        """Prepare the server; it does not listen yet.

        Args:
            client: has `async generate(request_id=, prompt_ids=, sampling_params=)`, whose result has `token_ids`,
                `log_probs` (natural logarithm, one per token), and the version of the weights in
                `extra_fields["global_steps"]`.
            token: the bearer token of calls; None requires none.
        """
        chat_format = ChatFormat(tokenizer)
        generator = _ClientGenerator(client, chat_format, served)
        seeds = ArrivalSeeds(served.seed)
        service = ChatService(served, chat_format.copy(), generator.submit, generator.refuse, seeds)
        self._app = BearerAuth(make_app(service, dict), token, lambda scope: False)
        self._server: ServerThread | None = None
        self.base_url = ""
        """The address to which the gateway sends calls. Available after `start`."""

    async def start(self, host: str) -> None:
        """Listen on a free port of an address of this machine; return when it responds, or raise `TimeoutError`."""
        self._server = ServerThread(self._app, host, patience=_PATIENCE, name="agl-chat")
        await asyncio.to_thread(self._server.start, _START_SECONDS)
        self.base_url = self._server.base_url

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.request_stop()


class ServerThread:
    """An application that is served on its own thread."""

    def __init__(self, app: ASGIApp, host: str, *, patience: float, name: str) -> None:
        """Listen on a free port of an address of this machine."""
        app = HostDoor(app, AllowedHosts.of(host, host, None), same_origin=True)
        self._server = AsgiServer(app, patience=patience, bounds=HttpBounds(), log_level=logging.WARNING)
        self._socket = listen(host, 0)
        self.base_url = f"http://{bracket(host)}:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name=name, daemon=True)

    def start(self, timeout: float) -> None:
        """Serve; return when the server responds, or raise `TimeoutError` after `timeout` seconds."""
        self._thread.start()
        self._server.ready.result(timeout)

    def request_stop(self) -> None:
        """Request the thread to end."""
        self._server.request_stop()

    def stop(self, timeout: float) -> None:
        """End the thread within `timeout` seconds and free the port. May be called twice."""
        self._server.request_stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._socket.close()


def make_app(service: ChatService, health: Callable[[], dict[str, object]]) -> ASGIApp:
    """Return the application; `health` returns additional fields for the response of `/health`."""

    async def chat_completions(request: Request) -> Response:
        try:
            with client_hold(request.scope) as hold:
                body = _json_of(await read_body(request.scope, request.receive, hold))
                reply = await unless_left(service.reply(body, request.headers.get(ATTEMPT_HEADER)), request.receive)
            if isinstance(body, dict) and body.get("stream"):
                return Response(CHAT.stream_of(reply, body), media_type="text/event-stream")
            return Response(json_bytes(reply), media_type="application/json")
        except ClientLeftError:
            return Response(status_code=400)  # nobody reads it
        except RecursionError:
            refused = RequestError("the body is nested too deeply", code="too_deep")
        except TooLargeError as error:
            refused = RequestError(str(error), status=413, code="body_too_large")
        except BusyError as error:
            refused = RequestError(str(error), status=429, code="too_many_bytes", retry_after=1)
        except RequestError as error:
            refused = error
        headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after else None
        return JSONResponse(refused.body(), status_code=refused.status, headers=headers)

    async def models(_: Request) -> Response:
        model = {"id": service.served.model_name, "object": "model", "created": 0, "owned_by": "agentlightning"}
        return JSONResponse({"object": "list", "data": [model]})

    async def healthy(_: Request) -> Response:
        return JSONResponse({"status": "ok", **health()})

    chat = Route("/v1/chat/completions", chat_completions, methods=["POST"])
    return Starlette(routes=[chat, Route("/v1/models", models), Route("/health", healthy)])


def _json_of(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error


class _ClientGenerator:
    """Completions by the client. `submit` may be called from any thread."""

    def __init__(self, client: Any, chat_format: ChatFormat, served: ServedAs) -> None:
        self._client, self._eos_ids, self._by = client, served.eos_ids, served.by
        self._decode = chat_format.text
        self._loop = asyncio.get_running_loop()

    def submit(self, completions: Sequence[Completion]) -> Future[int]:
        """Start the completions of a call; the result is the version of the weights that generated them. Raise
        `RequestError` if the client does not support their sampling."""
        for one in completions:
            shape = one.adjustments or Adjustments()
            if one.grammar or one.top_logprobs or shape != Adjustments(top_k=shape.top_k, ends=shape.ends):
                raise self._not_served()
        return asyncio.run_coroutine_threadsafe(self._all(completions), self._loop)

    async def refuse(self, constraint: Constraint) -> GrammarState:
        """Reject a constrained reply, whether or not the grammar library is installed."""
        raise self._not_served(constraint.param)

    def _not_served(self, param: str | None = None) -> RequestError:
        return RequestError(
            f"{self._by} supports temperature, top_p, top_k, max_tokens, n and stop; it does not support "
            "response_format, required tools, penalties, min_p, logit_bias, min_tokens and top_logprobs",
            param=param,
            code="unsupported_parameter",
        )

    async def _all(self, completions: Sequence[Completion]) -> int:
        tasks = [asyncio.ensure_future(self._one(completion)) for completion in completions]
        try:
            return min(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, completion: Completion) -> int:
        sampling: dict[str, Any] = {
            "temperature": completion.temperature,
            "top_p": completion.top_p,
            "max_tokens": completion.max_new_tokens,
            "logprobs": True,
        }
        if completion.adjustments is not None:
            sampling["top_k"] = completion.adjustments.top_k
        result = await self._client.generate(
            request_id=uuid4().hex, prompt_ids=list(completion.prompt_ids), sampling_params=sampling
        )
        if not result.token_ids:
            raise RequestError(f"{self._by} returned no token", status=503, code="no_token", retry_after=1)
        ids, logprobs = list(result.token_ids), list(result.log_probs or ())
        if len(ids) != len(logprobs):
            text = f"{self._by} returned {len(ids)} tokens and {len(logprobs)} log-probabilities"
            raise RequestError(text, status=500, code="no_logprobs")
        for token_id, logprob in zip(ids, logprobs, strict=True):
            if not completion.is_over:
                completion.append(token_id, logprob, self._eos_ids, self._decode)
        completion.finish_reason = completion.finish_reason or "length"
        return int(result.extra_fields.get("global_steps") or 0)
