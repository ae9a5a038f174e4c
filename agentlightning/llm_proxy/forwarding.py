"""One model call from the agent's bytes to the model server's reply: plain, streamed, or translated.

Frames of a stream are sent to the agent as they arrive. Only the last one waits until the call has been recorded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from agentlightning.llm_proxy.access.bodies import DigestedBody
from agentlightning.llm_proxy.access.limits import MOST_FRAMES, GatewayLimits, count_of
from agentlightning.llm_proxy.access.sampling import parameters_for
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import CHAT, MESSAGES, RESPONSES
from agentlightning.llm_proxy.dialects.base import Dialect, StreamReader, StreamWriter, TranslatedDialect
from agentlightning.llm_proxy.dialects.chat import DONE, translated
from agentlightning.llm_proxy.dialects.json_values import Json, is_strict, json_bytes, read_json
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.dialects.translation import refuse_server_tools, server_tools, without_server_tools
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
    json_reply,
    unusable,
)
from agentlightning.llm_proxy.responses_state import AttemptName, ResponseMemory, begin
from agentlightning.llm_proxy.sse import data_of, with_data
from agentlightning.llm_proxy.upstream.http import Upstream, UpstreamResponse, UpstreamStream
from agentlightning.llm_proxy.upstream.provider_keys import without_tokens
from agentlightning.llm_proxy.weights import WeightGate
from agentlightning.store.base import LightningStore
from agentlightning.utils.http.auth import Scope
from agentlightning.utils.http.byte_budget import Hold

logger = logging.getLogger(__name__)

_OURS = ("hosted_vllm",)
"""Prefixes of models in their entries that mean a server without tools."""
_FRAMES_A_TURN = 64
"""Number of frames passed on before other calls get a turn."""
_COUNTED = {MESSAGES.route: "messages/count_tokens", RESPONSES.route: "responses/input_tokens"}
"""Route that counts tokens, by dialect; the same at the gateway and at servers that support the dialect."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call with its request (the body is not read yet), their byte budget, and the reply stream."""

    store: LightningStore
    call: GatewayCall
    dialect: Dialect
    scope: Scope
    body: DigestedBody
    hold: Hold
    reply_stream: ReplyStream

    def failed(self, failure: CallFailed) -> AgentReply:
        """Return a failure as a reply, or as the last frames of a stream that has begun."""
        if self.reply_stream.begun:
            return StreamEnd(self.reply_stream, self.dialect.stream_failure(failure, self.reply_stream.frames))
        return self.dialect.failure(failure)


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """The request to the model servers for one call."""

    agent_request: Json
    """The agent's original request."""
    wire: Dialect
    """Dialect of the request to the server."""
    body: Json
    """The request in that dialect."""
    prompt: list[object]
    """The prompt in it, as messages."""
    endpoints: list[ModelEndpoint]
    """Endpoints that support the dialect."""
    translated: TranslatedDialect | None = None
    """The agent's dialect, if it differs from the server's."""
    left_out_tools: tuple[str, ...] = ()
    """Types of the agent's tools that are not shown to the model."""


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

    async def serve(self, exchange: Exchange, raw: bytes) -> AgentReply:
        """Make the call and store its outcome in `exchange.call`. Its bytes in addition to `raw` are also held.

        Raises:
            CallFailed: there is no reply, or a stream was interrupted.
        """
        call, dialect = exchange.call, exchange.dialect
        call.bytes = len(raw)
        try:
            agent_request, prompt = await self._off_loop.run(len(raw), _read_request, dialect, raw, call.model_in_url)
        except CallFailed as refused:
            if refused.param is not None and refused.code != "too_many_values":  # the record names the turn
                await self.note_refused(exchange, raw)
            raise
        call.streamed = dialect.wants_stream(agent_request)
        call.request, call.prompt = agent_request, prompt
        call.model, *fallbacks = self._models().chain(agent_request["model"])
        call.policy = self._policies.of_call(call.role, call.model, dialect.route)
        request = await self._prepare(exchange, agent_request)
        if self._call_file is not None and self._call_file.replays:
            on_file = await self._off_loop.run(LARGE_BYTES, self._call_file.reply_to, request.wire.route, request.body)
            if on_file is not None:
                return await self._whole_reply(exchange, request, on_file, json_bytes(on_file))
        call.weight_version = await self._gate.enter()
        try:
            if fallbacks and request.endpoints and self._upstream.balancer.all_rest(request.endpoints):
                text = f"The model servers of {call.model!r} failed recently and are not retried yet"
                failure = CallFailed(503, text, code="upstream_unusable", state="upstream_error")
                fallbacks.append(call.model)  # better than refusing the call
            else:
                try:
                    return await self._ask(exchange, request, among_others=bool(fallbacks))
                except CallFailed as error:
                    if not (fallbacks and error.others_may_serve):
                        raise
                    failure = error
                    text = "%s: the model servers of %r failed; calling %s instead"
                    logger.warning(text, call.call_id, call.model, ", ".join(fallbacks))
            return await self._ask_fallbacks(exchange, agent_request, fallbacks, failure)
        finally:
            self._gate.leave()

    async def _prepare(self, exchange: Exchange, agent_request: Json) -> UpstreamRequest:
        """Return the request to the servers of the call's model."""
        call, dialect = exchange.call, exchange.dialect
        replays = self._call_file is not None and self._call_file.replays
        if replays and call.model not in self._models().names:  # only the file has it: no endpoint is needed
            wire, endpoints = _wires(dialect)[-1], list[ModelEndpoint]()
        else:
            wire, endpoints = _wire_and_endpoints(self._models(), dialect, call.model, call.rollout_id)
        if dialect is RESPONSES and wire is CHAT:
            if call.turn is None:
                attempt = (call.rollout_id, call.attempt_id)
                call.turn = begin(self.memory, attempt, agent_request, self._limits.body_bytes)
                await call.turn.hold_value(exchange.hold, self._off_loop)
                call.bytes += call.turn.size
            agent_request = await self._off_loop.run(call.bytes, call.turn.expanded)
        else:
            call.turn = None
        request = await self._off_loop.run(
            call.bytes, _upstream_request, dialect, wire, endpoints, agent_request, call.policy
        )
        own, parameters = request.body, parameters_for(call.sampling, self._models().resolved, call.model, call.role)
        request = replace(request, body=request.wire.with_sampling(own, parameters))
        call.filled_in = tuple(sorted(name for name, value in request.body.items() if value is not own.get(name)))
        call.left_out_tools = request.left_out_tools
        call.request, call.prompt = request.body, request.prompt
        return request

    async def _ask(self, exchange: Exchange, request: UpstreamRequest, *, among_others: bool) -> AgentReply:
        """Call the servers of the call's model and return the reply for the agent."""
        call = exchange.call
        endpoints = request.endpoints or self._models().endpoints(call.model, call.rollout_id)
        deadline = call.began + self._limits.call_seconds
        asking = self._upstream.ask(call, request.wire, endpoints, deadline, among_others=among_others)
        async with asking as response:
            if isinstance(response, UpstreamStream):
                return await self._pass_stream(exchange, request, response)
            reply = await self._off_loop.run(len(response.body), read_reply, request.wire, response)
            if response.hid_key:
                reply = without_tokens(reply)
            await self._record(call, request, reply)
            return await self._whole_reply(exchange, request, reply, response.body)

    async def _ask_fallbacks(
        self, exchange: Exchange, agent_request: Json, fallbacks: list[str], failure: CallFailed
    ) -> AgentReply:
        """Call the fallback models in turn, each in a dialect of its servers, and return the first reply.

        Raises:
            CallFailed: no fallback replies (`failure`, that of the requested model), or a stream was interrupted.
        """
        call = exchange.call
        original = call.model, call.policy, call.request, call.prompt, call.endpoint, call.engine, call.filled_in
        for model in fallbacks:
            call.model = model
            call.policy = (
                original[1] if model == original[0] else self._policies.of_fallback(original[1], call.role, model)
            )
            try:
                request = await self._prepare(exchange, agent_request)
                return await self._ask(exchange, request, among_others=model == original[0] or model != fallbacks[-1])
            except CallFailed as error:
                if exchange.reply_stream.begun or model == original[0]:
                    raise
                failure.message += f"; the fallback {model!r} also failed ({error.status})"
        call.model, call.policy, call.request, call.prompt, call.endpoint, call.engine, call.filled_in = original
        raise failure

    async def note_refused(self, exchange: Exchange, raw: bytes) -> None:
        """Record the model and the prompt of a refused request, which identify its retry."""
        call, noting = exchange.call, (_refused_request, exchange.dialect, raw)
        call.request, call.prompt = await self._off_loop.run(len(raw), *noting)

    async def _record(self, call: GatewayCall, request: UpstreamRequest, reply: Json) -> None:
        if self._call_file is not None and self._call_file.records:
            if call.model != self._models().resolved(request.agent_request["model"]):
                reply = without_tokens(reply)  # a replay is of the requested model, whose tokens these are not
            await self._off_loop.run(LARGE_BYTES, self._call_file.record, request.wire.route, request.body, reply)

    async def _answered(
        self,
        call: GatewayCall,
        request: UpstreamRequest,
        reply: Json,
        record: Json,
        translation: Json | None,
        size: int,
    ) -> None:
        """Store the reply on the call; `translation` is the reply in the agent's dialect, if it is translated."""
        first, *further = await self._off_loop.run(size, _tokens_of, request, reply)
        call.answered(record, first, further, generated=request.wire.generates)
        if call.turn is not None and call.turn.stores and translation is not None:
            call.to_remember = await self._off_loop.run(call.bytes, call.turn.to_remember, translation)

    async def _whole_reply(self, exchange: Exchange, request: UpstreamRequest, reply: Json, body: bytes) -> AgentReply:
        """Return the agent's reply to a response in one piece; `body` is the JSON of `reply`."""
        call, size = exchange.call, len(body)
        call.bytes += size
        if call.turn is not None:
            reply = {**reply, "id": call.turn.named(self.memory, reply.get("id"))}
        converted = await self._off_loop.run(size, convert_reply, request, reply, body, call.streamed)
        record, data, translation = converted
        await self._answered(call, request, reply, record, translation, size)
        return StreamEnd(exchange.reply_stream, data) if call.streamed else JsonReply(200, data)

    async def _pass_stream(self, exchange: Exchange, request: UpstreamRequest, stream: UpstreamStream) -> StreamEnd:
        """Send the frames to the agent as they arrive, and collect the reply from them."""
        call, wire = exchange.call, request.wire
        reader = wire.read_stream(request.body)
        writer = None if request.translated is None else request.translated.write_stream(request.agent_request)
        name = None if call.turn is None else partial(call.turn.named, self.memory)
        last, number = b"", 0
        try:
            async for frame in stream.frames():
                number, call.bytes = number + 1, call.bytes + len(frame)
                if number > MOST_FRAMES:
                    raise stream.broken(f"a stream of more than {MOST_FRAMES} frames")
                data = await self._off_loop.run(len(frame), convert_frame, reader, frame, writer, name)
                if call.first_frame_at is None:
                    call.first_frame_at = time.time()
                if reader.ended:
                    last = data
                    break
                await exchange.reply_stream.write(data)
                if number % _FRAMES_A_TURN == 0:
                    await asyncio.sleep(0)  # frames that have already arrived are passed without a pause
            if not (reader.ended or reader.complete):
                raise unusable("The model server ended its stream before the reply was complete")
            stream_end = await self._off_loop.run(call.bytes, end_stream, request, reader, writer, stream.hid_key)
            reply, record, end = stream_end
            if call.turn is not None:
                record = {**record, "id": call.turn.name}
        except BaseException:  # the received part of the reply is kept, whatever ends it
            with suppress(Exception):  # the reply may break off because it cannot be read
                received = reader.reply()
                call.broke_off(None if received is None else wire.record_of(received))
            raise
        await self._answered(call, request, reply, record, None if writer is None else writer.reply, call.bytes)
        await self._record(call, request, reply)
        return StreamEnd(exchange.reply_stream, last if writer is None else end)

    # --- counting: nothing is generated, so nothing is recorded --------------------------------------------------

    async def count(self, route: str, raw: bytes, attempt: AttemptName, hold: Hold) -> JsonReply:
        """Return the tokens of a prompt in the form of the route's dialect.

        Raises:
            CallFailed: 400, a field is invalid; 501, the server does not count; or the server's error.
        """
        dialect = MESSAGES if route == _COUNTED[MESSAGES.route] else RESPONSES
        request = await self._off_loop.run(len(raw), dialect.read_count, raw)
        wire, endpoints = _wire_and_endpoints(self._models(), dialect, request["model"], attempt[0])
        size = len(raw)
        if wire is not dialect:
            if dialect is RESPONSES:
                turn = begin(self.memory, attempt, request, self._limits.body_bytes)
                await turn.hold_value(hold, self._off_loop)
                size += turn.size
                request = await self._off_loop.run(size, turn.expanded)
            request = await self._off_loop.run(size, dialect.count_to_chat, request)
        while True:
            endpoint = endpoints.pop(0)
            try:
                body = await self._off_loop.run(size, wire.upstream_request, request, endpoint.model, {})
                return await self._count_at(endpoint, wire, body, route)
            except CallFailed as failure:
                if failure.status != 502 or not endpoints:
                    raise

    async def _count_at(self, endpoint: ModelEndpoint, wire: Dialect, body: bytes, route: str) -> JsonReply:
        """Request the count from one server: at its own route, or as from vLLM."""
        is_own = wire is not CHAT
        base, path = (endpoint.api_base, f"/{route}") if is_own else (endpoint.root, "/tokenize")
        response = await self._upstream.count(endpoint, base, path, wire, body)
        count = (read_json(response.body) or {}).get("input_tokens" if is_own else "count")
        if type(count) is not int or count != count_of(count):
            text = f"The model server of {endpoint.model!r} cannot count the tokens of {route.partition('/')[0]}"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        if is_own:
            return JsonReply(200, response.body)
        kind = {"object": "response.input_tokens"} if route == _COUNTED[RESPONSES.route] else {}
        return json_reply({**kind, "input_tokens": count})


