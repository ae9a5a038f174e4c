"""The HTTP application of the embedded engine: `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`.

Replies have the form of vLLM's: `prompt_token_ids` at the top and `token_ids` in the choice when the request
says `return_token_ids`, and `logprobs.content[*].logprob` when it says `logprobs`. The token ids include the one that
ends the sequence, when the model drew it; its log-probability is among the others. A call for a stream gets the whole
completion in its first frames: sequences are decoded together and short, so there is little to gain by sending pieces.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.algorithm.grpo.engine.chat import ChatFormat, ChatRequest, RequestError, message_body, parse_request
from agentlightning.algorithm.grpo.engine.decoder import Completion
from agentlightning.errors import BusyError, TooLargeError
from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.utils.http.byte_budget import ClientLeftError, Hold, client_hold, read_body


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What the engine consumed and produced in one call, for comparison with what others recorded.

    Attributes:
        logprobs: natural, one per completion token.
    """

    response_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    weight_version: int


class ChatService:
    """Turns requests into completions and completions into replies. Lives on the loop of the server."""

    def __init__(
        self,
        chat_format: ChatFormat,
        submit: Callable[[Completion], Future[int]],
        record: deque[CallRecord],
        *,
        model_name: str,
        eos_ids: frozenset[int],
        context_length: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self._format = chat_format
        self._submit = submit
        self._record = record
        self.model_name = model_name
        self._eos_ids = eos_ids
        self._context_length = context_length
        self._max_new_tokens = max_new_tokens
        self._seeds = random.Random(seed)  # for requests without a seed, in the order they arrive

    async def reply(self, body: object) -> dict[str, object]:
        """Return the reply to a request.

        Raises:
            RequestError: The request is wrong, too long, or cannot be served at the moment.
        """
        request = parse_request(body)
        if request.model != self.model_name:
            raise RequestError(
                f"the model {request.model!r} is not served here, only {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        prompt_ids = self._format.prompt_ids(request.messages, request.tools)
        left, wanted = self._context_length - len(prompt_ids), request.max_new_tokens
        if left < (wanted or 1):
            raise RequestError(
                f"the context is {self._context_length} tokens; the messages take {len(prompt_ids)} of them and "
                f"{wanted or 'at least 1'} are asked for the completion",
                param="messages",
                code="context_length_exceeded",
            )
        completion = Completion(
            prompt_ids,
            wanted or min(left, self._max_new_tokens),
            request.temperature,
            request.top_p,
            self._seeds.getrandbits(63) if request.seed is None else request.seed,
        )
        weight_version = await asyncio.wrap_future(self._submit(completion))
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._record.append(
            CallRecord(response_id, prompt_ids, completion.token_ids, completion.logprobs, weight_version)
        )
        return self._response(request, completion, response_id, weight_version)

    def _response(
        self, request: ChatRequest, completion: Completion, response_id: str, weight_version: int
    ) -> dict[str, object]:
        token_ids = completion.token_ids
        text_ids = token_ids[:-1] if token_ids[-1] in self._eos_ids else token_ids
        reply = self._format.reply(text_ids, with_tools=request.tools is not None)
        choice: dict[str, object] = {
            "index": 0,
            "message": message_body(reply),
            "finish_reason": "tool_calls" if reply.tool_calls else completion.finish_reason,
            "logprobs": self._logprobs(completion) if request.logprobs else None,
        }
        response: dict[str, object] = {
            "id": response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": f"agl-w{weight_version}",
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(completion.prompt_ids),
                "completion_tokens": len(token_ids),
                "total_tokens": len(completion.prompt_ids) + len(token_ids),
            },
        }
        if request.return_token_ids:
            response["prompt_token_ids"] = list(completion.prompt_ids)
            choice["token_ids"] = token_ids
        return response

    def _logprobs(self, completion: Completion) -> dict[str, object]:
        texts = self._format.token_texts(completion.token_ids)
        content = [
            {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for text, logprob in zip(texts, completion.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def make_app(service: ChatService, health: Callable[[], dict[str, object]]) -> Starlette:
    """Return the application; `health` adds to the answer of `/health`."""

    async def chat_completions(request: Request) -> Response:
        try:
            with client_hold(request.scope) as hold:
                body = await _json_body(request, hold)
                reply = await service.reply(body)
            if isinstance(body, dict) and body.get("stream"):
                return Response(CHAT.stream_of(reply, body), media_type="text/event-stream")
            return JSONResponse(reply)
        except ClientLeftError:
            return Response(status_code=400)  # nobody reads it
        except RequestError as error:
            headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
            return JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def models(_: Request) -> Response:
        model = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "agentlightning"}
        return JSONResponse({"object": "list", "data": [model]})

    async def healthy(_: Request) -> Response:
        return JSONResponse({"status": "ok", **health()})

    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", healthy),
    ]
    return Starlette(routes=routes)


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
