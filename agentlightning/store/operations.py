"""Operations: the declaration of each one beside its signature, and classes that forward all of them.

A method of `LightningStore` (`base.py`) is the one place of an operation: its name, arguments, answer and meaning are
those of the method, and `@Operation` declares its form over HTTP and where it may run. Server, client, OpenAPI document
(`http/`), threads, runs and the completion of users' stores (`threading.py`, `wrappers.py`) are made from it.
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
    """Class of `UNSET`, the one value that means "argument not supplied"; None can then clear a field."""

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
"""`own`: a store implements it. `run`: the same, for runs, which a store may not support. `default`: the contract
builds it from other operations, a store may do it better. `short`: a short form of others, the same for every store."""


F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
C = TypeVar("C", bound=type[Any])


@explain_fields
@dataclass(eq=False)
class Operation:
    """Declares a method of the contract as an operation: `@Operation("GET /statistics", slow=True)`."""

    way: str = ""
    """HTTP method and path below the prefix; empty if a client sends it as another operation. `{name}` is an argument;
    literal segments take precedence over it."""
    also: tuple[str, ...] = ()
    """Further ways to call it, with the same arguments."""
    kind: Kind = "own"
    """The implementer of the operation, see `Kind`."""
    body: str | None = None
    """The one argument that is the whole body; None sends an object of all arguments that are not in the path."""
    wrap: str | None = None
    """Key under which the answer is wrapped in an object."""
    status: int = 200
    """The HTTP status of an answer."""
    retry: Literal["safe", "token"] = "safe"
    """The reason why a request may be repeated after its answer was lost: `safe`, it changes nothing more; `token`, the
    request carries a token and is answered again."""
    bounded: bool = False
    """Its pages have a limit; without it, one page may ask for everything."""
    slow: bool = False
    """Its work grows with the data: a try is not given up early, since the next one would start over."""
    whole: bool = False
    """Its answer contains secrets unmasked."""
    never_null: tuple[str, ...] = ()
    """Arguments that may be omitted but not be null."""
    many: str | None = None
    """Name of the bulk form of this operation."""

    def __call__(self, function: F) -> F:
        """Record the method, its name, arguments and answer."""
        self.name = function.__name__
        self.function: Callable[..., Awaitable[Any]] = function
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters)[1:]
        self.waits = "timeout" in self.parameters  # it may be held open until something happens
        self.ways = [(way.split(" ")[0], way.split(" ")[1]) for way in (self.way, *self.also) if way]
        OPERATIONS[self.name] = self
        return function


OPERATIONS: dict[str, Operation] = {}
"""Every operation, by name."""


def names_of(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the operations of these kinds; without kinds, of all but the short forms."""
    return tuple(name for name, each in OPERATIONS.items() if each.kind in (kinds or ("own", "run", "default")))


# --- classes that implement the contract ---------------------------------------------------------------------------


class Forwarding(Protocol):
    """The interface of a class decorated with `forward_operations`."""

    def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Awaitable[object]: ...


def forward_operations(cls: C) -> C:
    """Define each operation that `cls` does not define as `self._call(name, args, kwargs)`.

    A `_call` that is no coroutine function returns the awaitable of another store's operation directly.
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
    """Give the operations that `cls` defines the annotations of the contract, which are only written there.

    Its module gets the names in them, so that `typing.get_type_hints` finds the types.
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
"""Arguments whose broken texts are detected in their conversion to JSON."""
_LISTS = (list, tuple, set, frozenset)
_WITHOUT_TEXT = frozenset((type(None), bool, int, float, Unset))


def refuse_broken_texts(cls: C) -> C:
    """Check that no operation of `cls` is called with half a surrogate pair in an id, a name or a value.

    No file, database or wire accepts one; without the check, each backend would fail in its own way, or fail later.
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
            raise BadRequestError(f"{name} was given what cannot be stored: {error}") from error

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
            f"{operation}: {key}={text[:80]!a} holds half of a surrogate pair (at {error.start}); "
            "mend it, for example with text.encode('utf-8', 'replace').decode()"
        ) from None