def _wire_and_endpoints(
    models: ModelTable, dialect: Dialect, model: str, rollout_id: str
) -> tuple[Dialect, list[ModelEndpoint]]:
    """Return the dialect of the rollout's first suitable endpoint, and all endpoints that support it.

    Raises:
        CallFailed: 404, there is no such model; 400, none of its servers supports this dialect.
    """
    endpoints = models.endpoints(model, rollout_id)
    for endpoint in endpoints:
        for wire in _wires(dialect):
            if wire.route in endpoint.dialects:
                return wire, [other for other in endpoints if wire.route in other.dialects]
    routes = ", ".join(sorted({route for endpoint in endpoints for route in endpoint.dialects}))
    text = f"The model {model!r} does not support {dialect.route}, only {routes}"
    raise CallFailed(400, text, code="unsupported_dialect", param="model")


def _wires(dialect: Dialect) -> tuple[Dialect, ...]:
    """Return the possible server dialects for an agent's dialect; the best first."""
    return (dialect, CHAT) if isinstance(dialect, TranslatedDialect) else (dialect,)


# --- pure steps, on a thread for long inputs -------------------------------------------------------------------------


def _read_request(dialect: Dialect, raw: bytes, model: str | None) -> tuple[Json, list[object]]:
    """Return an agent's request and the prompt in it, as messages."""
    request = dialect.read_request(raw, model)
    return request, dialect.prompt_of(request)


