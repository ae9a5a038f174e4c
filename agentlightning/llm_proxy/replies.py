"""What goes back to the agent: a reply, or the failure that a dialect puts into its own words."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.utils.auth import Send

CallState = Literal["ok", "no_tokens", "no_generation", "upstream_error", "refused", "client_left"]
"""How a call ended, as its span says it (`semconv.LightningCallAttributes.STATE`)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP reply with a JSON body."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def send(self, send: Send) -> None:
        headers = {
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            **{name.lower(): value for name, value in self.headers.items()},
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": self.body})


class CallFailed(Exception):
    """The call has no answer of a model. `message` is for the agent's developer and goes into the span too."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        state: CallState = "refused",
        own_words: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        """Seconds."""
        self.state: CallState = state
        self.own_words = own_words
        """The model server's error body, a JSON object, for an agent that speaks the server's dialect."""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that go with it."""
        return {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}


class ClientLeft(Exception):
    """The agent closed its connection before it had a reply."""


refuse = CallFailed


def json_reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return Reply(status, json.dumps(value).encode(), headers or {})
