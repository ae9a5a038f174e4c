"""The gateway as an ASGI app: it identifies the attempt, admits the call, forwards it, records it and replies.

A call that passes the checks of address, key and attempt gets a number from the store and is always recorded as two
spans of its attempt, before the agent gets the reply. A request that fails the checks has no span.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from agentlightning.llm_proxy.access.address import (
    MODELS,
    RESPONSE,
    CallAddress,
    client_span,
    dialect_of,
    parse_address,
)
from agentlightning.llm_proxy.access.admission import AttemptBook, Budgets, Slots, check_key
from agentlightning.llm_proxy.access.bodies import DigestedBody, body_of
from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.dialects.json_values import expanded_bytes
from agentlightning.llm_proxy.endpoints.engines import OTHER
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.llm_proxy.forwarding import Exchange, Forwarder
from agentlightning.llm_proxy.off_loop import LARGE_BYTES
from agentlightning.llm_proxy.policies import PolicyTable
from agentlightning.llm_proxy.recording.journal import Journal
from agentlightning.llm_proxy.recording.recorder import Privacy, ask_store, is_final, keep
from agentlightning.llm_proxy.recording.replay import CallFile
from agentlightning.llm_proxy.replies import (
    AgentReply,
    CallFailed,
    JsonReply,
    ReplyStream,
    busy,
    json_reply,
)
from agentlightning.llm_proxy.responses_state import deleted, input_items, remembered, retrieved
from agentlightning.llm_proxy.upstream.http import Upstream
from agentlightning.llm_proxy.weights import WeightGate
from agentlightning.store.base import LightningStore
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.byte_budget import PROCESS, ClientLeftError, Hold
from agentlightning.utils.http.dispatch import unless_left

logger = logging.getLogger(__name__)


class Gateway:
    """Serves the model calls of attempts. Owned by the serving loop; `store` and `models` are read for each call."""

    def __init__(
        self,
        *,
        store: Callable[[], LightningStore],
        models: Callable[[], ModelTable],
        policies: PolicyTable,
        default_attempt: Callable[[], tuple[str, str] | None],
        token: str | None,
        limits: GatewayLimits,
        store_seconds: float,
        gate: WeightGate,
        upstream: Upstream,
        privacy: Privacy,
        call_file: CallFile | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._store, self._models, self._policies = store, models, policies
        self._default_attempt = default_attempt
        self._token, self._limits, self._store_seconds = token, limits, store_seconds
        self._forwarder = Forwarder(models, policies, gate, upstream, limits, call_file)
        self._off_loop = upstream.off_loop
        self._privacy, self._journal = privacy, journal
        self._budgets = Budgets(limits.tokens_per_rollout, limits.cost_per_rollout)
        self._attempts = AttemptBook()
        self._slots = Slots(limits.calls, limits.calls_per_attempt, limits.waiting_calls, limits.call_seconds)
        self._warned: set[str] = set()
        self.ended: Counter[str] = Counter()
        """Number of recorded calls by state, and of `lost` and `rejected` calls (without spans)."""

    @property
    def in_hand(self) -> int:
        """Number of calls in progress: arrived and without a reply."""
        return self._slots.taken

    def in_hand_outside(self, rollouts: Collection[str]) -> int:
        """Return the number of calls in progress of rollouts that are not in `rollouts`."""
        return self._slots.taken_outside(rollouts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply_to(scope, receive, ReplyStream(send))
        except CallFailed as failure:
            self.ended["rejected"] += 1
            reply = dialect_of(scope["raw_path"]).failure(failure)
        except Exception:  # boundary: a bug of ours outside a call is logged, counted and answered
            logger.exception("the gateway failed during a %s request", scope["method"])
            self.ended["rejected"] += 1
            reply = dialect_of(scope["raw_path"]).failure(_internal_error())
        if reply is not None:
            await reply.send(send)

    async def _reply_to(self, scope: Scope, receive: Receive, reply_stream: ReplyStream) -> AgentReply | None:
        """Return the reply to send; None if the agent has disconnected."""
        if scope["path"] == "/health":
            return json_reply({"status": "ok"})
        address = parse_address(scope["raw_path"], scope["method"], self._default_attempt())
        check_key(scope, address, self._token)
        store, seconds = self._store(), self._store_seconds
        sampling = self._attempts.recent(store, address.rollout_id, address.attempt_id)
        if sampling is None:
            sampling = await ask_store(self._attempts.check(store, address.rollout_id, address.attempt_id), seconds)
        if address.route not in DIALECTS:
            return await self._answer_without_a_call(address, scope, receive)
        dialect = DIALECTS[address.route]
        sequence_id = await ask_store(store.get_next_span_sequence_id(address.rollout_id, address.attempt_id), seconds)
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        call = GatewayCall(
            address.rollout_id,
            address.attempt_id,
            sequence_id,
            dialect=address.route,
            agent_headers={name: value for name, value in headers if name in dialect.forwarded},
            role=address.role,
            model_in_url=address.model,
            sampling=sampling,
            client_span=client_span(scope),
        )
        if self._journal is not None:
            self._journal.begun(call)
        with self._hold(address) as hold:
            exchange = Exchange(store, call, dialect, scope, DigestedBody(receive), hold, reply_stream)
            return await self._conclude(exchange, await self._make_call(exchange))

    async def _answer_without_a_call(self, address: CallAddress, scope: Scope, receive: Receive) -> JsonReply | None:
        """Reply to a request that needs no model call; nothing is recorded. None if the agent disconnected."""
        if address.role is not None:  # for a model call the record has the reason
            self._policies.role_in_url(address.role)
        if address.route == MODELS:
            return json_reply(self._models().listing(address.named))
        if not address.route.startswith(RESPONSE):
            return await self._count_tokens(address, scope, receive)
        memory, attempt = self._forwarder.memory, (address.rollout_id, address.attempt_id)
        assert address.named is not None
        response = remembered(memory, attempt, address.named, scope["method"])
        if scope["method"] == "DELETE":
            return deleted(memory, response)
        show = retrieved if address.route == RESPONSE else input_items
        size = response.all_bytes
        async with self._slots.take(*attempt):
            with self._hold(address) as hold:
                with busy():
                    hold.add(size)
                return await self._off_loop.run(size, show, response, scope["query_string"])

    def _hold(self, address: CallAddress) -> Hold:
        return PROCESS.hold((address.rollout_id, address.attempt_id), self._limits.bytes_per_attempt)

    async def _hold_value(self, raw: bytes, hold: Hold) -> None:
        """Reserve the bytes that a large body will take when decoded; at most the attempt's share.

        Raises:
            CallFailed: 429, the attempt or the process holds too many bytes.
        """
        if len(raw) >= LARGE_BYTES:
            size = await self._off_loop.run(len(raw), expanded_bytes, raw)
            with busy():
                hold.add_value(size - hold.size)

    async def record_cut_short(self, calls: Sequence[GatewayCall]) -> None:
        """Record calls that were in progress when an earlier process ended: their agents got no reply from it."""
        assert self._journal is not None
        store, seconds = self._store(), self._store_seconds
        for call in calls:
            call.failed(CallFailed(503, "The gateway's process ended during the call", state="upstream_error"))
            loss = await keep(store, call, self._privacy, seconds)
            if loss is None or is_final(loss):
                self._journal.ended(call)
            if loss is not None:
                logger.error("%s: the record of an interrupted call was not stored: %r", call.call_id, loss)
        if calls:
            logger.warning("calls in progress when an earlier gateway process ended: %d", len(calls))

    async def _count_tokens(self, address: CallAddress, scope: Scope, receive: Receive) -> JsonReply | None:
        """Count the tokens of a prompt; no model call, so nothing is recorded. None if the agent disconnected."""
        attempt = (address.rollout_id, address.attempt_id)
        with self._hold(address) as hold:
            try:
                raw = await body_of(scope, receive, hold, self._limits.body_bytes)
                async with self._slots.take(*attempt):
                    await self._hold_value(raw, hold)
                    counting = self._forwarder.count(address.route, raw, attempt, hold)
                    return await asyncio.wait_for(counting, self._limits.call_seconds)
            except ClientLeftError:
                return None
            except TimeoutError:
                text = f"Counting the tokens took longer than {self._limits.call_seconds} seconds"
                raise CallFailed(504, text, code="timeout") from None

    async def _make_call(self, exchange: Exchange) -> AgentReply | None:
        """Make the call and return the reply for the agent; the outcome is stored in the call."""
        call = exchange.call
        try:
            self._budgets.check(call.rollout_id)
            return await self._while_connected(exchange)
        except CallFailed as refused:
            failure = refused
        except ClientLeftError:
            call.left()
            return None
        except asyncio.CancelledError:  # the gateway stops: record the call, then end
            call.failed(CallFailed(503, "The gateway stopped during the call", state="upstream_error"))
            await self._conclude(exchange, None, seconds=0.5)
            raise
        except Exception:  # boundary: a bug of ours is logged and recorded as one
            logger.exception("%s: the gateway failed in a call of attempt %s", call.call_id, call.attempt_id)
            failure = _internal_error()
        call.failed(failure)
        return exchange.failed(failure)

    async def _while_connected(self, exchange: Exchange) -> AgentReply:
        """Serve the call until it is done, the agent disconnects or the time is up, whichever comes first."""
        until = asyncio.timeout(self._limits.call_seconds)
        try:
            async with until:
                raw = await self._body_of(exchange)
                return await unless_left(self._in_a_slot(exchange, raw), exchange.body.receive)
        except TimeoutError:
            if not until.expired():
                raise
            text = f"The call took longer than {self._limits.call_seconds} seconds"
            raise CallFailed(504, text, code="timeout", state="upstream_error") from None

    async def _in_a_slot(self, exchange: Exchange, raw: bytes) -> AgentReply:
        call = exchange.call
        try:
            async with self._slots.take(call.rollout_id, call.attempt_id) as has_waited:
                if has_waited:  # the attempt may have ended meanwhile, or used up its budget
                    checking = self._attempts.check(exchange.store, call.rollout_id, call.attempt_id)
                    await ask_store(checking, self._store_seconds)
                    self._budgets.check(call.rollout_id)
                await self._hold_value(raw, exchange.hold)
                return await self._forwarder.serve(exchange, raw)
        except CallFailed as refused:
            if refused.code == "too_many_calls" and call.request is None:  # the record names the turn
                await self._hold_value(raw, exchange.hold)
                await self._forwarder.note_refused(exchange, raw)
            raise

    async def _body_of(self, exchange: Exchange) -> bytes:
        """Return the body. If the byte budget is too small, receive it completely for its digest, and refuse it."""
        try:
            return await body_of(exchange.scope, exchange.body.receive, exchange.hold, self._limits.body_bytes)
        except CallFailed as refused:
            if refused.code == "too_many_bytes":
                exchange.hold.close()
                await exchange.body.receive_rest()
            raise

    async def _conclude(
        self, exchange: Exchange, reply: AgentReply | None, seconds: float | None = None
    ) -> AgentReply | None:
        """Store the spans, then return the reply. If that fails, return an error, also at the end of a stream."""
        call = exchange.call
        self._budgets.add(call, call.endpoint)
        call.body_digest = exchange.body.digest()
        is_answered = call.error is None
        loss = await keep(exchange.store, call, self._privacy, seconds or self._store_seconds, self._off_loop)
        if self._journal is not None:
            self._journal.ended(call)
        if call.turn is not None:
            is_kept = loss is None and call.error is None
            call.turn.ended(self._forwarder.memory, call.to_remember if is_kept else None)
        if loss is not None:
            self.ended["lost"] += 1
            text = "%s: call of attempt %s of rollout %s lost: the store did not accept its spans: %r"
            logger.error(text, call.call_id, call.attempt_id, call.rollout_id, loss)
            message = (
                f"The call could not be recorded ({type(loss).__name__}), so the reply was discarded. Retry the call"
            )
            return exchange.failed(CallFailed(503, message, code="record_lost", retry_after=1.0))
        self.ended[call.state] += 1
        if is_answered and call.error is not None:  # the record is bare, so the reply could not be accounted for
            return exchange.failed(CallFailed(500, call.error, code="internal_error"))
        model = str((call.request or {}).get("model"))
        if call.state == "no_tokens" and call.is_for_training and model not in self._warned:
            self._warned.add(model)
            engine = call.engine or OTHER
            text = (
                "The model server of %r returns no token ids (engine: %s). Its calls are recorded as no_tokens. Only "
                "the training of weights needs token ids. To get them: %s"
            )
            logger.warning(text, model, engine.name, engine.advice)
        return reply


def _internal_error() -> CallFailed:
    return CallFailed(500, "Internal error of the gateway; see its log", code="internal_error", state="upstream_error")
