"""Checks of what callers give: what a store keeps must be readable for ever."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.errors import BadRequestError
from agentlightning.store.base import UNSET

_MOST_NAMES = 100_000


def given(**arguments: object) -> dict[str, Any]:
    """Return the arguments that were supplied."""
    return {name: value for name, value in arguments.items() if value is not UNSET}


def check_limit(limit: int) -> int:
    """Return a claim's limit, at most 1000.

    Raises:
        BadRequestError: `limit` is no integer.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise BadRequestError(f"limit must be an integer; got {limit!r}")
    return min(limit, 1000)


def check_names(attempts: Sequence[str]) -> frozenset[str]:
    """Return the attempts that a heartbeat names.

    Raises:
        BadRequestError: they are no list of ids, or more than a worker can have in hand.
    """
    if isinstance(attempts, str) or not all(isinstance(attempt_id, str) for attempt_id in attempts):
        raise BadRequestError("attempts must be a list of attempt ids")
    if len(attempts) > _MOST_NAMES:
        raise BadRequestError(f"a heartbeat names at most {_MOST_NAMES} attempts; got {len(attempts)}")
    return frozenset(attempts)


def check_timeout(timeout: float | None) -> None:
    """Check how long a caller wants to wait.

    Raises:
        BadRequestError: not a number of seconds.
    """
    if timeout is not None and (isinstance(timeout, str) or math.isnan(timeout)):
        raise BadRequestError(f"timeout must be a number of seconds; got {timeout!r}")


def checked(model: type[BaseModel], changes: dict[str, object]) -> dict[str, Any]:
    """Return changes of some fields as `model` holds them.

    A status is left alone: the table of `lifecycle` judges it, with its own words.

    Raises:
        BadRequestError: a value does not fit its field.
    """
    if changes.keys() <= {"status"}:
        return changes
    with valid(model.__name__):
        return {
            name: value if name == "status" else _field(model, name).validate_python(value)
            for name, value in changes.items()
        }


@contextlib.contextmanager
def valid(what: str) -> Generator[None]:
    """Tell of a wrong value as every store does, in process and over HTTP.

    Raises:
        BadRequestError: a value does not have the shape of its field; names both.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or what
        got = repr(first["input"])
        raise BadRequestError(
            f"{place} of {what} has a wrong value: {first['msg'][:300]}; got {got[:100]} ({error.error_count()} in all)"
        ) from error


@cache
def _field(model: type[BaseModel], name: str) -> TypeAdapter[object]:
    return TypeAdapter[object](get_type_hints(model)[name])
