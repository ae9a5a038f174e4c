"""Read a bool, an integer or a string from the environment. Knows no variable of ours by name."""

from __future__ import annotations

import os
from enum import Enum
from typing import TypeVar, overload

T = TypeVar("T")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _name(env_var: object) -> str:
    if isinstance(env_var, Enum):
        return str(env_var.value)
    if not isinstance(env_var, str):
        raise TypeError(
            "the first argument names the variable, such as LightningEnvVar.AGL_MANAGED_STORE or its name as a text; "
            f"got {env_var!r}"
        )
    return env_var


@overload
def resolve_bool_env_var(env_var: Enum | str, override: bool | None = None, *, fallback: bool) -> bool: ...
@overload
def resolve_bool_env_var(
    env_var: Enum | str, override: bool | None = None, fallback: bool | None = None
) -> bool | None: ...
def resolve_bool_env_var(
    env_var: Enum | str, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return `override` if given, else the variable as a bool, else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` names no variable.
        ValueError: the variable is set to something that is neither true nor false, the empty string included.
    """
    if override is not None:
        return override
    text = os.environ.get(_name(env_var))
    if text is None:
        return fallback
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    allowed = ", ".join(sorted(_TRUE | _FALSE))
    raise ValueError(f"{_name(env_var)} must be one of {allowed}; got {text!r}")


@overload
def resolve_int_env_var(env_var: Enum | str, override: int | None = None, *, fallback: int) -> int: ...
@overload
def resolve_int_env_var(
    env_var: Enum | str, override: int | None = None, fallback: int | None = None
) -> int | None: ...
def resolve_int_env_var(env_var: Enum | str, override: int | None = None, fallback: int | None = None) -> int | None:
    """Return `override` if given, else the variable as an integer, else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` names no variable.
        ValueError: the variable is set to something that is no integer.
    """
    if override is not None:
        return override
    text = os.environ.get(_name(env_var))
    if text is None:
        return fallback
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{_name(env_var)} must be an integer; got {text!r}") from None


@overload
def resolve_str_env_var(env_var: Enum | str, override: str | None = None, *, fallback: str) -> str: ...
@overload
def resolve_str_env_var(
    env_var: Enum | str, override: str | None = None, fallback: str | None = None
) -> str | None: ...
def resolve_str_env_var(env_var: Enum | str, override: str | None = None, fallback: str | None = None) -> str | None:
    """Return `override` if given, else the variable verbatim (it may be empty), else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` names no variable.
    """
    if override is not None:
        return override
    return os.environ.get(_name(env_var), fallback)