def _refused_request(dialect: Dialect, raw: bytes) -> tuple[Json | None, list[object] | None]:
    """Return the model and the prompt of a refused request, for its record; None if they are unusable."""
    request = read_json(raw)
    try:
        return (None, None) if request is None else ({"model": str(request.get("model"))}, dialect.prompt_of(request))
    except Exception:  # boundary: the request was refused, so any part of it may be wrong
        return None, None


def _upstream_request(
    dialect: Dialect, wire: Dialect, endpoints: list[ModelEndpoint], agent_request: Json, policy: CallPolicy | None
) -> UpstreamRequest:
    """Return the request for these endpoints, which support `wire`."""
    agents = dialect if isinstance(dialect, TranslatedDialect) and wire is CHAT else None
    bought = policy is not None and policy.kind == "external"
    if agents is None and (wire is not CHAT or bought or any(e.provider not in _OURS for e in endpoints)):
        return UpstreamRequest(agent_request, wire, agent_request, wire.prompt_of(agent_request), endpoints)
    if policy is not None and policy.server_tools == "refuse":
        refuse_server_tools(agent_request)
    left_out = tuple(sorted({kind for kind, _ in server_tools(agent_request)}))
    chat = without_server_tools(agent_request) if agents is None else agents.to_chat(agent_request)
    return UpstreamRequest(agent_request, wire, chat, wire.prompt_of(chat), endpoints, agents, left_out)


