"""Calls to model servers: one session, failover, and retries of requests that may be repeated.

Retries are made before anything is returned to the agent: at most `max(num_retries, 3)` if a server cannot be reached,
and after 429, 502, 503 and 504; `num_retries` after 500 and the timeout of an entry; one if the connection is closed
after the request was sent (it may have been stale). If a model has several servers, each retry uses the next one, and
each is called at least once. Other errors, such as 400, are returned to the agent unchanged. Pauses grow, have jitter,
respect `Retry-After`, and end before the time limit of the call.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from urllib.parse import quote

import aiohttp

from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import MESSAGES
from agentlightning.llm_proxy.dialects.base import Dialect
from agentlightning.llm_proxy.dialects.chat import ChatCompletions
from agentlightning.llm_proxy.dialects.json_values import Json, read_json
from agentlightning.llm_proxy.dialects.messages import check_prefill
from agentlightning.llm_proxy.endpoints.balancer import Balancer, HealthChecks
from agentlightning.llm_proxy.endpoints.engines import EMBEDDED, LITELLM_ENGINE
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.endpoints.watch import EndpointWatch
from agentlightning.llm_proxy.off_loop import OffLoop
from agentlightning.llm_proxy.replies import CallFailed, unusable
from agentlightning.llm_proxy.upstream.litellm import ask_litellm, close_litellm
from agentlightning.llm_proxy.upstream.provider_keys import secrets_of
from agentlightning.llm_proxy.upstream.response import NOT_BEGUN, BrokenStreamError, UpstreamResponse, UpstreamStream
from agentlightning.semconv import ATTEMPT_HEADER
from agentlightning.utils.backoff import backoff_delay, retry_after_seconds
from agentlightning.utils.http.connections import BrokenAnswerError, CutAnswerError, HttpConnections, NotConnectedError

logger = logging.getLogger(__name__)

_TRANSIENT = (429, 502, 503, 504)
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 4.0  # below the 5 s after which uvicorn closes idle connections, vLLM's server among them
_LONGEST_PAUSE = 30.0
_LONGEST_PAUSE_AMONG_OTHERS = 2.0  # then another model is called
_LONGEST_CALL = 86_400.0
_MOST_KEPT = 64  # addresses with their own connections
_SHOWN_BYTES = 2000
_REFUSAL_BYTES = 64 * 1024
_LARGE_BYTES = 1024 * 1024  # larger bodies go out in pieces, so that the loop is not held up
_FAILURES = {"unreachable": "cannot be reached", "cut": "closed the connection", "timeout": "timed out"}
"""Text about a server in an error, by failure; other failures are described as an unusable reply."""


class Upstream:
    """The connections to the model servers. Owned by the serving loop, between entering and leaving `opened`."""

    def __init__(self, *, num_retries: int, body_bytes: int, calls: int, health: HealthChecks) -> None:
        self.off_loop = OffLoop()
        """Runs long work, including the gateway's."""
        self._num_retries = num_retries
        self._body_bytes = body_bytes
        self._calls = calls
        self._session: aiohttp.ClientSession | None = None
        self._watch: EndpointWatch | None = None
        self._unsupported: dict[ModelEndpoint, set[str]] = {}
        self._used_litellm = False
        self._health = health
        self.balancer = Balancer(health)
        self._kept: dict[str, HttpConnections] = {}
        """Connections to servers at plain addresses, by address."""

    @asynccontextmanager
    async def opened(self, endpoints: Callable[[], list[ModelEndpoint]]) -> AsyncGenerator[None, None]:
        """Keep the session open; it ignores the environment's proxy variables and keeps no cookies.

        The engines of `endpoints` are identified at the start, others before their first call.
        """
        connector = aiohttp.TCPConnector(limit=self._calls, keepalive_timeout=_IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._session:
            watch = EndpointWatch(self._session, self.balancer, self._health, endpoints)
            try:
                async with watch.watching() as self._watch:
                    yield
            finally:
                for connections in self._kept.values():
                    connections.close()
                self._kept.clear()
                self.off_loop.close()
                if self._used_litellm:
                    await close_litellm()
        self._session = self._watch = None

    @asynccontextmanager
    async def ask(
        self,
        call: GatewayCall,
        wire: Dialect,
        endpoints: list[ModelEndpoint],
        deadline: float,
        *,
        among_others: bool = False,
    ) -> AsyncGenerator[UpstreamResponse | UpstreamStream, None]:
        """Yield the first good reply: complete, or an open stream if the call is streamed and the server streams.

        `deadline` is on the monotonic clock; `among_others` is True if other models may also be called. Nothing is
        retried after a reply has been returned.

        Raises:
            CallFailed: no good reply; has the server's reply if there is one, else 502, or 504 after a timeout.
        """
        assert call.request is not None
        request, earlier = call.request, call.upstream_tries
        endpoints = self.balancer.order(call.rollout_id, call.model, endpoints)
        moved, longest = 0, _LONGEST_PAUSE_AMONG_OTHERS if among_others else _LONGEST_PAUSE
        while True:
            endpoint = endpoints[moved % len(endpoints)]
            with self.balancer.busy(endpoint):
                call.request = endpoint.completed(request, wire.limit_names)
                response = await self._ask(call, wire, endpoint)
                call.endpoint = endpoint
                if len(endpoints) > 1 or among_others:  # the only server is called whatever its state
                    self._note_health(endpoint, response)
                if isinstance(response, UpstreamStream):
                    try:
                        yield response
                    finally:
                        await response.close()  # a stream that is closed early ends the generation there
                    return
                if response.ok:
                    yield response
                    return
            waits = response.failure == "unreachable" and time.monotonic() - call.began < endpoint.unreachable_seconds
            tries = call.upstream_tries - earlier
            moved += response.others_may_serve
            fresh = response.others_may_serve and moved < len(endpoints)
            pause = 0.0 if fresh else _pause(response, tries)
            may_retry = waits or tries <= self._most_tries(response, len(endpoints) - 1)
            if not may_retry or time.monotonic() + pause >= deadline or pause > longest:
                raise _call_failed(response, call, endpoint)
            logger.debug(
                "%s: try %d failed: %s; retrying in %.2f s", call.call_id, call.upstream_tries, response.outcome, pause
            )
            await asyncio.sleep(pause)

    def states(self, endpoints: list[ModelEndpoint]) -> dict[str, str]:
        """Return the state of each endpoint: `serving`, `failing` or `out`."""
        return {f"{endpoint.model} at {endpoint.label}": self.balancer.state(endpoint) for endpoint in endpoints}

    async def count(
        self, endpoint: ModelEndpoint, base: str, route: str, wire: Dialect, body: bytes
    ) -> UpstreamResponse:
        """Request a token count from a server, once; `route` is relative to `base`.

        Raises:
            CallFailed: 501, it does not count; 502, it is unreachable or its reply is unusable; the server's error.
        """
        server = f"The model server of {endpoint.model!r}"
        if endpoint.engine == LITELLM_ENGINE:
            text = f"The provider of {endpoint.model!r} uses LiteLLM, which cannot count tokens here"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        try:
            async with asyncio.timeout(endpoint.timeout):
                response = await self._send(endpoint, f"{base}{route}", body, _headers(wire, endpoint), streamed=False)
        except TimeoutError as error:
            response = UpstreamResponse(failure="unreachable", detail=type(error).__name__)
        assert isinstance(response, UpstreamResponse)
        if response.ok:
            return response
        if response.failure or response.status < 400:
            raise unusable(f"{server} could not count the tokens: {response.outcome}")
        if response.status in (405, 501) or (
            response.status == 404 and not (read_json(response.body) or {}).get("error")
        ):
            text = f"{server} cannot count tokens: {endpoint.label} has no route {route}"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        raise _refusal(response, f"{server} did not count the tokens ({response.status})")

    def _most_tries(self, response: UpstreamResponse, others: int) -> int:
        """Return the maximum number of retries of a call after this response."""
        if response.failure == "unreachable" or (not response.failure and response.status in _TRANSIENT):
            return max(self._num_retries, 3, others)
        if response.failure == "cut":
            return max(others, 0 if response.status else 1)  # in the middle of a reply: it was no stale one
        if response.failure == "timeout" or (not response.failure and response.status == 500):
            return max(self._num_retries, others)
        return 0

    def _note_health(self, endpoint: ModelEndpoint, response: UpstreamResponse | UpstreamStream) -> None:
        if isinstance(response, UpstreamStream) or (not response.failure and response.status < 500):
            self.balancer.served(endpoint)  # 429 is busy, not broken
        elif rest := self.balancer.failed(endpoint):
            text = "the model server %s failed (%s); out for at most %.0f s"
            logger.warning(text, endpoint.label, response.outcome, rest)

    async def _ask(
        self, call: GatewayCall, wire: Dialect, endpoint: ModelEndpoint
    ) -> UpstreamResponse | UpstreamStream:
        """Call the server once; if it refuses a field that only the gateway added, call it again without it."""
        assert call.request is not None
        assert self._watch is not None
        call.engine = engine = await self._watch.engine_of(endpoint)
        if call.dialect == MESSAGES.route and wire.route == ChatCompletions.route:
            check_prefill(call.request, goes_on=engine.continues_messages)
        token_options = dict(engine.asks.get(wire.route, {}))
        for name in self._unsupported.get(endpoint, ()):
            token_options.pop(name, None)
        request = call.request
        if call.streamed and wire.route == ChatCompletions.route and not engine.streams_chat_tokens:
            if call.is_for_training:  # requested in one piece; the agent still gets a stream
                request = {name: value for name, value in request.items() if name not in ("stream", "stream_options")}
            else:
                token_options = {}
        refused_fields: list[str] = []
        while True:
            response = await self._try(call, wire, endpoint, request, token_options)
            if isinstance(response, UpstreamStream) or response.ok:
                break
            error_text = response.body[:_REFUSAL_BYTES] if response.status in (400, 422) else b""
            added_fields = sorted(wire.added(request, token_options), key=len, reverse=True)
            culprit = next((name for name in added_fields if name.encode() in error_text), None)
            if culprit is None:
                return response
            del token_options[culprit]
            refused_fields.append(culprit)
        if refused_fields:
            self._unsupported.setdefault(endpoint, set()).update(refused_fields)
            logger.warning(
                "the model server %s refused the field %r; it is not sent again", endpoint.label, refused_fields[-1]
            )
        return response

    async def _try(
        self,
        call: GatewayCall,
        wire: Dialect,
        endpoint: ModelEndpoint,
        request: Json,
        token_options: Mapping[str, object],
    ) -> UpstreamResponse | UpstreamStream:
        """Call the server once, within the seconds of the endpoint's entry."""
        body = await self.off_loop.run(call.bytes, wire.upstream_request, request, endpoint.model, token_options)
        call.upstream_tries += 1
        seconds = endpoint.seconds(streamed=bool(request.get("stream")))
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                if endpoint.engine == LITELLM_ENGINE:
                    self._used_litellm = True
                    return await ask_litellm(endpoint, body, self._body_bytes)
                forwarded = {name: value for name, value in call.agent_headers.items() if name in wire.forwarded}
                headers = _headers(wire, endpoint, forwarded)
                if call.engine is EMBEDDED:
                    names = (call.rollout_id, call.attempt_id, call.call_id)
                    headers[ATTEMPT_HEADER] = "/".join(quote(name, safe="") for name in names)
                if not call.streamed and (connections := self._connections(endpoint.api_base)) is not None:
                    return await self._send_plain(connections, endpoint, f"/{wire.route}", body, headers)
                url = f"{endpoint.api_base}/{wire.route}"
                return await self._send(endpoint, url, body, headers, streamed=call.streamed)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"no {'stream' if request.get('stream') else 'reply'} in {seconds:g} s, the time limit in its entry"
            return UpstreamResponse(failure="timeout", detail=text)

    async def _send(
        self, endpoint: ModelEndpoint, url: str, body: bytes, headers: dict[str, str], *, streamed: bool
    ) -> UpstreamResponse | UpstreamStream:
        assert self._session is not None
        data = io.BytesIO(body) if len(body) > _LARGE_BYTES else body
        try:
            reply = await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            return UpstreamResponse(failure="unreachable", detail=type(error).__name__)
        except aiohttp.ClientConnectionError as error:
            return UpstreamResponse(failure="cut", detail=type(error).__name__)
        except aiohttp.ClientError as error:
            return UpstreamResponse(failure="garbage", detail=type(error).__name__)
        if streamed and reply.status == 200 and reply.content_type == "text/event-stream":
            stream = UpstreamStream(_pieces_of(reply), endpoint, self._body_bytes, reply.close)
            with suppress(BrokenStreamError):
                return stream if await stream.begin() else NOT_BEGUN
            return NOT_BEGUN
        whole = bytearray()
        async with reply:
            try:
                async for piece in _pieces_of(reply):
                    whole += piece
                    if len(whole) > self._body_bytes:
                        detail = f"a reply of more than {self._body_bytes} bytes"
                        return UpstreamResponse(reply.status, failure="garbage", detail=detail)
            except BrokenStreamError as error:
                detail = f"{error} after {len(whole)} bytes of the reply"
                return UpstreamResponse(reply.status, failure="cut", detail=detail)
        return await self._response(reply.status, bytes(whole), reply.headers.get("Retry-After"), endpoint)

    def _connections(self, address: str) -> HttpConnections | None:
        """Return the connections to a server at a plain address; None if the general client is used."""
        connections = self._kept.get(address)
        is_plain = address.startswith("http://") and not {"?", "#"} & set(address)
        if connections is None and is_plain and len(self._kept) < _MOST_KEPT:
            connections = self._kept[address] = HttpConnections(
                address, connect_seconds=_CONNECT_SECONDS, idle_seconds=_IDLE_SECONDS, most_bytes=self._body_bytes
            )
        return connections

    async def _send_plain(
        self, pool: HttpConnections, endpoint: ModelEndpoint, path: str, body: bytes, headers: dict[str, str]
    ) -> UpstreamResponse:
        """Request a reply in one piece; takes a quarter of the time of the general client."""
        headers.pop("accept-encoding", None)  # the connections name it themselves
        try:
            answer = await pool.request("POST", path, headers, body, _LONGEST_CALL)  # the call's own limit is shorter
        except (NotConnectedError, TimeoutError) as error:  # the agent reads it: no address
            return UpstreamResponse(failure="unreachable", detail=type(error.__cause__ or error).__name__)
        except CutAnswerError as error:
            return UpstreamResponse(error.status, failure="cut", detail=str(error))
        except BrokenAnswerError as error:  # nor the quoted answer, which may hold a key
            detail = str(error) if error.status else "the response is not valid HTTP"
            return UpstreamResponse(error.status, failure="garbage", detail=detail)
        except OSError as error:
            return UpstreamResponse(failure="cut", detail=type(error).__name__)
        encoding, retry_after = (answer.headers.get(name, b"") for name in (b"content-encoding", b"retry-after"))
        if encoding not in (b"", b"identity"):
            detail = f"content encoding {encoding!r}, which was not requested"
            return UpstreamResponse(answer.status, failure="garbage", detail=detail)
        return await self._response(answer.status, answer.content, retry_after.decode("latin-1") or None, endpoint)

    async def _response(
        self, status: int, body: bytes, retry_after: str | None, endpoint: ModelEndpoint
    ) -> UpstreamResponse:
        text, hid_key = await self.off_loop.run(len(body), secrets_of(endpoint).hide, body)
        return UpstreamResponse(status, text, retry_after_seconds(retry_after), hid_key)


async def _pieces_of(reply: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in reply.content.iter_any():
            yield piece
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise BrokenStreamError(type(error).__name__) from error


def _headers(wire: Dialect, endpoint: ModelEndpoint, forwarded: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of a request to a server; those of its entry replace others (names are case-insensitive)."""
    keys = {name.lower(): value for name, value in wire.key_headers(endpoint.api_key).items()}
    return {**_HEADERS, **keys, **(forwarded or {}), **dict(endpoint.headers)}


def _pause(response: UpstreamResponse, tries: int) -> float:
    return max(backoff_delay(tries, 0.25, 8.0), response.retry_after or 0.0)


def _call_failed(response: UpstreamResponse, call: GatewayCall, endpoint: ModelEndpoint) -> CallFailed:
    model, tries = call.model, call.upstream_tries
    if response.failure == "not_asked":
        return unusable(f"The model server of {model!r} was not called: {response.detail}")
    if response.failure or not 400 <= response.status < 600:
        reason = _FAILURES.get(response.failure, "returned no usable reply")
        text = f"The model server of {model!r} {reason}: {response.outcome}; tries: {tries}"
        logger.warning("%s: %s (%s)", call.call_id, text, endpoint.label)
        status, code = (504, "timeout") if response.failure == "timeout" else (502, "upstream_unusable")
        others = response.others_may_serve
        return CallFailed(status, text, code=code, state="upstream_error", others_may_serve=others)
    if response.status in (401, 403):
        logger.error("%s: the model server %s rejected the gateway's key for %r", call.call_id, endpoint.label, model)
    return _refusal(response, f"The model server of {model!r} returned {response.status} (tries: {tries})")


def _refusal(response: UpstreamResponse, text: str) -> CallFailed:
    """Return the failure of a call for which a server returned an error."""
    return CallFailed(
        response.status,
        f"{text}: {response.body[:_SHOWN_BYTES].decode('utf-8', 'replace')}",
        code="upstream_error",
        retry_after=response.retry_after,
        state="upstream_error",
        upstream_error=response.body if read_json(response.body) is not None else None,
        others_may_serve=response.others_may_serve,
    )
