"""One model call from the agent's bytes to the model server's reply: plain, streamed, or translated on the way.

Frames of a stream go to the agent as they come. Only the last one is held back until the call has been recorded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from agentlightning.llm_proxy.access.limits import MOST_FRAMES, GatewayLimits
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import CHAT, RESPONSES
from agentlightning.llm_proxy.dialects.base import Dialect, StreamReader, StreamWriter, TranslatedDialect
from agentlightning.llm_proxy.dialects.chat import DONE, translated
from agentlightning.llm_proxy.dialects.json_values import Json, is_strict, json_bytes, read_json
from agentlightning.llm_proxy.dialects.server_tools import refuse_server_tools, server_tools, without_server_tools
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.llm_proxy.off_loop import LARGE_BYTES
from agentlightning.llm_proxy.policies import CallPolicy, PolicyTable
from agentlightning.llm_proxy.recording.replay import CallFile
from agentlightning.llm_proxy.replies import (
    AgentReply,
    CallFailed,
    JsonReply,
    ReplyStream,
    StreamEnd,
    unusable,
)
from agentlightning.llm_proxy.responses_state.memory import ResponseMemory
from agentlightning.llm_proxy.responses_state.turns import NamedStream, begin
from agentlightning.llm_proxy.sse import data_of, with_data
from agentlightning.llm_proxy.upstream.http import Upstream, UpstreamResponse, UpstreamStream
from agentlightning.llm_proxy.upstream.provider_keys import without_tokens
from agentlightning.llm_proxy.weights import WeightGate
from agentlightning.utils.http.byte_budget import Hold

logger = logging.getLogger(__name__)

AGENT, _SERVER = "The request", "The model server's reply"
_OURS = ("hosted_vllm",)
"""Providers, as entries of models name them, whose servers run no tools."""
_FRAMES_A_TURN = 64
"""So many frames are handed on before other calls get a turn."""


@dataclass(frozen=True, slots=True)
class _UpstreamRequest:
    """What the model server is asked for one call."""

    agent_request: Json
    """As the agent made it."""
    wire: Dialect
    """The dialect of the request to the server."""
    body: Json
    """The request in that dialect."""
    prompt: list[object]
    """The prompt in it, as messages."""
    endpoints: list[ModelEndpoint]
    """Those that speak the dialect."""
    translated: TranslatedDialect | None = None
    """The agent's dialect, where it is not the server's."""
    left_out_tools: tuple[str, ...] = ()
    """Types of the agent's tools that the model is not shown."""


