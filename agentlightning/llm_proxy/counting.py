"""Counting the tokens of a prompt as a model server does. Nothing is generated, so nothing is recorded."""

from __future__ import annotations

from agentlightning.llm_proxy.access.limits import count_of
from agentlightning.llm_proxy.dialects import MESSAGES, RESPONSES
from agentlightning.llm_proxy.dialects.base import Dialect
from agentlightning.llm_proxy.dialects.json_values import Json, read_json
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.llm_proxy.forwarding import AGENT, blamed_on, wire_and_endpoints
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, json_reply
from agentlightning.llm_proxy.responses_state.memory import AttemptName, ResponseMemory
from agentlightning.llm_proxy.responses_state.turns import begin
from agentlightning.llm_proxy.upstream.http import Upstream
from agentlightning.utils.http.byte_budget import Hold

COUNTED = {MESSAGES.route: "messages/count_tokens", RESPONSES.route: "responses/input_tokens"}
"""By dialect: the route that counts, here and at a server that speaks the dialect itself."""


class TokenCounter:
    """Asks model servers to count. Owned by the serving loop."""

    def __init__(self, upstream: Upstream, memory: ResponseMemory, body_bytes: int) -> None:
        self._upstream, self._memory, self._body_bytes = upstream, memory, body_bytes
        self._off_loop = upstream.off_loop

    async def count(self, models: ModelTable, route: str, raw: bytes, attempt: AttemptName, hold: Hold) -> JsonReply:
        """Return the tokens of a prompt in the form of the route's dialect.

        Raises:
            CallFailed: 400 that names the field that is wrong; 501, the server does not count; its own refusal.
        """
        dialect = MESSAGES if route == COUNTED[MESSAGES.route] else RESPONSES
        asked = await self._off_loop.run(len(raw), blamed_on(AGENT)(dialect.read_count), raw)
        wire, endpoints = wire_and_endpoints(models, dialect, asked["model"], attempt[0])
        size = len(raw)
        if wire is not dialect:
            if dialect is RESPONSES:
                turn = begin(self._memory, attempt, asked, self._body_bytes)
                await turn.hold_value(hold, self._off_loop)
                size += turn.size
                asked = await self._off_loop.run(size, turn.expanded)
            asked = await self._off_loop.run(size, blamed_on(AGENT)(dialect.count_to_chat), asked)
        own = f"/{route}" if wire is dialect else None
        for endpoint in endpoints[:-1]:
            try:
                return await self._ask(endpoint, wire, asked, size, own, route)
            except CallFailed as failure:
                if failure.status != 502:
                    raise
        return await self._ask(endpoints[-1], wire, asked, size, own, route)

    async def _ask(
        self, endpoint: ModelEndpoint, wire: Dialect, request: Json, size: int, own: str | None, route: str
    ) -> JsonReply:
        """Ask one server, at its route for this or else in vLLM's way."""
        body = await self._off_loop.run(size, wire.upstream_request, request, endpoint.model, {})
        base, path = (endpoint.root, "/tokenize") if own is None else (endpoint.api_base, own)
        response = await self._upstream.count(endpoint, base, path, wire, body)
        count = (read_json(response.body) or {}).get("count" if own is None else "input_tokens")
        if type(count) is not int or count != count_of(count):
            text = f"The model server of {endpoint.model!r} does not count the tokens of {route.partition('/')[0]}"
            raise CallFailed(501, text, code="not_supported", state="upstream_error")
        if own is not None:
            return JsonReply(200, response.body)
        kind = {"object": "response.input_tokens"} if route == COUNTED[RESPONSES.route] else {}
        return json_reply({**kind, "input_tokens": count})
