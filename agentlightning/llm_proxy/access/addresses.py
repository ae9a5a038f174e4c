"""The URL of a call: the rollout, the attempt, the role and the route that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, Dialect
from agentlightning.llm_proxy.replies import CallFailed

COUNT_TOKENS = f"{MESSAGES.route}/count_tokens"
MODELS = "models"
ROUTES: dict[str, str] = {**dict.fromkeys(DIALECTS, "POST"), COUNT_TOKENS: "POST", MODELS: "GET"}
"""What is served below an attempt's URL, with or without `v1/` before it, and by which method."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RIGHT_FORM = (
    "The base URL of an agent is http://<host>:<port>/rollout/<rollout_id>/attempt/<attempt_id> "
    "(or the same with /v1 at the end, or with /role/<role> before it); LLM.get_base_url() and LLMProxy.as_resource() "
    "give it"
)


@dataclass(frozen=True, slots=True)
class CallAddress:
    """One route of one attempt."""

    rollout_id: str
    attempt_id: str
    route: str
    role: str | None = None
    """Which agent of the attempt makes the call, where the URL names one."""
    model: str | None = None
    """The one that is asked about, below `models`."""


def parse_address(raw_path: bytes, method: str) -> CallAddress:
    """Read `[/role/<role>]/rollout/R/attempt/A[/v1]/<route>`, where `models` may have a name after it.

    Each segment is percent-decoded by itself.

    Raises:
        CallFailed: 404 that shows the right form, 405 with the right method.
    """
    segments = [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw_path.split(b"/")[1:]]
    role, segments = (segments[1], segments[2:]) if segments[0] == "role" and len(segments) > 1 else (None, segments)
    if len(segments) < 4 or segments[0] != "rollout" or segments[2] != "attempt":
        raise CallFailed(
            404, f"{raw_path[:200].decode('latin-1')!r} names no attempt. {_RIGHT_FORM}", code="unknown_url"
        )
    rollout_id, attempt_id = _id(segments[1], "rollout"), _id(segments[3], "attempt")
    route = "/".join(segments[5:] if segments[4:5] == ["v1"] else segments[4:])
    model = route.removeprefix(f"{MODELS}/") if route.startswith(f"{MODELS}/") else None
    if model:
        route = MODELS
    if route not in ROUTES:
        served = ", ".join(f"{verb} {known}" for known, verb in ROUTES.items())
        raise CallFailed(
            404, f"The gateway does not serve {route!r} for an attempt; it serves {served}", code="unknown_url"
        )
    wanted = ROUTES[route]
    if method != wanted:
        raise CallFailed(405, f"{route} is served by {wanted}, not by {method}", code="method_not_allowed")
    return CallAddress(rollout_id, attempt_id, route, role, model)


def dialect_of(raw_path: bytes) -> Dialect:
    """Return the dialect of the route in a path; chat completions if there is none."""
    path = unquote_to_bytes(raw_path).decode("latin-1") + "/"
    fitting = (dialect for route, dialect in DIALECTS.items() if f"/{route}/" in path)
    return max(fitting, key=lambda dialect: len(dialect.route), default=CHAT)


def _id(segment: str, noun: str) -> str:
    if _ID.fullmatch(segment):
        return segment
    text = f"{segment[:80]!r} is no {noun} id: ids are 1 to 128 letters, digits, '-' and '_'. {_RIGHT_FORM}"
    raise CallFailed(404, text, code="unknown_url")