class Forwarder:
    """Forwards the requests of agents to model servers. Owned by the serving loop."""

    def __init__(
        self,
        models: Callable[[], ModelTable],
        policies: PolicyTable,
        gate: WeightGate,
        upstream: Upstream,
        limits: GatewayLimits,
        call_file: CallFile | None,
    ) -> None:
        self._models, self._policies, self._gate, self._upstream = models, policies, gate, upstream
        self._off_loop = upstream.off_loop
        self._limits = limits
        self.memory = ResponseMemory(limits)
        self._call_file = call_file

    async def serve(
        self, call: GatewayCall, dialect: Dialect, raw: bytes, reply_stream: ReplyStream, hold: Hold
    ) -> AgentReply:
        """Make the call; `call` says how it ended. What it takes beside `raw` is counted in `hold`.

        Raises:
            CallFailed: there is no reply, or a stream broke off.
        """
        call.bytes = len(raw)
        try:
            asked, prompt = await self._off_loop.run(len(raw), _read_request, dialect, raw, call.model_in_url)
        except CallFailed as refused:
            if refused.param is not None and refused.code != "too_many_values":  # the record says which turn it was
                await self.note_refused(call, dialect, raw)
            raise
        call.streamed = dialect.wants_stream(asked)
        call.request, call.prompt = asked, prompt
        call.model, *fallbacks = self._models().chain(asked["model"])
        call.policy = self._policies.of_call(call.role, call.model, dialect.route)
        request = await self._prepare(call, dialect, asked, hold)
        if self._call_file is not None and self._call_file.replays:
            on_file = await self._off_loop.run(LARGE_BYTES, self._call_file.reply_to, request.wire.route, request.body)
            if on_file is not None:
                return await self._whole_reply(call, request, on_file, json_bytes(on_file), reply_stream)
        call.weight_version = await self._gate.enter()
        try:
            if fallbacks and request.endpoints and self._upstream.balancer.all_rest(request.endpoints):
                text = f"The model servers of {call.model!r} failed lately, and none is tried again yet"
                failure = CallFailed(503, text, code="upstream_unusable", state="upstream_error")
                fallbacks.append(call.model)  # better than to refuse the call
            else:
                try:
                    return await self._ask(call, request, reply_stream, among_others=bool(fallbacks))
                except CallFailed as error:
                    if not (fallbacks and error.others_may_serve):
                        raise
                    failure = error
                    text = "%s: the model servers of %r failed; asking %s instead"
                    logger.warning(text, call.call_id, call.model, ", ".join(fallbacks))
            return await self._ask_fallbacks(call, dialect, asked, fallbacks, reply_stream, hold, failure)
        finally:
            self._gate.leave()

    async def _prepare(self, call: GatewayCall, dialect: Dialect, asked: Json, hold: Hold) -> _UpstreamRequest:
        """Return what the servers of the call's model are asked."""
        replays = self._call_file is not None and self._call_file.replays
        if replays and call.model not in self._models().names:  # only the file knows it: no endpoint is needed
            wire, found = _wires(dialect)[-1], []
        else:
            wire, found = wire_and_endpoints(self._models(), dialect, call.model, call.rollout_id)
        if dialect is RESPONSES and wire is CHAT:
            if call.turn is None:
                call.turn = begin(self.memory, (call.rollout_id, call.attempt_id), asked, self._limits.body_bytes)
                await call.turn.hold_value(hold, self._off_loop)
                call.bytes += call.turn.size
            asked = await self._off_loop.run(call.bytes, call.turn.expanded)
        else:
            call.turn = None
        request = await self._off_loop.run(call.bytes, _upstream_request, dialect, wire, found, asked, call.policy)
        call.left_out_tools = request.left_out_tools
        call.request, call.prompt = request.body, request.prompt
        return request

    async def _ask(
        self, call: GatewayCall, request: _UpstreamRequest, reply_stream: ReplyStream, *, among_others: bool = False
    ) -> AgentReply:
        """Ask the servers of the call's model and return the reply for the agent."""
        endpoints = request.endpoints or self._models().endpoints(call.model, call.rollout_id)
        deadline = call.began + self._limits.call_seconds
        asking = self._upstream.ask(call, request.wire, endpoints, deadline, among_others=among_others)
        async with asking as response:
            if isinstance(response, UpstreamStream):
                return await self._pass_stream(call, request, response, reply_stream)
            reply = await self._off_loop.run(len(response.body), _read_response, request.wire, response)
            if response.hid_key:
                reply = without_tokens(reply)
            await self._record(call, request, reply)
            return await self._whole_reply(call, request, reply, response.body, reply_stream)

    async def _ask_fallbacks(
        self,
        call: GatewayCall,
        dialect: Dialect,
        asked: Json,
        fallbacks: list[str],
        reply_stream: ReplyStream,
        hold: Hold,
        failure: CallFailed,
    ) -> AgentReply:
        """Ask other models in turn, each in a dialect of its servers, and return the reply of the first that gives one.

        Raises:
            CallFailed: `failure`, that of the model asked for, if none does; or a reply that was begun broke off.
        """
        own = call.model, call.policy, call.request, call.prompt, call.endpoint, call.engine
        for model in fallbacks:
            call.model = model
            call.policy = own[1] if model == own[0] else self._policies.of_fallback(own[1], call.role, model)
            try:
                request = await self._prepare(call, dialect, asked, hold)
                among_others = model == own[0] or model != fallbacks[-1]
                return await self._ask(call, request, reply_stream, among_others=among_others)
            except CallFailed as error:
                if reply_stream.begun or model == own[0]:
                    raise
                failure.message += f"; the fallback {model!r} failed, too ({error.status})"
        call.model, call.policy, call.request, call.prompt, call.endpoint, call.engine = own
        raise failure

    async def note_refused(self, call: GatewayCall, dialect: Dialect, raw: bytes) -> None:
        """Note model and prompt of a request that is not served, by which its retry is recognised."""
        call.request, call.prompt = await self._off_loop.run(len(raw), _refused_request, dialect, raw)

    async def _prepare_to_remember(self, call: GatewayCall, said: Json | None) -> None:
        if call.turn is not None and call.turn.stores and said is not None:
            call.to_remember = await self._off_loop.run(call.bytes, call.turn.to_remember, said)

    async def _record(self, call: GatewayCall, request: _UpstreamRequest, reply: Json) -> None:
        if self._call_file is not None and self._call_file.records:
            if call.model != self._models().resolved(request.agent_request["model"]):
                reply = without_tokens(reply)  # a replay is of the model asked for, whose tokens these are not
            await self._off_loop.run(LARGE_BYTES, self._call_file.record, request.wire.route, request.body, reply)

    async def _whole_reply(
        self, call: GatewayCall, request: _UpstreamRequest, reply: Json, body: bytes, reply_stream: ReplyStream
    ) -> AgentReply:
        """Return the agent's reply for a response in one piece; `body` is the JSON of `reply`."""
        call.bytes += len(body)
        wire = request.wire
        if call.turn is not None:
            reply = {**reply, "id": call.turn.named(self.memory, reply.get("id"))}
        converted = await self._off_loop.run(len(body), _convert_reply, request, reply, body, call.streamed)
        record, tokens, shown, said = converted
        further = await self._off_loop.run(len(body), _further_tokens, request, reply)
        call.answered(record, tokens, further, generated=wire.generates)
        await self._prepare_to_remember(call, said)
        return StreamEnd(reply_stream, shown) if call.streamed else JsonReply(200, shown)

    async def _pass_stream(
        self, call: GatewayCall, request: _UpstreamRequest, stream: UpstreamStream, reply_stream: ReplyStream
    ) -> StreamEnd:
        """Pass the frames to the agent as they come and collect the reply from them."""
        wire = request.wire
        reader = wire.read_stream(request.body)
        writer = None if request.translated is None else request.translated.write_stream(request.agent_request)
        if writer is not None and call.turn is not None:
            writer = NamedStream(writer, call.turn, self.memory)
        last, number = b"", 0
        try:
            async for frame in stream.frames():
                number, call.bytes = number + 1, call.bytes + len(frame)
                if number > MOST_FRAMES:
                    raise stream.broken(f"a stream of more than {MOST_FRAMES} frames")
                shown = await self._off_loop.run(len(frame), _convert_frame, reader, frame, writer)
                if call.first_frame_at is None:
                    call.first_frame_at = time.time()
                if reader.ended:
                    last = shown
                    break
                await reply_stream.write(shown)
                if number % _FRAMES_A_TURN == 0:
                    await asyncio.sleep(0)  # frames that are there already come without a pause
            if not (reader.ended or reader.complete):
                raise unusable("The model server ended its stream before the reply was complete")
            ended = await self._off_loop.run(call.bytes, _end_stream, request, reader, writer, stream.hid_key)
            reply, record, tokens, end = ended
            if call.turn is not None:
                record = {**record, "id": call.turn.name}
        except BaseException:  # what came of the reply is kept, whatever ends it
            with suppress(Exception):  # the reply may break off because it cannot be read
                partial = reader.reply()
                call.broke_off(None if partial is None else wire.record_of(partial))
            raise
        further = await self._off_loop.run(call.bytes, _further_tokens, request, reply)
        call.answered(record, tokens, further, generated=wire.generates)
        await self._prepare_to_remember(call, None if writer is None else writer.reply)
        await self._record(call, request, reply)
        return StreamEnd(reply_stream, last if writer is None else end)


