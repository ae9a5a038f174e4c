"""Single fields of a request, read with their type and range; what is wrong is refused by the field's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class RequestError(ValueError):
    """A request that is answered with an error in the form of the OpenAI API.

    Attributes:
        status: HTTP status.
        param: the field at fault, None if it is not one field.
        code: short word for programs.
        retry_after: seconds after which it may be tried again, None if that would not help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str = "invalid_value",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Return the error in the form of the API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def typed(fields: Mapping[str, object], name: str, kind: type[Any]) -> Any:
    """Return a field of a type; true and false are no numbers."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name!r} must be of type {kind.__name__}, not {json.dumps(value)}", param=name)
    return value


def integer(fields: Mapping[str, object], name: str, default: int, *, low: int, high: int | None = None) -> int:
    """Return a whole number in a range, both ends included."""
    value = typed(fields, name, int) if name in fields else default
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name!r} must be {wanted}, not {value}", param=name)
    return value


def number(
    fields: Mapping[str, Any], name: str, default: float, *, low: float, high: float, low_included: bool = True
) -> float:
    """Return a number in a range."""
    value = fields.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == low and not low_included):
        raise RequestError(f"{name!r} must be a number from {low} to {high}, not {json.dumps(value)}", param=name)
    return float(value)


def flag(fields: Mapping[str, object], name: str, *, default: bool = False) -> bool:
    """Return a field that is true or false; 1 and 0 stand for them too."""
    value = fields.get(name, default)
    if value not in (True, False):
        raise RequestError(f"{name!r} must be true or false, not {json.dumps(value)}", param=name)
    return bool(value)
