"""The messages between a runner and its agent's process, and the store that the process uses.

| from the runner, each pickled               | from the process, each a line of JSON               |
| ------------------------------------------- | --------------------------------------------------- |
| `Order`: run this attempt                   | `READY`, once                                       |
| `Answer`: the store's response to an `Ask`  | `Ask`: call the store                               |
|                                             | `Outcome`: the attempt is over                      |

The process trusts the runner, but the runner does not trust the process: from its data the runner creates only JSON
values, spans, a `ProgramOutput`, and exceptions of classes that the runner has loaded, without calling their
constructors. The process can use only the store's operations on spans, for the attempt that it runs.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.litagent.command.process import ProgramOutput
from agentlightning.runner.outcome import AttemptFault
from agentlightning.store.base import UNSET, LightningStore, LightningStoreCapabilities
from agentlightning.store.operations import forward_operations
from agentlightning.types import AttemptedRollout, NamedResources, Span
from agentlightning.utils.exceptions import message_of
from agentlightning.utils.rewards import as_number

READY = "ready"
MOST_BYTES = 1 << 28
"""Maximum bytes that a process may send for one attempt."""
MOST_TEXT = 1 << 16
"""Maximum characters of an exception that are sent; of a traceback, the last ones are sent."""
OPERATIONS = (
    "add_span",
    "add_many_spans",
    "get_next_span_sequence_id",
    "get_many_span_sequence_ids",
    "query_spans",
    "query_span_outlines",
    "get_span",
    "get_rollout_by_id",
    "get_latest_attempt",
)
"""Operations of the store that a process may call, for its own attempt."""
Carry = Callable[[str, tuple[object, ...], dict[str, object]], Awaitable[object]]
"""Sends an operation with its arguments to the runner, and returns the response of the runner's store."""
_SCALARS = (str, int, float, bool, type(None))


class AgentRaised(AttemptFault):
    """The agent raised an exception that cannot be sent to the runner; the message names it."""


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt to run."""

    rollout: AttemptedRollout
    resources: NamedResources


@dataclass(frozen=True, slots=True)
class Answer:
    """The result or exception of a store operation."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One operation of the store, with its arguments as JSON by name."""

    number: int
    operation: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, number: int, operation: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Ask:
        """Return the message for a call.

        Raises:
            BadRequestError: an agent in a separate process has no such operation.
        """
        _check_operation(operation)
        bound = inspect.signature(getattr(LightningStore, operation)).bind(None, *args, **kwargs).arguments
        parameters = {name: value for name, value in bound.items() if name != "self" and value is not UNSET}
        return cls(number, operation, to_jsonable_python(parameters))

    def read(self, rollout: AttemptedRollout) -> dict[str, Any]:
        """Return the arguments, checked to concern only this attempt.

        Raises:
            BadRequestError: agents may not call the operation, or it concerns another rollout or attempt.
            pydantic.ValidationError: an argument has the wrong shape.
        """
        _check_operation(self.operation)
        types = _types_of(self.operation)
        if unknown := self.arguments.keys() - types.keys():
            raise BadRequestError(f"{self.operation} has no argument {', '.join(sorted(unknown))}")
        arguments: dict[str, Any] = {name: types[name].validate_python(value) for name, value in self.arguments.items()}
        own = (rollout.rollout_id, rollout.attempt.attempt_id)
        if "attempt_id" in types and arguments.get("attempt_id") in (None, "latest"):
            arguments["attempt_id"] = own[1]
        spans: list[Span] = [arguments["span"]] if "span" in arguments else list(arguments.get("spans", ()))
        named: list[Any] = [(span.rollout_id, span.attempt_id) for span in spans]
        named += arguments.get("rollout_attempt_ids", ())
        if "rollout_id" in types:
            named.append((arguments.get("rollout_id"), arguments.get("attempt_id", own[1])))
        for other in named:
            if other != own:
                raise BadRequestError(
                    f"{self.operation} refers to rollout {other[0]!r}, attempt {other[1]!r}; with isolation='process' "
                    f"an agent can use the store only for its own attempt, {own[0]!r}, {own[1]!r}"
                )
        return arguments


def _check_operation(operation: str) -> None:
    if operation not in OPERATIONS:
        raise BadRequestError(
            f"{operation} is not available to an agent with isolation='process'. Available for its own attempt: "
            f"{', '.join(OPERATIONS)}"
        )


@cache
def _types_of(operation: str) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(getattr(LightningStore, operation), include_extras=True)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name != "return"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The agent's result or exception, with the traceback as text, because a sent exception has none."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