def wire_and_endpoints(
    models: ModelTable, dialect: Dialect, model: str, rollout_id: str
) -> tuple[Dialect, list[ModelEndpoint]]:
    """Return the dialect in which the rollout's first fitting endpoint is asked, and all that speak it.

    Raises:
        CallFailed: 404, there is no such model; 400, none of its servers can be asked in this dialect.
    """
    endpoints = models.endpoints(model, rollout_id)
    for endpoint in endpoints:
        for wire in _wires(dialect):
            if wire.route in endpoint.dialects:
                return wire, [other for other in endpoints if wire.route in other.dialects]
    routes = ", ".join(sorted({route for endpoint in endpoints for route in endpoint.dialects}))
    text = f"The model {model!r} is served by {routes} only, not by {dialect.route}"
    raise CallFailed(400, text, code="unsupported_dialect", param="model")


def _wires(dialect: Dialect) -> tuple[Dialect, ...]:
    """Return the dialects in which servers can be asked for an agent that speaks this one; the best first."""
    return (dialect, CHAT) if isinstance(dialect, TranslatedDialect) else (dialect,)


@contextmanager
def blamed_on(who: str) -> Generator[None, None, None]:
    """Turn an error in reading a request or response into that call's failure, which names its sender.

    No such error is known; the dialects refuse by name what they cannot read.
    """
    try:
        yield
    except CallFailed:
        raise
    except Exception as error:  # boundary: a fault in reading foreign data is answered and logged
        logger.exception("a part of a call could not be read: %s", who)
        text = f"{who} cannot be read ({type(error).__name__})"
        if who == AGENT:
            raise CallFailed(400, text, code="invalid_request") from error
        raise unusable(text) from error


