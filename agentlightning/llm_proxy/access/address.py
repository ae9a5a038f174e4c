"""Reads the attempt and the route from a request's URL, and the client's span from its header."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import dropwhile
from urllib.parse import unquote_to_bytes

from agentlightning.llm_proxy.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.utils.http.auth import Scope

MODELS = "models"
RESPONSE = f"{RESPONSES.route}/<id>"
ROUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(DIALECTS, ("POST",)),
    **{f"{MESSAGES.route}/count_tokens": ("POST",), f"{RESPONSES.route}/input_tokens": ("POST",)},
    RESPONSE: ("GET", "DELETE"),
    f"{RESPONSE}/input_items": ("GET",),
    f"{RESPONSE}/cancel": ("POST",),
    MODELS: ("GET",),
}
"""Routes below an attempt's URL, with or without `v1/` before them, and the methods of each."""

_PLAIN = [route for route in ROUTES if not route.startswith(RESPONSE)]
"""Routes that contain no name; in the others `<id>` is a placeholder for a name."""
_LONGEST_ROUTE = max(route.count("/") for route in ROUTES) + 1
"""Number of segments."""
_PREFIXES = ("v1", "openai", "anthropic")
"""Segments that a URL may have before a route."""
_GEMINI = re.compile(
    r"(?:.*/)?models/.+:(?:generateContent|streamGenerateContent|countTokens|embedContent|batchEmbedContents)"
)
"""Routes of Gemini's API, which is not served."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_RIGHT_FORM = (
    "The base URL of an agent is http://<host>:<port>/rollout/<rollout_id>/attempt/<attempt_id> "
    "(optionally with /v1 at the end, or with /role/<role> in front). LLM.get_base_url() and LLMProxy.as_resource() "
    "return it"
)


@dataclass(frozen=True, slots=True)
class CallAddress:
    """One route of one attempt."""

    rollout_id: str
    attempt_id: str
    route: str
    role: str | None = None
    """The agent of the attempt that makes the call, if the URL names one."""
    named: str | None = None
    """The model or the response that the request is about."""
    model: str | None = None
    """The model to call, if the URL names it, as URLs of Azure's API do."""


def parse_address(raw_path: bytes, method: str, default: tuple[str, str] | None = None) -> CallAddress:
    """Parse `[/role/<role>]/rollout/R/attempt/A[/v1]/<route>`; a name may follow `models` and `responses`.

    Each segment is percent-decoded separately. Extra slashes are ignored, and so are the prefixes that clients of
    vendors' servers add: `v1` any number of times, `openai`, `anthropic`, and Azure's `openai/deployments/<model>`.
    A path without an attempt belongs to `default` (rollout id, attempt id); None refuses it.

    Raises:
        CallFailed: 404 with the correct form, or with an alternative to Gemini's API; 405 with the correct method.
    """
    segments = [unquote_to_bytes(part).decode("utf-8", "replace") for part in raw_path.split(b"/") if part]
    role = None
    if len(segments) > 1 and segments[0] == "role":
        role, segments = segments[1], segments[2:]
    if default is not None and segments[:1] != ["rollout"]:
        segments = ["rollout", default[0], "attempt", default[1], *segments]
    if len(segments) < 4 or segments[0] != "rollout" or segments[2] != "attempt":
        raise CallFailed(
            404, f"{raw_path[:200].decode('latin-1')!r} does not name an attempt. {_RIGHT_FORM}", code="unknown_url"
        )
    rollout_id, attempt_id = _id(segments[1], "rollout"), _id(segments[3], "attempt")
    if _GEMINI.fullmatch("/".join(segments[4:])):
        text = (
            f"{'/'.join(segments[4:])[:200]!r} is a route of Gemini's API, which this gateway does not serve. "
            "Configure the agent to use OpenAI's chat completions or responses API, or Anthropic's messages API, with "
            "the attempt's URL as its base URL"
        )
        raise CallFailed(404, text, code="unsupported_api")
    rest = list(dropwhile(_PREFIXES.__contains__, segments[4:]))
    model, rest = _deployment(rest) if rest[:1] == ["deployments"] else (None, rest)
    route, resource = _route("/".join(rest))
    if route not in ROUTES:
        served = ", ".join(f"{verb} {pattern}" for pattern, verbs in ROUTES.items() for verb in verbs)
        raise CallFailed(
            404,
            f"The gateway does not serve {route[:200]!r}. Available routes: {served}",
            code="unknown_url",
        )
    if method not in ROUTES[route]:
        methods = " or ".join(ROUTES[route])
        raise CallFailed(405, f"{route} does not support {method}; use {methods}", code="method_not_allowed")
    return CallAddress(rollout_id, attempt_id, route, role, resource, model)


def _deployment(rest: list[str]) -> tuple[str | None, list[str]]:
    """Return the model in `deployments/<model>/<route>` and the rest of the path. The name may contain slashes."""
    for place in range(max(2, len(rest) - _LONGEST_ROUTE), len(rest)):
        if "/".join(rest[place:]) in ROUTES:
            return "/".join(rest[1:place]), rest[place:]
    return None, rest


def _route(path: str) -> tuple[str, str | None]:
    """Return the route of a path, and the model or response that is named in it."""
    if path.startswith(f"{MODELS}/") and path != f"{MODELS}/":
        return MODELS, path.removeprefix(f"{MODELS}/")
    if path.startswith(f"{RESPONSES.route}/") and path not in _PLAIN:
        name, slash, rest = path.removeprefix(f"{RESPONSES.route}/").partition("/")
        if (route := f"{RESPONSE}{slash}{rest}") in ROUTES and name:
            return route, name
    return path, None


def dialect_of(raw_path: bytes) -> Dialect:
    """Return the dialect of the route in a path; chat completions for an unknown route."""
    path = re.sub("/+", "/", unquote_to_bytes(raw_path).decode("latin-1") + "/")
    fitting = (dialect for route, dialect in DIALECTS.items() if f"/{route}/" in path)
    return max(fitting, key=lambda dialect: len(dialect.route), default=CHAT)


def client_span(scope: Scope) -> str | None:
    """Return the ids of trace and span in the header `traceparent` (W3C Trace Context); None without a valid one."""
    headers = [value for name, value in scope["headers"] if name == b"traceparent"]
    valid = _TRACEPARENT.fullmatch(headers[0].strip()) if len(headers) == 1 else None
    return None if valid is None else valid[1].decode()


def _id(segment: str, noun: str) -> str:
    if _ID.fullmatch(segment):
        return segment
    text = f"{segment[:80]!r} is not a valid {noun} id: an id has 1 to 128 letters, digits, '-' or '_'. {_RIGHT_FORM}"
    raise CallFailed(404, text, code="unknown_url")
