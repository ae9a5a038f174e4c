"""One model call from the agent's bytes to the model server's reply: plain, streamed, or translated on the way.

Frames of a stream go to the agent as they come. Only the last one is held back until the call has been recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentlightning.llm_proxy.calls import ModelCall
from agentlightning.llm_proxy.dialects import CHAT, Dialect, Json, StreamWriter, TranslatedDialect, WireDialect
from agentlightning.llm_proxy.dialects.chat import DONE
from agentlightning.llm_proxy.models import ModelTable
from agentlightning.llm_proxy.replies import CallFailed, Reply, json_reply, refuse
from agentlightning.llm_proxy.sse import Frames, data_of
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

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, its head before the first one."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if data:
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


class Server:
    """Makes calls of agents at model servers. Owned by the serving loop."""

    def __init__(
        self, models: Callable[[], ModelTable], gate: WeightGate, upstream: Upstream, call_seconds: float
    ) -> None:
        self._models, self._gate, self._upstream = models, gate, upstream
        self._call_seconds = call_seconds

    async def serve(self, call: ModelCall, dialect: Dialect, raw: bytes, outlet: Outlet) -> Reply | Tail:
        """Make the call; `call` says how it ended.

        Raises:
            CallFailed: there is no reply, or a stream broke off.
        """
        asked = dialect.read_request(raw)
        call.streamed = dialect.wants_stream(asked)
        if isinstance(dialect, TranslatedDialect):
            wire: WireDialect = CHAT
            call.request = dialect.to_chat(asked)
        else:
            assert isinstance(dialect, WireDialect)
            wire, call.request = dialect, asked
        endpoints = self._models().endpoints(call.request["model"], call.rollout_id)
        call.weight_version = await self._gate.enter()
        try:
            async with self._upstream.ask(call, wire, endpoints, call.began + self._call_seconds) as answer:
                if isinstance(answer, Opened):
                    return await self._pass_stream(call, dialect, wire, asked, answer, outlet)
                return self._whole(call, dialect, wire, asked, answer, outlet)
        finally:
            self._gate.leave()

    def _whole(
        self, call: ModelCall, dialect: Dialect, wire: WireDialect, asked: Json, answer: Answer, outlet: Outlet
    ) -> Reply | Tail:
        """Answer with a reply that came in one piece."""
        assert call.request is not None
        reply = wire.read_reply(answer.body)
        if reply is None:
            text = f"The model server's reply is none of {wire.route} (JSON with a list of choices)"
            raise refuse(502, text, code="upstream_unusable", state="upstream_error")
        call.answered(reply, wire.tokens_of(reply))
        shown = wire.visible_reply(reply, call.request)
        if isinstance(dialect, TranslatedDialect):
            if call.streamed:
                return Tail(outlet, _translated(dialect.write_stream(asked), wire.stream_of(reply, call.request)))
            return json_reply(dialect.from_chat(shown, asked))
        if call.streamed:
            return Tail(outlet, wire.stream_of(reply, call.request))
        return Reply(200, answer.body) if shown == reply else json_reply(shown)

    async def _pass_stream(
        self, call: ModelCall, dialect: Dialect, wire: WireDialect, asked: Json, opened: Opened, outlet: Outlet
    ) -> Tail:
        """Hand the frames on as they come and put the reply together beside them."""
        assert call.request is not None
        reader = wire.read_stream(call.request)
        writer = dialect.write_stream(asked) if isinstance(dialect, TranslatedDialect) else None
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
        except BaseException:
            call.heard(reader.reply())
            raise
        reply = reader.reply()
        if reply is None:
            text = "The model server ended its stream without a reply"
            raise CallFailed(502, text, code="upstream_unusable", state="upstream_error")
        call.answered(reply, wire.tokens_of(reply))
        return Tail(outlet, last if writer is None else writer.end())


def _events(writer: StreamWriter, frame: bytes) -> bytes:
    """Return the events that a chat frame becomes in another dialect."""
    data = data_of(frame)
    return b"" if data is None or data.strip() == DONE else writer.feed(json.loads(data))


def _translated(writer: StreamWriter, chat_stream: bytes) -> bytes:
    frames = Frames(len(chat_stream) + 1).feed(chat_stream)
    return b"".join([*(_events(writer, frame) for frame in frames), writer.end()])
