"""Policies as the owner of a gateway writes them, in Python or in a file: read and checked, each error by its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Required, cast, get_args

from typing_extensions import TypedDict

from agentlightning.llm_proxy.access.limits import hint
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.policies import CallPolicy, PolicyKind

_ROLE = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FIELDS = ("kind", "models", "roles", "routes")


class PolicyConfig(TypedDict, total=False):
    """One policy, under its name in `LLMProxy(policies=...)`.

    A call belongs to the policy that names its role; else to the one that names the requested model; else its route;
    else to the one that names nothing, which takes every other call.
    """

    kind: Required[PolicyKind]
    """`trained` learns from its calls; `frozen` is ours and stays as it is; `external` is a provider's."""
    models: list[str]
    """Names in `model_list` that serve it. The model of a trained policy may be added later, by its algorithm."""
    roles: list[str]
    """Agents that act by it. Their calls come through `/role/<role>` before the attempt's URL; see `as_resources`."""
    routes: list[str]
    """Dialects, such as `embeddings`."""


def read_policies(policies: object) -> list[CallPolicy]:
    """Return what `LLMProxy(policies=...)` was given.

    Raises:
        ValueError: an entry is malformed; names the entry, the field and what was expected.
    """
    if policies is None:
        return []
    if not isinstance(policies, Mapping):
        raise ValueError(f"policies must map names to policies; got {type(policies).__name__}")
    return [_read_policy(name, entry) for name, entry in cast("Mapping[object, object]", policies).items()]


def _read_policy(name: object, entry: object) -> CallPolicy:
    if not isinstance(name, str) or not name:
        raise ValueError(f"policies: a policy's name must be a non-empty string; got {name!r}")
    place = f"policies[{name!r}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{place} must be a dict such as {{'kind': 'trained'}}; got {type(entry).__name__}")
    fields = cast("Mapping[object, object]", entry)
    for field in fields:
        if field not in _FIELDS:
            raise ValueError(f"{place}.{field} is not supported{hint(str(field), _FIELDS)}")
    kinds, kind = cast("tuple[PolicyKind, ...]", get_args(PolicyKind)), fields.get("kind")
    if kind not in kinds:
        raise ValueError(
            f"{place}.kind must be one of {', '.join(kinds)}{hint(str(kind), kinds, lists=False)}; got {kind!r}"
        )
    models, roles, routes = (_names(f"{place}.{field}", fields.get(field)) for field in _FIELDS[1:])
    for role in roles:
        if not _ROLE.fullmatch(role):
            raise ValueError(f"{place}.roles: {role!r} is no role: 1 to 128 letters, digits, '-' and '_'")
    for route in routes:
        if route not in DIALECTS:
            raise ValueError(f"{place}.routes: there is no route {route!r}{hint(route, DIALECTS)}")
    return CallPolicy(name, kind, models, roles, routes)


def _names(place: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    names = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{place} must be a list of names; got {value!r}")
    return tuple(names)
