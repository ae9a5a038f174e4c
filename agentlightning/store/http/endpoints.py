"""HTTP endpoints of the operations: read the arguments from a request, call the store, write the response."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

from pydantic import BaseModel

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore, RequestToken, request_token
from agentlightning.store.http.operations import (
    NO_NAME,
    OPERATIONS,
    POLL_SECONDS,
    PREFIX,
    Arguments,
    WireOperation,
)
from agentlightning.store.http.redaction import hidden
from agentlightning.store.http.span_changes import CHANGES, StoredSpans
from agentlightning.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout, Span, Worker
from agentlightning.utils.http.dispatch import Endpoint, Request
from agentlightning.utils.version import VERSION

_LONGEST_ID = 512
_LARGEST_INTEGER = 2**53
"""Largest integer that every JSON parser reads exactly."""
_READ_TWICE_BYTES = 1 << 20
"""Largest body that is checked for unknown arguments. A larger body contains spans or tasks."""
_MOST_RECORDS = 100_000
"""Largest number of records of a run in one response."""
_FREE = frozenset(("input", "metadata", "heartbeat_stats", "resources", "tokens"))
"""Arguments with free-form values of users."""
_CHANGES = CHANGES.encode()
_PLAIN_MODELS = frozenset((AttemptedRollout, Rollout, Attempt, Worker))
"""Models without fields of several classes. Their own serializer is the fastest."""


def operation_endpoints(store: Callable[[], LightningStore]) -> list[Endpoint]:
    """Return all endpoints of all operations. `store` is called once per request."""
    return [
        _endpoint(store, operation, method, path)
        for operation in OPERATIONS.values()
        for method, path in operation.declared.ways
    ]


def _endpoint(store: Callable[[], LightningStore], operation: WireOperation, method: str, path: str) -> Endpoint:
    name = operation.name
    waits = operation.declared.waits
    wait: float | None = operation.signature.parameters["timeout"].default if waits else None

    def read(request: Request) -> Arguments:
        if method == "GET":
            arguments = operation.read_query(request.query) if operation.in_body else {}
        else:
            arguments = operation.read_body(request.body)
            if operation.in_query:
                arguments.update(operation.read_query(request.query))
        if request.version is not None and request.version != VERSION:
            _check_known(operation, method, request)
        arguments.update(request.path)
        if request.path.get("run_id") == NO_NAME:
            arguments["run_id"] = ""
        if name == "query_run_records" and arguments.get("limit", -1) == -1:
            arguments["limit"] = _MOST_RECORDS  # so that the page ends where its bytes do
        _check(arguments, request.token)
        if waits:
            timeout = arguments.get("timeout", wait)
            arguments["timeout"] = POLL_SECONDS if timeout is None else max(0.0, min(POLL_SECONDS, timeout))
        return arguments

    def call(request: Request, arguments: Arguments) -> Awaitable[Any]:
        if request.token:
            request_token.set(RequestToken(request.token))
        if request.answer == _CHANGES and name in ("add_many_spans", "add_span"):
            return _store_spans(getattr(store(), name), arguments)
        return getattr(store(), name)(**arguments)

    def encode(value: object) -> bytes:
        if value.__class__ is StoredSpans:
            return cast("StoredSpans", value).to_json()
        if not operation.declared.whole:
            value = hidden(value)
        if value.__class__ in _PLAIN_MODELS:
            return cast("BaseModel", value).__pydantic_serializer__.to_json(value)
        return operation.write_answer(value)

    may_wait: Callable[[Arguments], bool] | None = (lambda arguments: arguments["timeout"] > 0) if waits else None
    return Endpoint(method, PREFIX + path, read, call, encode, operation.declared.status, may_wait)


async def _store_spans(operation: Callable[..., Awaitable[Any]], arguments: Arguments) -> StoredSpans:
    answer = await operation(**arguments)
    if "span" in arguments:
        return StoredSpans([arguments["span"]], [] if answer is None else [answer])
    return StoredSpans(arguments["spans"], answer)


def _check_known(operation: WireOperation, method: str, request: Request) -> None:
    """Check that this version knows all arguments. The client of this package sends only the arguments of the caller.

    Raises:
        BadRequestError: an argument is unknown; the message has the operation and both versions.
    """
    names = {name for name, _ in request.query}
    if method != "GET" and operation.declared.body is None and 0 < len(request.body) <= _READ_TWICE_BYTES:
        names.update(cast("dict[str, object]", json.loads(request.body)))
    unknown = sorted(names.difference(operation.parameters, operation.in_filter))
    if unknown:
        raise BadRequestError(
            f"{operation.name} of this server (agentlightning {VERSION}; the client is {(request.version or '')[:50]}) "
            f"has no argument {', '.join(map(repr, unknown))}. Upgrade the server, or omit the argument."
        )


def _check(arguments: Arguments, token: str | None) -> None:
    """Check for values that no store accepts: overlong ids, and numbers that are too large or not finite.

    Raises:
        BadRequestError: an argument is wrong; the message has its name.
    """
    if token is not None and len(token) > _LONGEST_ID:
        raise BadRequestError(f"Idempotency-Key has {len(token)} characters; at most {_LONGEST_ID} are allowed")
    for name, value in arguments.items():
        kind: type[object] = value.__class__
        if kind is str:
            if len(value) > _LONGEST_ID:
                _check_id(name, value)
        elif name in _FREE:
            pass
        elif kind is int:
            _check_integer(name, value)
        elif kind is float:
            if not math.isfinite(value):
                raise BadRequestError(f"{name} is {value}; expected a finite number")
        elif kind is list:
            for item in cast("list[Any]", value):
                if item.__class__ is not Span or item.sequence_id.__class__ is not int or item.sequence_id >> 53:
                    _check_item(item)
        else:
            _check_item(value)


def _check_item(item: object) -> None:
    if isinstance(item, EnqueueRolloutRequest):
        _check_id("run_id", item.run_id or "")
        _check_id("resources_id", item.resources_id or "")
    elif isinstance(item, Span):
        _check_integer("sequence_id", item.sequence_id)


def _check_id(name: str, value: str) -> None:
    if len(value) > _LONGEST_ID and name.endswith("_id"):
        raise BadRequestError(f"{name} has {len(value)} characters; at most {_LONGEST_ID} are allowed")


def _check_integer(name: str, value: int) -> None:
    if not -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER:
        raise BadRequestError(f"{name} is out of range; expected an integer of at most 53 bits")