def _read_request(dialect: Dialect, raw: bytes, model: str | None) -> tuple[Json, list[object]]:
    """Return an agent's request and the prompt in it, as messages."""
    with blamed_on(AGENT):
        asked = dialect.read_request(raw, model)
        return asked, dialect.prompt_of(asked)


def _refused_request(dialect: Dialect, raw: bytes) -> tuple[Json | None, list[object] | None]:
    """Return model and prompt of a request that cannot be served, for its record; None where they are unusable."""
    asked = read_json(raw)
    try:
        return (None, None) if asked is None else ({"model": str(asked.get("model"))}, dialect.prompt_of(asked))
    except Exception:  # boundary: the request was refused, so anything may be wrong with it
        return None, None


def _upstream_request(
    dialect: Dialect, wire: Dialect, endpoints: list[ModelEndpoint], asked: Json, policy: CallPolicy | None
) -> _UpstreamRequest:
    """Return the request for these endpoints, which speak `wire`."""
    with blamed_on(AGENT):
        agents = dialect if isinstance(dialect, TranslatedDialect) and wire is CHAT else None
        bought = policy is not None and policy.kind == "external"
        if agents is None and (wire is not CHAT or bought or any(e.provider not in _OURS for e in endpoints)):
            return _UpstreamRequest(asked, wire, asked, wire.prompt_of(asked), endpoints)
        if policy is not None and policy.server_tools == "refuse":
            refuse_server_tools(asked)
        left_out = tuple(sorted({kind for kind, _ in server_tools(asked)}))
        chat = without_server_tools(asked) if agents is None else agents.to_chat(asked)
        return _UpstreamRequest(asked, wire, chat, wire.prompt_of(chat), endpoints, agents, left_out)


def _convert_reply(
    request: _UpstreamRequest, reply: Json, body: bytes, streamed: bool
) -> tuple[Json, CallTokens | None, bytes, Json | None]:
    """Return the record of a whole reply, its tokens, the bytes for the agent, and the translated reply in them."""
    wire = request.wire
    with blamed_on(_SERVER):
        record, tokens = wire.record_of(reply), wire.tokens_of(reply, request.body)
        if request.translated is not None:
            events, said = translated(reply, request.translated, request.agent_request)
            return record, tokens, events if streamed else json_bytes(said), said
        if streamed:
            return record, tokens, wire.stream_of(reply, request.body), None
        shown = wire.visible(reply, request.body)
        return record, tokens, body if shown == reply and is_strict(body) else json_bytes(shown), None


def _convert_frame(reader: StreamReader, frame: bytes, writer: StreamWriter | None) -> bytes:
    """Return what the agent gets for one frame."""
    with blamed_on(_SERVER):
        shown = reader.feed(frame)
        if b"NaN" in shown or b"Infinity" in shown:  # which JSON does not have, but may stand in a text
            data = data_of(shown)
            value = None if data is None else read_json(data)
            if data is not None and value is not None and not is_strict(data):
                shown = with_data(shown, json_bytes(value))
        return shown if writer is None or reader.ended else _events(writer, shown)


def _end_stream(
    request: _UpstreamRequest, reader: StreamReader, writer: StreamWriter | None, hid_key: bool
) -> tuple[Json, Json, CallTokens | None, bytes]:
    """Return a stream's reply, its record, its tokens, and the events that end a translated stream."""
    with blamed_on(_SERVER):
        reply = reader.reply()
        if reply is None:
            raise unusable("The model server ended its stream without a reply")
        reply = without_tokens(reply) if hid_key else reply
        end = b"" if writer is None else writer.end()
        return reply, request.wire.record_of(reply), request.wire.tokens_of(reply, request.body), end


def _further_tokens(request: _UpstreamRequest, reply: Json) -> list[CallTokens | None]:
    with blamed_on(_SERVER):
        return request.wire.further_tokens_of(reply, request.body)


def _read_response(wire: Dialect, response: UpstreamResponse) -> Json:
    with blamed_on(_SERVER):
        reply = wire.read_reply(response.body)
    if reply is None:
        raise unusable(f"The model server's reply is none of {wire.route} ({wire.reply_form})")
    return reply


def _events(writer: StreamWriter, frame: bytes) -> bytes:
    """Return the events that a chat frame becomes in another dialect."""
    data = data_of(frame)
    chunk = None if data is None or data.strip() == DONE else read_json(data)
    return b"" if chunk is None else writer.feed(chunk)
