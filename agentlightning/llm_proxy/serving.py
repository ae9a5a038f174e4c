"""One model call from the agent's bytes to the model server's reply: plain, streamed, or translated on the way.

Frames of a stream go to the agent as they come. Only the last one is held back until the call has been recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentlightning.llm_proxy.calls import ModelCall
from agentlightning.llm_proxy.dialects import (
    CHAT,
    MESSAGES,
    Dialect,
    Json,
    StreamWriter,
    TranslatedDialect,
    WireDialect,
)
from agentlightning.llm_proxy.dialects.base import read_json
from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.models import Endpoint, ModelTable
from agentlightning.llm_proxy.policies import PolicyTable
from agentlightning.llm_proxy.replies import CallFailed, Reply, json_reply, refuse
from agentlightning.llm_proxy.sse import Frames, data_of
from agentlightning.llm_proxy.tape import Tape
from agentlightning.llm_proxy.upstream import Answer, Opened, Upstream
from agentlightning.llm_proxy.weights import WeightGate
from agentlightning.utils.auth import Send

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Outlet:
    """The way to the agent. A stream is begun at most once and ended by what `Tail` holds."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.frames = 0
        """Sent so far."""

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, whole frames, and its head before the first one."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if data:
            self.frames += data.count(b"\n\n")
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, last: bytes) -> None:
        """Send the last part."""
        await self.write(b"")
        await self._send({"type": "http.response.body", "body": last})


@dataclass(frozen=True, slots=True)
class Tail:
    """What is still to be sent of a stream when the call has been recorded."""

    outlet: Outlet
    last: bytes

    async def send(self, send: Send) -> None:
        await self.outlet.end(self.last)


@dataclass(frozen=True, slots=True)
class _Way:
    """How one call is made."""

    asked: Json
    """By the agent."""
    wire: WireDialect
    """In which the server is asked."""
    request: Json
    """What the server is asked."""
    endpoints: list[Endpoint]
    translated: TranslatedDialect | None = None
    """The agent's dialect, if the server is asked in another one."""


