"""The gateway as an ASGI app: whose call is it, may it be made, make it, keep it, answer it.

A call that passed the checks of address, key and attempt has a number from the store and ends as two spans of its
attempt, whatever becomes of it; only then is it answered. What the checks refuse is no call of an attempt and leaves no
span.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.llm_proxy.addresses import COUNT_TOKENS, MODELS, CallAddress, parse_address, spoken
from agentlightning.llm_proxy.admission import AttemptBook, Slots
from agentlightning.llm_proxy.budget import Budgets
from agentlightning.llm_proxy.calls import ModelCall
from agentlightning.llm_proxy.dialects import DIALECTS, Dialect
from agentlightning.llm_proxy.engines import OTHER
from agentlightning.llm_proxy.journal import Journal
from agentlightning.llm_proxy.keys import check_key
from agentlightning.llm_proxy.limits import GatewayLimits
from agentlightning.llm_proxy.listing import model_listing
from agentlightning.llm_proxy.models import ModelTable
from agentlightning.llm_proxy.policies import PolicyTable
from agentlightning.llm_proxy.privacy import Privacy
from agentlightning.llm_proxy.recorder import ask_store, is_final, keep
from agentlightning.llm_proxy.replies import CallFailed, ClientLeft, Reply, json_reply, refuse
from agentlightning.llm_proxy.serving import Outlet, Server, Tail
from agentlightning.llm_proxy.tape import Tape
from agentlightning.llm_proxy.upstream import Upstream
from agentlightning.llm_proxy.weights import WeightGate
from agentlightning.store.base import LightningStore
from agentlightning.utils.auth import Receive, Scope, Send

logger = logging.getLogger(__name__)


class Gateway:
    """Serves the model calls of attempts. Owned by the serving loop; `store` and `models` are read for each call."""

    def __init__(
        self,
        *,
        store: Callable[[], LightningStore],
        models: Callable[[], ModelTable],
        policies: PolicyTable,
        token: str | None,
        limits: GatewayLimits,
        gate: WeightGate,
        upstream: Upstream,
        privacy: Privacy,
        tape: Tape | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._store, self._models, self._policies = store, models, policies
        self._token, self._limits = token, limits
        self._server = Server(models, policies, gate, upstream, limits.call_seconds, tape)
        self._privacy, self._journal = privacy, journal
        self._budgets = Budgets(limits.tokens_per_rollout, limits.cost_per_rollout)
        self._attempts = AttemptBook()
        self._slots = Slots(limits.calls, limits.calls_per_attempt)
        self._warned: set[str] = set()
        self.ended: Counter[str] = Counter()
        """Recorded calls by state, and `lost` and `rejected` ones (without a span)."""

    @property
    def in_hand(self) -> int:
        """Calls that have arrived and are not answered."""
        return self._slots.taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._answer(scope, receive, Outlet(send))
        except CallFailed as failure:
            self.ended["rejected"] += 1
            reply = spoken(scope["raw_path"]).failure(failure)
        if reply is not None:
            await reply.send(send)

    async def _answer(self, scope: Scope, receive: Receive, outlet: Outlet) -> Reply | Tail | None:
        """Return what to send; None when nobody is there to read it."""
        if scope["path"] == "/health":
            return json_reply({"status": "ok"})
        address = parse_address(scope["raw_path"], scope["method"])
        check_key(scope, address, self._token)
        store, seconds = self._store(), self._limits.store_seconds
        if not self._attempts.lets_pass(store, address.rollout_id, address.attempt_id):
            await ask_store(self._attempts.check(store, address.rollout_id, address.attempt_id), seconds)
        if address.role is not None and address.route in (MODELS, COUNT_TOKENS):  # of a call its record tells
            self._policies.role_in_url(address.role)
        if address.route == MODELS:
            return json_reply(model_listing(self._models(), address.model))
        if address.route == COUNT_TOKENS:
            return await self._count_tokens(address, receive)
        dialect = DIALECTS[address.route]
        call = await self._arrival(store, address, scope)
        if self._journal is not None:
            self._journal.begun(call)
        reply = await self._outcome(store, call, dialect, receive, outlet)
        return await self._conclude(store, call, dialect, outlet, reply)

    async def record_cut_short(self, calls: Sequence[ModelCall]) -> None:
        """Record calls that an earlier process had in hand when it ended: their agents got no answer from it."""
        assert self._journal is not None
        store, seconds = self._store(), self._limits.store_seconds
        for call in calls:
            call.failed(refuse(503, "The gateway's process ended during the call", state="upstream_error"))
            lost = await keep(store, call, self._privacy, seconds)
            if lost is None or is_final(lost):
                self._journal.ended(call)
            if lost is not None:
                logger.error("%s: the record of a call that was cut short is not stored: %r", call.call_id, lost)
        if calls:
            logger.warning("%d calls were in hand when an earlier gateway process ended", len(calls))

    async def _count_tokens(self, address: CallAddress, receive: Receive) -> Reply | None:
        """Count the tokens of a prompt; no model call, so nothing is recorded. None if the agent left."""
        with self._slots.take(address.rollout_id, address.attempt_id):
            try:
                raw = await _body(receive, self._limits.body_bytes)
                counting = self._server.count_tokens(raw, address.rollout_id)
                return await asyncio.wait_for(counting, self._limits.call_seconds)
            except ClientLeft:
                return None
            except asyncio.TimeoutError:
                text = f"Counting took longer than {self._limits.call_seconds} seconds"
                raise refuse(504, text, code="timeout") from None

    async def _arrival(self, store: LightningStore, address: CallAddress, scope: Scope) -> ModelCall:
        number = store.get_next_span_sequence_id(address.rollout_id, address.attempt_id)
        sequence_id = await ask_store(number, self._limits.store_seconds)
        wanted = DIALECTS[address.route].forwarded
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        sent = {name: value for name, value in headers if name in wanted} if wanted else {}
        return ModelCall(
            address.rollout_id,
            address.attempt_id,
            sequence_id,
            dialect=address.route,
            agent_headers=sent,
            role=address.role,
        )

    async def _outcome(
        self, store: LightningStore, call: ModelCall, dialect: Dialect, receive: Receive, outlet: Outlet
    ) -> Reply | Tail | None:
        """Make the call and return the reply for the agent; how it ended is in `call`."""
        try:
            self._budgets.check(call.rollout_id)
            with self._slots.take(call.rollout_id, call.attempt_id):
                return await self._while_connected(call, dialect, receive, outlet)
        except CallFailed as failure:
            call.failed(failure)
            return _failed_reply(dialect, failure, outlet)
        except ClientLeft:
            call.left()
            return None
        except asyncio.CancelledError:  # the gateway stops: a last word, then go
            call.failed(refuse(503, "The gateway stopped during the call", state="upstream_error"))
            await self._conclude(store, call, dialect, outlet, None, seconds=0.5)
            raise
        except Exception:  # boundary: a fault of ours must not look like the agent's
            logger.exception("%s: the gateway failed in a call of attempt %s", call.call_id, call.attempt_id)
            failure = refuse(500, "The gateway failed; see its log", code="internal_error", state="upstream_error")
            call.failed(failure)
            return _failed_reply(dialect, failure, outlet)

    async def _while_connected(
        self, call: ModelCall, dialect: Dialect, receive: Receive, outlet: Outlet
    ) -> Reply | Tail:
        """Serve the call until it is done, the agent leaves or the time is up, whichever comes first."""
        has_body = asyncio.Event()

        async def serve() -> Reply | Tail:
            raw = await _body(receive, self._limits.body_bytes)
            has_body.set()
            return await self._server.serve(call, dialect, raw, outlet)

        work = asyncio.ensure_future(serve())
        gone = asyncio.ensure_future(_disconnected(receive, has_body))
        tasks: set[asyncio.Future[Any]] = {work, gone}
        try:
            await asyncio.wait(tasks, timeout=self._limits.call_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = [task for task in tasks if task.done()]
            await _cancel(tasks)
        if work in finished:
            return work.result()
        if finished:
            raise ClientLeft
        text = f"The call took longer than {self._limits.call_seconds} seconds"
        raise refuse(504, text, code="timeout", state="upstream_error")

    async def _conclude(
        self,
        store: LightningStore,
        call: ModelCall,
        dialect: Dialect,
        outlet: Outlet,
        reply: Reply | Tail | None,
        seconds: float | None = None,
    ) -> Reply | Tail | None:
        """Keep the spans, then let the reply go; without the spans there is no reply, and no end of a stream."""
        self._budgets.add(call, call.endpoint)
        lost = await keep(store, call, self._privacy, seconds or self._limits.store_seconds)
        if self._journal is not None:
            self._journal.ended(call)
        if lost is not None:
            self.ended["lost"] += 1
            text = "%s: call of attempt %s of rollout %s is lost, the store did not take its spans: %r"
            logger.error(text, call.call_id, call.attempt_id, call.rollout_id, lost)
            message = f"The call could not be recorded ({type(lost).__name__}), so its answer is withheld"
            return _failed_reply(dialect, refuse(503, message, code="record_lost", retry_after=1.0), outlet)
        self.ended[call.state] += 1
        if call.state == "no_tokens" and call.is_for_training:
            self._warn_about_tokens(call)
        return reply

    def _warn_about_tokens(self, call: ModelCall) -> None:
        model = str((call.request or {}).get("model"))
        if model not in self._warned:
            self._warned.add(model)
            engine = call.engine or OTHER
            logger.warning(
                "The model server of %r gives no token ids (it is %s): its calls are recorded as no_tokens and cannot "
                "be trained. How to get them: %s",
                model,
                engine.name,
                engine.advice,
            )


def _failed_reply(dialect: Dialect, failure: CallFailed, outlet: Outlet) -> Reply | Tail:
    """Return a failure as a reply, or as the last frames of a stream that has begun."""
    return Tail(outlet, dialect.stream_failure(failure, outlet.frames)) if outlet.begun else dialect.failure(failure)


async def _body(receive: Receive, limit: int) -> bytes:
    """Return the request's body.

    Raises:
        CallFailed: 413, it is larger than `limit` bytes.
        ClientLeft: the connection closed before its end.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise refuse(413, f"The body is larger than the gateway's limit of {limit} bytes", code="body_too_large")
        if not message.get("more_body", False):
            return bytes(body)


async def _disconnected(receive: Receive, has_body: asyncio.Event) -> None:
    """Return when the client closes its connection; reads nothing before the body is there."""
    await has_body.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: set[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait for its end, so that the connection to the model server is closed too."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in running:
        if not task.cancelled():
            task.exception()  # seen: what the call came to no longer matters