def convert_reply(
    request: UpstreamRequest, reply: Json, body: bytes, streamed: bool
) -> tuple[Json, bytes, Json | None]:
    """Return the record of a complete reply, the bytes for the agent, and the translated reply."""
    wire = request.wire
    record = wire.record_of(reply)
    if request.translated is not None:
        events, translation = translated(reply, request.translated, request.agent_request)
        return record, events if streamed else json_bytes(translation), translation
    if streamed:
        return record, wire.stream_of(reply, request.body), None
    visible = wire.visible(reply, request.body)
    return record, body if visible == reply and is_strict(body) else json_bytes(visible), None


def convert_frame(
    reader: StreamReader, frame: bytes, writer: StreamWriter | None, name: Callable[[object], str] | None = None
) -> bytes:
    """Return the agent's bytes for one frame; `name` converts the model server's id of a response."""
    output = reader.feed(frame)
    if b"NaN" in output or b"Infinity" in output:  # which JSON does not have, but may stand in a text
        data = data_of(output)
        value = None if data is None else read_json(data)
        if data is not None and value is not None and not is_strict(data):
            output = with_data(output, json_bytes(value))
    if writer is None or reader.ended:
        return output
    data = data_of(output)
    chunk = None if data is None or data.strip() == DONE else read_json(data)
    if chunk is None:
        return b""
    return writer.feed(chunk if name is None else {**chunk, "id": name(chunk.get("id"))})


def end_stream(
    request: UpstreamRequest, reader: StreamReader, writer: StreamWriter | None, hid_key: bool
) -> tuple[Json, Json, bytes]:
    """Return a stream's reply, its record, and the events that end a translated stream."""
    reply = reader.reply()
    if reply is None:
        raise unusable("The model server ended its stream without a reply")
    reply = without_tokens(reply) if hid_key else reply
    return reply, request.wire.record_of(reply), b"" if writer is None else writer.end()


def _tokens_of(request: UpstreamRequest, reply: Json) -> list[CallTokens | None]:
    """Return the tokens of the choices of a reply; the list has at least one entry."""
    return [request.wire.tokens_of(reply, request.body), *request.wire.further_tokens_of(reply, request.body)]


def read_reply(wire: Dialect, response: UpstreamResponse) -> Json:
    """Return the reply in a response.

    Raises:
        CallFailed: 502, it is not a reply of the dialect.
    """
    reply = wire.read_reply(response.body)
    if reply is None:
        raise unusable(f"The model server's reply is not valid for {wire.route} (expected: {wire.reply_form})")
    return reply
