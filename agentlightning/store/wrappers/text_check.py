"""A class decorator that refuses texts which UTF-8 cannot encode: ids, names and values with half a surrogate pair.

No file, database or wire takes them, so that each backend would fail in its own words, or take them in and fail later.
Over HTTP they do not come in: JSON with such a half is refused as it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentlightning.errors import BadRequestError
from agentlightning.store.base import Unset
from agentlightning.store.wrappers.forward import FORWARDED, names_of_parameters, take_annotations
from agentlightning.types import EnqueueRolloutRequest

C = TypeVar("C", bound=type[Any])
_FREE = frozenset(
    ("input", "metadata", "heartbeat_stats", "spans", "span", "readable_span", "records", "tokens", "config")
)
"""Values in which such texts are noticed where they become JSON."""
_LISTS = (list, tuple, set, frozenset)
_WITHOUT_TEXT = frozenset((type(None), bool, int, float, Unset))


def refuse_broken_texts(cls: C) -> C:
    """Check what the operations of `cls` are called with."""
    take_annotations(cls)
    for name in FORWARDED:
        if name in vars(cls):
            setattr(cls, name, _checked(name, vars(cls)[name]))
    return cls


def _checked(name: str, operation: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    parameters = names_of_parameters(operation)[1:]
    has_names = not _FREE.issuperset(parameters)

    @functools.wraps(operation)
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
            return await operation(self, *args, **kwargs)
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
