"""Operations: what each one declares beside its signature, and the classes that send all of them one way.

A method of `LightningStore` (`base.py`) is the one place of an operation: its name, arguments, answer and meaning are
those of the method, and `@operation` says how it travels over HTTP and where it may run. Server, client, OpenAPI
document (`http/`), threads, runs and the completion of users' stores (`threading.py`, `wrappers.py`) are read from it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentlightning.errors import BadRequestError
from agentlightning.field_help import explain_fields
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

Method = Literal["GET", "POST", "PUT"]
Kind = Literal["own", "run", "default", "short"]
"""`own`: a store implements it. `run`: the same, of runs, which a store may lack as a whole. `default`: the contract
makes it of other operations, a store may do it better. `short`: a short form of others, the same for every store."""


@explain_fields
@dataclass(frozen=True)
class Operation:
    """One operation as its method declares it."""

    name: str
    """Name of the method of `LightningStore`."""
    kind: Kind
    """Who implements it."""
    ways: tuple[tuple[Method, str], ...]
    """HTTP method and path below the prefix of a request, then further ways to call it, with the same arguments; none
    for one that a client sends as another operation. `{name}` is an argument, literal segments win over it."""
    body: str | None
    """The one argument that is the whole body; None sends an object of all arguments that are not in the path."""
    wrap: str | None
    """Key under which the answer is wrapped in an object."""
    status: int
    """The HTTP status of an answer."""
    retry: Literal["safe", "token"]
    """What makes it safe to repeat a request whose answer was lost: `safe`, it changes nothing more; `token`, the
    request carries one and is answered again."""
    bounded: bool
    """Its pages have a limit of their own; those of others may ask for all there is."""
    slow: bool
    """Its work grows with the data: a try is not given up early, for the next one would begin anew."""
    whole: bool
    """Its answer keeps the secrets in it."""
    never_null: tuple[str, ...]
    """Arguments that may be left out and not be null."""
    many: str | None
    """The form for many of an operation for one."""
    signature: inspect.Signature
    """Arguments and answer."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(self.signature.parameters)[1:]

    @property
    def waits(self) -> bool:
        """It may be held open until something happens."""
        return "timeout" in self.parameters


OPERATIONS: dict[str, Operation] = {}
"""Every operation, by name."""
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])


def operation(
    *ways: str,
    kind: Kind = "own",
    body: str | None = None,
    wrap: str | None = None,
    status: int = 200,
    retry: Literal["safe", "token"] = "safe",
    bounded: bool = False,
    slow: bool = False,
    whole: bool = False,
    never_null: tuple[str, ...] = (),
    many: str | None = None,
) -> Callable[[F], F]:
    """Declare a method of the contract as an operation, such as `"GET /statistics"`; see the fields of `Operation`."""

    def declare(function: F) -> F:
        name = function.__name__
        pairs = cast("tuple[tuple[Method, str], ...]", tuple(tuple(way.split(" ")) for way in ways))
        signature = inspect.signature(function)
        OPERATIONS[name] = Operation(
            name, kind, pairs, body, wrap, status, retry, bounded, slow, whole, never_null, many, signature
        )
        _contract[name] = function
        return function

    return declare


_contract: dict[str, Callable[..., Any]] = {}


def names_of(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the operations of these kinds; without any of all that a store implements or is given."""
    return tuple(name for name, each in OPERATIONS.items() if each.kind in (kinds or ("own", "run", "default")))


# --- classes that implement the contract ---------------------------------------------------------------------------


class Forwarding(Protocol):
    """What a class decorated with `forward_operations` offers."""

    def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Awaitable[object]: ...


def forward_operations(cls: C) -> C:
    """Fill in each operation that `cls` does not define: it becomes `self._call(name, args, kwargs)`.

    A `_call` that is no coroutine function returns what the operation of another store does, without a step between.
    """
    _take_annotations(cls)
    forwarder = _forwarder if inspect.iscoroutinefunction(cls._call) else _step_less_forwarder
    for name in names_of():
        if name not in vars(cls):
            setattr(cls, name, forwarder(name))
    return cls


def _forwarder(name: str) -> Callable[..., Awaitable[object]]:
    @functools.wraps(_contract[name])
    async def forward(self: Forwarding, *args: object, **kwargs: object) -> object:
        return await self._call(name, args, kwargs)

    return forward


def _step_less_forwarder(name: str) -> Callable[..., Awaitable[object]]:
    @functools.wraps(_contract[name])
    def forward(self: Forwarding, *args: object, **kwargs: object) -> Awaitable[object]:
        return self._call(name, args, kwargs)

    return forward


def _take_annotations(cls: type[object]) -> None:
    """Give the operations that `cls` defines the annotations of the contract, where alone they are written.

    Its module gets the names that they use, by which `typing.get_type_hints` finds the types.
    """
    module = vars(sys.modules[cls.__module__])
    for name, function in _contract.items():
        if name in vars(cls):
            vars(cls)[name].__annotations__ = dict(function.__annotations__)
            for used, value in function.__globals__.items():
                if not used.startswith("_"):
                    module.setdefault(used, value)


def names_of_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Return what `inspect.signature` does of a function, wrapped or not, at a hundredth of its time."""
    code: CodeType = inspect.unwrap(function).__code__  # of an operation that is forwarded, that of the contract
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# --- texts that UTF-8 cannot encode --------------------------------------------------------------------------------

_FREE = frozenset(
    ("input", "metadata", "heartbeat_stats", "spans", "span", "readable_span", "records", "tokens", "config")
)
"""Values in which such texts are noticed where they become JSON."""
_LISTS = (list, tuple, set, frozenset)
_WITHOUT_TEXT = frozenset((type(None), bool, int, float, Unset))


def refuse_broken_texts(cls: C) -> C:
    """Check that no operation of `cls` is called with half a surrogate pair in an id, a name or a value.

    No file, database or wire takes one, so that each backend would fail in its own words, or take it in and fail later.
    """
    _take_annotations(cls)
    for name in names_of():
        if name in vars(cls):
            setattr(cls, name, _checked(name, vars(cls)[name]))
    return cls


def _checked(name: str, function: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    parameters = names_of_parameters(function)[1:]
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