@forward_operations
class PipeStore(LightningStore):
    """The runner's store inside a process that it started; used by that process's event loop."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return {"async_safe": True}

    @override
    async def add_otel_span(self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: Any = None) -> Any:
        number = -1 if sequence_id is None else sequence_id
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, number)
        return await self.add_span(span) or span

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return await self._carry(operation, args, kwargs)


# --- as lines --------------------------------------------------------------------------------------------------------


def line_of(message: str | Ask | Outcome) -> bytes:
    """Return a message as a line of JSON.

    Raises:
        TypeError: the value of the outcome cannot be sent; names the part.
    """
    if isinstance(message, Ask):
        content: object = asdict(message)
    elif isinstance(message, Outcome):
        error = None if message.error is None else _error_fields(message.error)
        content = {"value": _sent(message.value), "error": error, "traceback": message.traceback[-MOST_TEXT:]}
    else:
        content = message
    return json.dumps(content).encode() + b"\n"


def read_line(line: bytes) -> str | Ask | Outcome:
    """Return the message that a process has sent.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: it sent an invalid message.
    """
    message = json.loads(line)
    if isinstance(message, str):
        return message
    if "operation" in message:
        return _ASK.validate_python(message)
    error = None if message["error"] is None else _raised(**_ERROR.validate_python(message["error"]))
    return Outcome(_received(message["value"]), error, str(message["traceback"])[-MOST_TEXT:])


_ASK = TypeAdapter(Ask)
_SPANS = TypeAdapter(list[Span])
_PROGRAM = TypeAdapter(ProgramOutput)


def _sent(value: Any) -> list[Any]:
    """Return an agent's result as its kind and JSON."""
    if isinstance(value, ProgramOutput):
        return ["program", asdict(value)]
    if isinstance(value, list) and value and all(isinstance(item, Span) for item in cast("list[object]", value)):
        return ["spans", to_jsonable_python(value)]
    return ["json", _tagged(value)]


def _received(tagged: list[Any]) -> Any:
    kind, value = tagged
    if kind == "program":
        return _PROGRAM.validate_python(value)
    return _SPANS.validate_python(value) if kind == "spans" else _untagged(value)


def _tagged(value: Any) -> Any:
    """Return JSON in which each list begins with its kind, because JSON has no tuples."""
    kind = cast("type[object]", type(value))
    if kind in _SCALARS:
        return value
    if kind is list or kind is tuple:
        return [kind.__name__, *map(_tagged, value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value)):
        return {str.__str__(key): _tagged(item) for key, item in cast("Mapping[str, Any]", value).items()}
    number = as_number(cast("object", value))
    if number is None:
        raise TypeError(
            f"{kind.__name__} is not supported; supported are None, numbers, strings, spans, triplets, and "
            "lists, tuples and dictionaries (with string keys) of these"
        )
    return number


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untagged(item) for key, item in cast("dict[str, Any]", value).items()}
    if not isinstance(value, list):
        return value
    kind, *items = map(_untagged, cast("list[Any]", value))
    return tuple(items) if kind == "tuple" else items


# --- exceptions ------------------------------------------------------------------------------------------------------

_ERROR = TypeAdapter(dict[str, Any])


def _error_fields(error: BaseException) -> dict[str, Any]:
    """Return the class of an exception by name, with its arguments and attributes that are JSON."""
    cls = type(error)
    message = message_of(error)[:MOST_TEXT]
    reduced: Any = error.__reduce__()  # the arguments of an OSError differ from its `args`
    args = [*reduced[1]] if all(map(_short, reduced[1])) else [message]
    state = {name: value for name, value in vars(error).items() if _short(value)}
    return {"module": cls.__module__, "name": cls.__qualname__, "message": message, "args": args, "state": state}


def _short(value: object) -> bool:
    return type(value) in _SCALARS and not (isinstance(value, str) and len(value) > MOST_TEXT)


def _raised(*, module: str, name: str, message: str, args: list[Any], state: dict[str, Any]) -> BaseException:
    """Return the exception, in its class if this process has loaded that, else one that names the class."""
    try:
        cls: Any = sys.modules[module]
        for part in name.split("."):
            cls = cast("Any", vars(cls)[part])  # `vars`: no attribute that is computed on access
        if issubclass(cls, (Exception, SystemExit)):  # others would stop the runner
            for arguments in (args, [message]):
                error = _made(cls, arguments)
                vars(error).update(state)
                if message_of(error)[:MOST_TEXT] == message:
                    return error
    except Exception:  # not loaded, not an exception class, or a class that cannot be made this way
        pass
    return AgentRaised(f"{name}: {message}")


def _made(cls: type[BaseException], args: list[Any]) -> BaseException:
    builtin: Any = cls
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: BaseException = builtin.__new__(cls, *args)
    builtin.__init__(error, *args)
    return error
