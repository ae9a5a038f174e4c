"""Makes exceptions of users' code safe to handle: their classes may raise when an attribute is read."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

_NAME: Any = type.__dict__["__name__"]
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]


class UnreadableException(RuntimeError):
    """Replaces an exception that raises when it is inspected; has its class name and traceback."""


def readable(error: BaseException) -> BaseException:
    """Return an exception that can be classified, described and logged: itself, or a replacement.

    Inspects its class, attributes, causes and group, as every handler does. A `__str__` that raises does not matter:
    `traceback` and `message_of` handle it.
    """
    try:
        cls = type(error)
        if not (isinstance(error, BaseException) and all(issubclass(each, object) for each in cls.__mro__)):
            raise TypeError("the class of the exception is inconsistent")
        if not isinstance(error.__traceback__, (TracebackType, type(None))):
            raise TypeError("the __traceback__ is not a traceback")
        hash(cls)
        f"{cls.__module__}.{cls.__qualname__}".encode("utf-8", "replace")
        traceback.format_exception(cls, error, error.__traceback__)
    except BaseException as failure:  # the user's class answers for itself, whatever it raises
        text = f"{_name(error)}: this exception cannot be read because reading it raises {_name(failure)}"
        return UnreadableException(text).with_traceback(_TRACEBACK.__get__(error))
    return error


def message_of(error: BaseException) -> str:
    """Return the text of an exception, also if its `__str__` raises."""
    try:
        return str(error)
    except Exception:  # a broken __str__ of the user's
        return "(its message cannot be read)"


def _name(error: BaseException) -> str:
    return _NAME.__get__(type(error))
