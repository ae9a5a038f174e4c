"""Reads a bool, an integer or a string from an environment variable."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Any, overload

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _resolved(env_var: object, override: Any, fallback: Any, read: Callable[[str, str], object]) -> Any:
    """Return `override` if set, else the result of `read` for the variable's name and text, else `fallback`."""
    name = env_var.value if isinstance(env_var, Enum) else env_var
    if override is not None:
        return override
    if not isinstance(name, str):
        raise TypeError(
            "the first argument must be a variable, such as LightningEnvVar.AGL_MANAGED_STORE or its name as a string; "
            f"got {env_var!r}"
        )
    text = os.environ.get(name)
    return fallback if text is None else read(name, text)


@overload
def resolve_bool_env_var(env_var: Enum | str, override: bool | None = None, *, fallback: bool) -> bool: ...
@overload
def resolve_bool_env_var(
    env_var: Enum | str, override: bool | None = None, fallback: bool | None = None
) -> bool | None: ...
def resolve_bool_env_var(
    env_var: Enum | str, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return `override` if set, else the variable as a bool, else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` is not a variable or its name.
        ValueError: the variable is neither true nor false, for example an empty string.
    """
    return _resolved(env_var, override, fallback, _bool)


def _bool(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"{name} must be one of {', '.join(sorted(_TRUE | _FALSE))}; got {text!r}")


@overload
def resolve_int_env_var(env_var: Enum | str, override: int | None = None, *, fallback: int) -> int: ...
@overload
def resolve_int_env_var(
    env_var: Enum | str, override: int | None = None, fallback: int | None = None
) -> int | None: ...
def resolve_int_env_var(env_var: Enum | str, override: int | None = None, fallback: int | None = None) -> int | None:
    """Return `override` if set, else the variable as an integer, else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` is not a variable or its name.
        ValueError: the variable is not an integer.
    """
    return _resolved(env_var, override, fallback, _int)


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer; got {text!r}") from None


@overload
def resolve_str_env_var(env_var: Enum | str, override: str | None = None, *, fallback: str) -> str: ...
@overload
def resolve_str_env_var(
    env_var: Enum | str, override: str | None = None, fallback: str | None = None
) -> str | None: ...
def resolve_str_env_var(env_var: Enum | str, override: str | None = None, fallback: str | None = None) -> str | None:
    """Return `override` if set, else the variable unchanged (it may be empty), else `fallback` if it is unset.

    Raises:
        TypeError: `env_var` is not a variable or its name.
    """
    return _resolved(env_var, override, fallback, lambda _, text: text)
