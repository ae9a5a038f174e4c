"""What goes back to the agent: a reply, or a failure in OpenAI's error form."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.utils.auth import Send

CallState = Literal["ok", "no_tokens", "upstream_error", "refused", "client_left"]
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
    """The call has no answer of a model; `reply` is what the agent gets instead, `state` what the span says."""

    def __init__(self, reply: Reply, summary: str, state: CallState = "refused") -> None:
        super().__init__(summary)
        self.reply = reply
        self.summary = summary
        self.state: CallState = state


class ClientLeft(Exception):
    """The agent closed its connection before it had a reply."""


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value).encode())


def error_reply(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: float | None = None,
) -> Reply:
    """Return an error in OpenAI's form. `retry_after` is in seconds."""
    error = {"message": message, "type": _error_type(status), "param": param, "code": code}
    headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
    return Reply(status, json.dumps({"error": error}).encode(), headers)


def refuse(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: float | None = None,
    state: CallState = "refused",
) -> CallFailed:
    """Return the failure to raise; `message` is for the agent's developer and goes into the span too."""
    return CallFailed(error_reply(status, message, code=code, param=param, retry_after=retry_after), message, state)


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