class Server:
    """Makes calls of agents at model servers. Owned by the serving loop."""

    def __init__(
        self,
        models: Callable[[], ModelTable],
        policies: PolicyTable,
        gate: WeightGate,
        upstream: Upstream,
        call_seconds: float,
        tape: Tape | None = None,
    ) -> None:
        self._models, self._policies, self._gate, self._upstream = models, policies, gate, upstream
        self._call_seconds = call_seconds
        self._tape = tape

    async def serve(self, call: ModelCall, dialect: Dialect, raw: bytes, outlet: Outlet) -> Reply | Tail:
        """Make the call; `call` says how it ended.

        Raises:
            CallFailed: there is no reply, or a stream broke off.
        """
        asked = dialect.read_request(raw)
        call.streamed = dialect.wants_stream(asked)
        call.request, call.prompt = asked, dialect.prompt_of(asked)
        call.policy = self._policies.of_call(call.role, asked["model"], dialect.route)
        way = self._way(dialect, asked, call.rollout_id)
        call.request, call.prompt = way.request, way.wire.prompt_of(way.request)
        if self._tape is not None and (played := self._tape.play(way.wire.route, way.request)) is not None:
            return self._whole(call, way, played, json.dumps(played).encode(), outlet)
        endpoints = way.endpoints or self._models().endpoints(asked["model"], call.rollout_id)
        call.weight_version = await self._gate.enter()
        try:
            async with self._upstream.ask(call, way.wire, endpoints, call.began + self._call_seconds) as answer:
                if isinstance(answer, Opened):
                    return await self._pass_stream(call, way, answer, outlet)
                reply = _read(way.wire, answer)
                self._keep(way, reply)
                return self._whole(call, way, reply, answer.body, outlet)
        finally:
            self._gate.leave()

    async def count_tokens(self, raw: bytes, rollout_id: str) -> Reply:
        """Answer how many tokens a prompt of the messages dialect has, by the model server's own count.

        Raises:
            CallFailed: 400 that names the field that is wrong; 501, the server does not count; its own refusal.
        """
        asked = MESSAGES.read_count(raw)
        wire, endpoints = self._spoken(MESSAGES, asked["model"], rollout_id)
        shown = asked if wire is MESSAGES.native else MESSAGES.count_to_chat(asked)
        for endpoint in endpoints[:-1]:
            try:
                return await self._counted(endpoint, wire, shown)
            except CallFailed as failure:
                if failure.status != 502:
                    raise
        return await self._counted(endpoints[-1], wire, shown)

    async def _counted(self, endpoint: Endpoint, wire: WireDialect, request: Json) -> Reply:
        body = wire.upstream_request(request, endpoint.model, {})
        if wire is MESSAGES.native:
            answer = await self._upstream.count(endpoint, f"{endpoint.api_base}/messages/count_tokens", wire, body)
            return Reply(200, answer.body)
        answer = await self._upstream.count(endpoint, f"{endpoint.root}/tokenize", wire, body)
        count = (read_json(answer.body) or {}).get("count")
        if not isinstance(count, int):
            text = f"The model server of {endpoint.model!r} does not count the tokens of messages"
            raise refuse(501, text, code="not_supported", state="upstream_error")
        return json_reply({"input_tokens": count})

    def _way(self, dialect: Dialect, asked: Json, rollout_id: str) -> _Way:
        if self._tape is not None and self._tape.plays and asked["model"] not in self._models().names:
            wire, endpoints = _wires(dialect)[-1], list[Endpoint]()
        else:
            wire, endpoints = self._spoken(dialect, asked["model"], rollout_id)
        if isinstance(dialect, TranslatedDialect) and wire is CHAT:
            return _Way(asked, wire, dialect.to_chat(asked), endpoints, dialect)
        return _Way(asked, wire, asked, endpoints)

    def _spoken(self, dialect: Dialect, model: str, rollout_id: str) -> tuple[WireDialect, list[Endpoint]]:
        """Return the dialect in which the rollout's first fitting endpoint is asked, and all that speak it.

        Raises:
            CallFailed: 404, there is no such model; 400, none of its servers can be asked in this dialect.
        """
        endpoints = self._models().endpoints(model, rollout_id)
        for endpoint in endpoints:
            for wire in _wires(dialect):
                if wire.route in endpoint.dialects:
                    return wire, [other for other in endpoints if wire.route in other.dialects]
        spoken = ", ".join(sorted({route for endpoint in endpoints for route in endpoint.dialects}))
        text = f"The model {model!r} is served by {spoken} only, not by {dialect.route}"
        raise refuse(400, text, code="unsupported_dialect", param="model")

    def _keep(self, way: _Way, reply: Json) -> None:
        if self._tape is not None:
            self._tape.keep(way.wire.route, way.request, reply)

    def _whole(self, call: ModelCall, way: _Way, reply: Json, body: bytes, outlet: Outlet) -> Reply | Tail:
        """Answer with a reply that came in one piece; `body` is what it was read from."""
        wire, translated = way.wire, way.translated
        call.answered(wire.record_of(reply), wire.tokens_of(reply, way.request), generated=wire.generates)
        shown = wire.visible_reply(reply, way.request)
        if call.streamed:
            stream = wire.stream_of(reply, way.request)
            return Tail(
                outlet, stream if translated is None else _rewritten(translated.write_stream(way.asked), stream)
            )
        if translated is not None:
            return json_reply(translated.from_chat(shown, way.asked))
        return Reply(200, body) if shown == reply else json_reply(shown)

    async def _pass_stream(self, call: ModelCall, way: _Way, opened: Opened, outlet: Outlet) -> Tail:
        """Hand the frames on as they come and put the reply together beside them."""
        wire, translated = way.wire, way.translated
        reader = wire.read_stream(way.request)
        writer = None if translated is None else translated.write_stream(way.asked)
        last = b""
        try:
            async for frame in opened.frames():
                shown = reader.feed(frame)
                if call.first_frame_at is None:
                    call.first_frame_at = time.time()
                if reader.ended:
                    last = shown
                    break
                await outlet.write(shown if writer is None else _events(writer, shown))
            if not (reader.ended or reader.complete):
                text = "The model server ended its stream before the reply was complete"
                raise CallFailed(502, text, code="upstream_unusable", state="upstream_error")
            reply = reader.reply()
            if reply is None:
                text = "The model server ended its stream without a reply"
                raise CallFailed(502, text, code="upstream_unusable", state="upstream_error")
            last = last if writer is None else writer.end()
        except BaseException:
            heard = reader.reply()
            call.heard(None if heard is None else wire.record_of(heard))
            raise
        call.answered(wire.record_of(reply), wire.tokens_of(reply, way.request), generated=wire.generates)
        self._keep(way, reply)
        return Tail(outlet, last)


def _wires(dialect: Dialect) -> tuple[WireDialect, ...]:
    """Return the dialects in which servers can be asked for an agent that speaks this one; the best first."""
    if isinstance(dialect, TranslatedDialect):
        return dialect.native, CHAT
    assert isinstance(dialect, WireDialect)
    return (dialect,)


def _read(wire: WireDialect, answer: Answer) -> Json:
    reply = wire.read_reply(answer.body)
    if reply is None:
        text = f"The model server's reply is none of {wire.route} ({wire.reply_form})"
        raise refuse(502, text, code="upstream_unusable", state="upstream_error")
    return reply


def _events(writer: StreamWriter, frame: bytes) -> bytes:
    """Return the events that a chat frame becomes in another dialect."""
    data = data_of(frame)
    chunk = None if data is None or data.strip() == DONE else read_json(data)
    return b"" if chunk is None else writer.feed(chunk)


def _rewritten(writer: StreamWriter, chat_stream: bytes) -> bytes:
    frames = Frames(len(chat_stream) + 1).feed(chat_stream)
    return b"".join([*(_events(writer, frame) for frame in frames), writer.end()])
