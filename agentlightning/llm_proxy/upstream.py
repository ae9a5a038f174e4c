"""Calls to model servers: one session, failover, and retries of what may be done twice.

Retried, before anything is returned to the agent: a server that cannot be reached, and 429, 502, 503 and 504, at most
`max(num_retries, 3)` times; 500 only when `num_retries` says so; a connection that is cut after the request went out
once (it may have been a stale one). Everything else, such as 400, is the agent's to see unchanged. Pauses grow, are
jittered, honour `Retry-After`, and never outlast the call.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager

import aiohttp

from agentlightning.llm_proxy.answers import Answer, Opened, OpenedResponse, retry_after_seconds, without_secret
from agentlightning.llm_proxy.balance import Balancer
from agentlightning.llm_proxy.calls import ModelCall
from agentlightning.llm_proxy.dialects.base import Json, WireDialect, read_json
from agentlightning.llm_proxy.dialects.chat import ChatCompletions
from agentlightning.llm_proxy.engines import LITELLM_ENGINE
from agentlightning.llm_proxy.health import HealthChecks
from agentlightning.llm_proxy.health_watch import HealthWatch
from agentlightning.llm_proxy.litellm_upstream import ask_litellm, close_litellm
from agentlightning.llm_proxy.models import Endpoint
from agentlightning.llm_proxy.probe import EngineProbe
from agentlightning.llm_proxy.replies import CallFailed

logger = logging.getLogger(__name__)

_TRANSIENT = (429, 502, 503, 504)
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 4.0  # below the 5 s after which uvicorn closes idle connections, vLLM's server among them
_LONGEST_PAUSE = 30.0
_SHOWN_BYTES = 2000
_LARGE_BYTES = 1024 * 1024  # larger bodies go out in pieces, so that the loop is not held up


class Upstream:
    """The connections to the model servers. Owned by the serving loop, between entering and leaving `opened`."""

    def __init__(self, *, num_retries: int, body_bytes: int, calls: int, health: HealthChecks) -> None:
        self._num_retries = num_retries
        self._body_bytes = body_bytes
        self._calls = calls
        self._session: aiohttp.ClientSession | None = None
        self._probe: EngineProbe | None = None
        self._unsupported: dict[Endpoint, set[str]] = {}
        self._used_litellm = False
        self._health = health
        self.balancer = Balancer(health)

    @asynccontextmanager
    async def opened(self, endpoints: Callable[[], list[Endpoint]]) -> AsyncGenerator[None, None]:
        """Hold the session open; it ignores proxy variables of the environment and keeps no cookies.

        The engines of `endpoints` are asked what they are; those of others before their first call.
        """
        connector = aiohttp.TCPConnector(limit=self._calls, keepalive_timeout=_IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._session:
            self._probe = EngineProbe(self._session)
            self._probe.begin(endpoints())
            watch = HealthWatch(self._session, self.balancer, self._probe, self._health, endpoints)
            watching = asyncio.ensure_future(watch.run())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await self._probe.close()
                if self._used_litellm:
                    await close_litellm()
        self._session = self._probe = None

    @asynccontextmanager
    async def ask(
        self, call: ModelCall, wire: WireDialect, endpoints: list[Endpoint], deadline: float
    ) -> AsyncGenerator[Answer | Opened, None]:
        """Give the first good reply: whole, or opened if the call is streamed and the server streams too.

        `deadline` is on the monotonic clock. Nothing is tried again once a reply has been given.

        Raises:
            CallFailed: no good reply; the server's own reply where it gave one, else 502.
        """
        assert call.request is not None
        endpoints = self.balancer.order(call.rollout_id, call.request["model"], endpoints)
        moved = 0
        while True:
            endpoint = endpoints[moved % len(endpoints)]
            with self.balancer.busy(endpoint):
                answer = await self._ask(call, wire, endpoint)
                call.endpoint = endpoint
                if len(endpoints) > 1:  # the only one is asked whatever is known of it
                    self._judge(endpoint, answer)
                if isinstance(answer, Opened):
                    try:
                        yield answer
                    finally:
                        await answer.close()  # a stream that was not read to its end ends the generation there
                    return
                if answer.ok:
                    yield answer
                    return
            if not self._may_retry(answer, call.upstream_tries, len(endpoints)):
                raise _failure(answer, call, endpoint)
            elsewhere = answer.trouble == "unreachable" or answer.status in _TRANSIENT
            moved += elsewhere
            fresh = elsewhere and moved < len(endpoints)
            pause = 0.0 if fresh else _pause(answer, call.upstream_tries)
            if time.monotonic() + pause >= deadline or pause > _LONGEST_PAUSE:
                raise _failure(answer, call, endpoint)
            logger.debug("%s: try %d gave %s; next in %.2f s", call.call_id, call.upstream_tries, _said(answer), pause)
            await asyncio.sleep(pause)

    def states(self, endpoints: list[Endpoint]) -> dict[str, str]:
        """Return what is known of each endpoint: `serving`, `failing` or `out`."""
        return {f"{endpoint.model} at {endpoint.label}": self.balancer.state(endpoint) for endpoint in endpoints}

    def _judge(self, endpoint: Endpoint, answer: Answer | Opened) -> None:
        """Remember whether the endpoint serves; 429 is a server that is busy, not one that is broken."""
        if isinstance(answer, Opened) or (not answer.trouble and (answer.status < 500)):
            self.balancer.served(endpoint)
        elif rest := self.balancer.failed(endpoint):
            logger.warning(
                "the model server %s fails (%s); out for %.0f s at most", endpoint.label, _said(answer), rest
            )

    async def count(self, endpoint: Endpoint, url: str, wire: WireDialect, body: bytes) -> Answer:
        """Ask a server once to count tokens.

        Raises:
            CallFailed: 501, it does not count; 502, it cannot be reached or gave no usable reply; its own refusal.
        """
        assert self._session is not None
        if endpoint.engine == LITELLM_ENGINE:
            text = f"The provider of {endpoint.model!r} is reached through LiteLLM, which counts no tokens here"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        headers = {**_HEADERS, **wire.key_headers(endpoint.api_key)}
        try:
            reply = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
            async with reply:
                answer = await self._read(reply, endpoint)
        except (aiohttp.ClientError, OSError) as error:
            answer = Answer(trouble="unreachable", detail=type(error).__name__)
        if answer.ok:
            return answer
        server = f"The model server of {endpoint.model!r}"
        if answer.trouble or answer.status < 400:
            text = f"{server} could not be asked to count tokens: {_said(answer)}"
            raise CallFailed(502, text, code="upstream_unusable", state="upstream_error")
        words = read_json(answer.body)
        if answer.status in (405, 501) or (answer.status == 404 and not (words or {}).get("error")):
            text = f"{server} does not count tokens: it has no {url}"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        shown = answer.body[:_SHOWN_BYTES].decode("utf-8", "replace")
        text = f"{server} did not count the tokens ({answer.status}): {shown}"
        own_words = None if words is None else answer.body
        raise CallFailed(answer.status, text, code="upstream_error", state="upstream_error", own_words=own_words)

    def _may_retry(self, answer: Answer, tries: int, endpoints: int) -> bool:
        patience = max(self._num_retries, 3)
        if answer.trouble == "unreachable":
            return tries <= max(patience, endpoints - 1)
        if answer.trouble == "cut":
            return tries <= 1
        if answer.status == 500:
            return tries <= self._num_retries
        return answer.status in _TRANSIENT and tries <= patience

    async def _ask(self, call: ModelCall, wire: WireDialect, endpoint: Endpoint) -> Answer | Opened:
        """Ask once; a server that refuses a field which only the gateway wanted is asked again without it."""
        assert call.request is not None
        assert self._probe is not None
        call.engine = engine = await self._probe.engine_of(endpoint)
        wanted = dict(engine.asks.get(wire.route, {}))
        for name in self._unsupported.get(endpoint, ()):
            wanted.pop(name, None)
        request = call.request
        if call.streamed and wire.route == ChatCompletions.route and not engine.streams_chat_tokens:
            request, wanted = (_not_streamed(request), wanted) if call.is_for_training else (request, {})
        refused: set[str] = set()
        answer = await self._post(call, wire, endpoint, wire.upstream_request(request, endpoint.model, wanted))
        while isinstance(answer, Answer) and (culprit := _refused_extra(answer, wire.added(request, wanted))):
            del wanted[culprit]
            refused.add(culprit)
            answer = await self._post(call, wire, endpoint, wire.upstream_request(request, endpoint.model, wanted))
            if isinstance(answer, Opened) or answer.ok:
                self._unsupported.setdefault(endpoint, set()).update(refused)
                logger.warning("the model server %s refuses the field %r; not asked for again", endpoint.label, culprit)
        return answer

    async def _post(self, call: ModelCall, wire: WireDialect, endpoint: Endpoint, body: bytes) -> Answer | Opened:
        assert self._session is not None
        call.upstream_tries += 1
        if endpoint.engine == LITELLM_ENGINE:
            self._used_litellm = True
            return await ask_litellm(endpoint, body, self._body_bytes)
        forwarded = {name: value for name, value in call.agent_headers.items() if name in wire.forwarded}
        headers = {**_HEADERS, **wire.key_headers(endpoint.api_key), **forwarded}
        try:
            reply = await self._session.post(
                f"{endpoint.api_base}/{wire.route}",
                data=io.BytesIO(body) if len(body) > _LARGE_BYTES else body,
                headers=headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            return Answer(trouble="unreachable", detail=type(error).__name__)
        except aiohttp.ClientConnectionError as error:
            return Answer(trouble="cut", detail=type(error).__name__)
        except aiohttp.ClientError as error:
            return Answer(trouble="garbage", detail=type(error).__name__)
        if call.streamed and reply.status == 200 and reply.content_type == "text/event-stream":
            return OpenedResponse(reply, endpoint, self._body_bytes)
        async with reply:
            return await self._read(reply, endpoint)

    async def _read(self, reply: aiohttp.ClientResponse, endpoint: Endpoint) -> Answer:
        body = bytearray()
        try:
            async for chunk in reply.content.iter_any():
                body += chunk
                if len(body) > self._body_bytes:
                    return Answer(reply.status, trouble="garbage", detail=f"a reply above {self._body_bytes} bytes")
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            detail = f"{type(error).__name__} after {len(body)} bytes of the reply"
            return Answer(reply.status, trouble="garbage", detail=detail)
        text = without_secret(bytes(body), endpoint.api_key)
        return Answer(reply.status, text, retry_after_seconds(reply.headers.get("Retry-After")))


def _pause(answer: Answer, tries: int) -> float:
    backoff = min(8.0, 0.25 * 2 ** (tries - 1)) * random.uniform(0.75, 1.25)
    return max(backoff, answer.retry_after or 0.0)


def _not_streamed(request: Json) -> Json:
    """Return the request for a reply in one piece, of which the agent gets a stream all the same."""
    return {name: value for name, value in request.items() if name not in ("stream", "stream_options")}


def _refused_extra(answer: Answer, added: Iterable[str]) -> str | None:
    if answer.status not in (400, 422):
        return None
    return next((name for name in sorted(added, key=len, reverse=True) if name.encode() in answer.body), None)


def _said(answer: Answer) -> str:
    return f"{answer.trouble} ({answer.detail})" if answer.trouble else f"status {answer.status}"


def _failure(answer: Answer, call: ModelCall, endpoint: Endpoint) -> CallFailed:
    assert call.request is not None
    model, tries = call.request["model"], call.upstream_tries
    if answer.trouble or not 400 <= answer.status < 600:
        what = {"unreachable": "cannot be reached", "cut": "closed the connection"}.get(answer.trouble)
        text = f"The model server of {model!r} {what or 'gave no usable reply'}: {_said(answer)}; tries: {tries}"
        logger.warning("%s: %s (%s)", call.call_id, text, endpoint.label)
        return CallFailed(502, text, code="upstream_unusable", state="upstream_error")
    shown = answer.body[:_SHOWN_BYTES].decode("utf-8", "replace")
    text = f"The model server of {model!r} answered {answer.status} (tries: {tries}): {shown}"
    if answer.status in (401, 403):
        logger.error("%s: the model server %s refuses the gateway's key for %r", call.call_id, endpoint.label, model)
    return CallFailed(
        answer.status,
        text,
        code="upstream_error",
        retry_after=answer.retry_after,
        state="upstream_error",
        own_words=answer.body if read_json(answer.body) is not None else None,
    )
