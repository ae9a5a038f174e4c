"""Values that callers give, as the fields of a stored value take them: what a store keeps must be readable for ever."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter

from agentlightning.errors import BadRequestError


@cache
def _field(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    return TypeAdapter[Any](get_type_hints(model)[name])


def checked(model: type[BaseModel], changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes of some fields as `model` holds them.

    A status is left alone: the table of `lifecycle` judges it, with its own words.

    Raises:
        pydantic.ValidationError: a value does not fit its field.
    """
    return {
        name: value if name == "status" else _field(model, name).validate_python(value)
        for name, value in changes.items()
    }


def check_timeout(timeout: float | None) -> None:
    """Check how long a caller wants to wait.

    Raises:
        BadRequestError: not a number of seconds.
    """
    if timeout is not None and (isinstance(timeout, str) or math.isnan(timeout)):
        raise BadRequestError(f"timeout must be a number of seconds; got {timeout!r}")
