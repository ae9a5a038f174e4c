"""The declaration of operations next to their signatures, and classes that forward all operations.

An operation is defined only by a method of `LightningStore` (`base.py`): its name, arguments, result and documentation.
`@Operation` declares its form over HTTP and where it can run. Server, client, OpenAPI document (`http/`), threads, runs
and the wrappers of users' stores (`threading.py`, `wrappers.py`) are generated from it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import BadRequestError
from agentlightning.types import EnqueueRolloutRequest


class Unset:
    """Class of `UNSET`, the value of an argument that is not supplied, so that None can clear a field."""

    _only: Unset | None = None

    def __new__(cls) -> Unset:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"

    def __copy__(self) -> Unset:
        return self

    def __deepcopy__(self, memo: Any) -> Unset:
        return self


UNSET: Final = Unset()

Kind = Literal["own", "run", "default", "short"]
"""`own`: each store implements it. `run`: same as `own`, but a store may not support runs. `default`: the contract
implements it with other operations, and a store can override it. `short`: a shortcut, the same for all stores."""


F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
C = TypeVar("C", bound=type[Any])


@explain_fields
@dataclass(eq=False)
class Operation:
    """Declare a method of the contract as an operation: `@Operation("GET /statistics", slow=True)`."""

    way: str = ""
    """HTTP method and path below the prefix; empty if a client sends it as another operation. `{name}` is an argument.
    Literal segments take precedence over it."""
    also: tuple[str, ...] = ()
    """Other methods and paths with the same arguments."""
    kind: Kind = "own"
    """Where the operation is implemented, see `Kind`."""
    body: str | None = None
    """The argument that is the complete body; None sends an object of all arguments that are not in the path."""
    wrap: str | None = None
    """Key of the result in a JSON object; empty if the result is the complete body."""
    status: int = 200
    """HTTP status of a successful response."""
    retry: Literal["safe", "token"] = "safe"
    """Why a request can be retried after its response was lost. `safe`: it changes nothing more. `token`: it carries a
    token and returns the first result."""
    bounded: bool = False
    """True if its pages have a largest limit; otherwise one page can contain all items."""
    slow: bool = False
    """True if its work grows with the data. A try gets the full timeout, because the next try would start again."""
    whole: bool = False
    """True if its response is not redacted."""
    never_null: tuple[str, ...] = ()
    """Arguments that can be omitted but not be null."""
    many: str | None = None
    """Name of the bulk form of this operation."""

    def __call__(self, function: F) -> F:
        """Record the method, its name, arguments and result."""
        self.name = function.__name__
        self.function: Callable[..., Awaitable[Any]] = function
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters)[1:]
        self.waits = "timeout" in self.parameters  # it may be held open until something happens
        self.ways = [(way.split(" ")[0], way.split(" ")[1]) for way in (self.way, *self.also) if way]
        OPERATIONS[self.name] = self
        return function


OPERATIONS: dict[str, Operation] = {}
"""All operations by name."""


def names_of(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the operations of these kinds; without kinds, of all kinds but `short`."""
    return tuple(name for name, each in OPERATIONS.items() if each.kind in (kinds or ("own", "run", "default")))


# --- classes that implement the contract ---------------------------------------------------------------------------


class Forwarding(Protocol):
    """The interface of a class decorated with `forward_operations`."""

    def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Awaitable[object]: ...


def forward_operations(cls: C) -> C:
    """Define each operation that `cls` does not define as `self._call(name, args, kwargs)`.

    A `_call` that is not a coroutine function returns the awaitable of another store's operation directly.
    """
    _take_annotations(cls)
    forwarder = _forwarder if inspect.iscoroutinefunction(cls._call) else _direct_forwarder
    for name in names_of():
        if name not in vars(cls):
            setattr(cls, name, forwarder(name))
    return cls


def _forwarder(name: str) -> Callable[..., Awaitable[object]]:
    @functools.wraps(OPERATIONS[name].function)
    async def forward(self: Forwarding, *args: object, **kwargs: object) -> object:
        return await self._call(name, args, kwargs)

    return forward


def _direct_forwarder(name: str) -> Callable[..., Awaitable[object]]:
    @functools.wraps(OPERATIONS[name].function)
    def forward(self: Forwarding, *args: object, **kwargs: object) -> Awaitable[object]:
        return self._call(name, args, kwargs)

    return forward


def _take_annotations(cls: type[object]) -> None:
    """Copy the annotations of the contract to the operations that `cls` defines without annotations.

    The names in them are added to its module, so that `typing.get_type_hints` finds the types.
    """
    module = vars(sys.modules[cls.__module__])
    for name, each in OPERATIONS.items():
        if name in vars(cls):
            vars(cls)[name].__annotations__ = dict(each.function.__annotations__)
            for used, value in each.function.__globals__.items():
                if not used.startswith("_"):
                    module.setdefault(used, value)


# --- texts that UTF-8 cannot encode --------------------------------------------------------------------------------

_FREE = frozenset(
    ("input", "metadata", "heartbeat_stats", "spans", "span", "readable_span", "records", "tokens", "config")
)
"""Arguments with values that are checked later, in the conversion to JSON."""
_LISTS = (list, tuple, set, frozenset)
_WITHOUT_TEXT = frozenset((type(None), bool, int, float, Unset))


def refuse_broken_texts(cls: C) -> C:
    """Check the calls of all operations of `cls` for half a surrogate pair in an id, a name or a value.

    It cannot be stored in a file or database or sent. Without the check, each backend would fail differently or later.
    """
    _take_annotations(cls)
    for name in names_of():
        if name in vars(cls):
            setattr(cls, name, _checked(name, vars(cls)[name]))
    return cls


def _checked(name: str, function: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    parameters = OPERATIONS[name].parameters
    has_names = not _FREE.issuperset(parameters)

    @functools.wraps(function)
    async def checked(self: object, *args: Any, **kwargs: Any) -> object:
        try:
            if has_names:
                for key, value in kwargs.items():
                    if value.__class__ not in _WITHOUT_TEXT and key not in _FREE:
                        _check(name, key, value)
                if args:
                    for key, value in zip(parameters, args, strict=False):
                        if value.__class__ not in _WITHOUT_TEXT and key not in _FREE:
                            _check(name, key, value)
            return await function(self, *args, **kwargs)
        except (UnicodeEncodeError, PydanticSerializationError) as error:
            raise BadRequestError(f"{name} got a value that cannot be stored: {error}") from error

    return checked


def _check(operation: str, key: str, value: Any) -> None:
    if value.__class__ is str:
        if not value.isascii():
            _check_text(operation, key, value)
    elif isinstance(value, _LISTS):
        for item in cast("Iterable[Any]", value):
            if item.__class__ is str:
                if not item.isascii():
                    _check_text(operation, key, item)
            elif item.__class__ is EnqueueRolloutRequest:
                _check(operation, "run_id", item.run_id)
                _check(operation, "resources_id", item.resources_id)
    elif isinstance(value, Mapping):
        for field, item in cast("Mapping[object, object]", value).items():
            _check(operation, key, field)
            if isinstance(item, BaseModel):
                item.__pydantic_serializer__.to_json(item)
    elif isinstance(value, BaseModel):
        value.__pydantic_serializer__.to_json(value)


def _check_text(operation: str, key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"{operation}: {key}={text[:80]!a} contains half of a surrogate pair (at {error.start}); "
            "replace it, for example with text.encode('utf-8', 'replace').decode()"
        ) from None
