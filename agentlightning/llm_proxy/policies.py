"""Assigns each call to a policy: by the agent's role, by the requested model, or by its route.

With policies, several agents of one rollout can train different models, and calls of a judge or of a provider's model
are kept apart from those of the trained policy. A call that matches no policy, or has a role and a model of different
policies, is refused, because its tokens could be counted for the wrong policy.

Policies are configured in Python or in a file; each error names its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required, cast, get_args

from typing_extensions import TypedDict

from agentlightning.llm_proxy.access.limits import hint
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.replies import CallFailed

PolicyKind = Literal["trained", "frozen", "external"]
"""`trained`: learns from its calls; `frozen`: our model, not trained; `external`: a provider's model."""
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ROLE_FORM = "1 to 128 letters, digits, '-' or '_'"
ServerTools = Literal["drop", "refuse"]
"""Handling of tools that only a vendor's server can run: exclude them, or refuse the call."""
_LISTS = ("models", "roles", "routes")
_FIELDS = ("kind", *_LISTS, "server_tools")


class PolicyConfig(TypedDict, total=False):
    """One policy, under its name in `LLMProxy(policies=...)`.

    A call belongs to the policy that lists its role; else to the one that lists the requested model; else to the one
    that lists its route; else to the one that lists nothing, which gets all other calls.
    """

    kind: Required[PolicyKind]
    """`trained`: learns from its calls; `frozen`: our model, not trained; `external`: a provider's model."""
    models: list[str]
    """Names in `model_list` of its models. The model of a trained policy may be added later, by its algorithm."""
    roles: list[str]
    """Roles of its agents. Their URLs have `/role/<role>` before the attempt; see `as_resources`."""
    routes: list[str]
    """Dialects, such as `embeddings`."""
    server_tools: ServerTools
    """Handling of tools that only a vendor's server can run, such as `web_search`, in calls of our models: `drop`, the
    default, excludes them and lists them on the call; `refuse` returns 400."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """One policy after validation."""

    name: str
    kind: PolicyKind
    models: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    server_tools: ServerTools = "drop"


def read_policies(policies: object) -> list[CallPolicy]:
    """Return the policies of `LLMProxy(policies=...)`.

    Raises:
        ValueError: an entry is malformed; names the entry, the field and what was expected.
    """
    if policies is None:
        return []
    if not isinstance(policies, Mapping):
        raise ValueError(f"policies must be a dict of policies by name; got {type(policies).__name__}")
    result: list[CallPolicy] = []
    for name, entry in cast("Mapping[object, object]", policies).items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"policies: a policy's name must be a non-empty string; got {name!r}")
        place = f"policies[{name!r}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{place} must be a dict such as {{'kind': 'trained'}}; got {type(entry).__name__}")
        fields = cast("Mapping[object, object]", entry)
        for field in fields:
            if field not in _FIELDS:
                raise ValueError(f"{place}.{field} is not supported{hint(str(field), _FIELDS)}")
        kind = cast(PolicyKind, _one_of(get_args(PolicyKind), fields.get("kind"), f"{place}.kind"))
        server_tools = fields.get("server_tools", "drop")
        tools = cast(ServerTools, _one_of(get_args(ServerTools), server_tools, f"{place}.server_tools"))
        name_lists: list[tuple[str, ...]] = []
        for field in _LISTS:
            value = fields.get(field)
            names = tuple(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else ()
            if value is not None and not (names and all(isinstance(name, str) and name for name in names)):
                raise ValueError(f"{place}.{field} must be a list of names; got {value!r}")
            name_lists.append(names)
        models, roles, routes = name_lists
        for role in roles:
            if not _ROLE.fullmatch(role):
                raise ValueError(f"{place}.roles: {role!r} is not a valid role; a role has {_ROLE_FORM}")
        for route in routes:
            if route not in DIALECTS:
                raise ValueError(f"{place}.routes: unknown route {route!r}{hint(route, DIALECTS)}")
        result.append(CallPolicy(name, kind, models, roles, routes, tools))
    return result


def _one_of(choices: tuple[str, ...], value: object, place: str) -> object:
    if value not in choices:
        near = hint(str(value), choices, lists=False)
        raise ValueError(f"{place} must be one of {', '.join(choices)}{near}; got {value!r}")
    return value


class PolicyTable:
    """Read-only map from role, model and route to policy. Without policies, calls have none, and roles have no effect.

    Raises:
        ValueError: two policies list the same role, model or route; names it.
    """

    def __init__(self, policies: Sequence[CallPolicy] = ()) -> None:
        self._policies = list(policies)
        self.roles = self._index("roles", lambda policy: policy.roles)
        """The policy of each role, in the order of the policies."""
        self._models = self._index("models", lambda policy: policy.models)
        self._routes = self._index("routes", lambda policy: policy.routes)
        takes_all = [policy for policy in self._policies if not (policy.models or policy.roles or policy.routes)]
        if len(takes_all) > 1:
            names = " and ".join(repr(policy.name) for policy in takes_all)
            raise ValueError(
                f"policies: {names} have no models, roles or routes; only one policy may receive all other calls"
            )
        self._rest = takes_all[0] if takes_all else None

    @property
    def all(self) -> list[CallPolicy]:
        """All policies, in the order of the configuration."""
        return list(self._policies)

    def _index(self, field: str, names_of: Callable[[CallPolicy], tuple[str, ...]]) -> dict[str, CallPolicy]:
        table: dict[str, CallPolicy] = {}
        for policy in self._policies:
            for value in names_of(policy):
                if value in table:
                    both = f"{table[value].name!r} and {policy.name!r}"
                    raise ValueError(f"policies: {both} both have {value!r} in {field}; remove it from one of them")
                table[value] = policy
        return table

    def missing_models(self, served: Sequence[str]) -> str | None:
        """Return a message about models of trained policies that are not served yet; None if all are.

        Raises:
            ValueError: another policy lists a model that is not served; suggests similar names.
        """
        missing: str | None = None
        for model, policy in self._models.items():
            if model in served:
                continue
            text = f"policies[{policy.name!r}].models: {model!r} is not in model_list{hint(model, served)}"
            if policy.kind != "trained":
                raise ValueError(text)
            missing = missing or text
        return missing

    def of_role(self, role: str) -> CallPolicy | None:
        """Return the policy of a role; None if there are no policies.

        Raises:
            ValueError: no policy lists it; suggests similar names.
        """
        if not self._policies:
            if not _ROLE.fullmatch(role):
                raise ValueError(f"{role!r} is not a valid role; a role has {_ROLE_FORM}")
            return None
        if role not in self.roles:
            raise ValueError(f"No policy has the role {role!r}{hint(role, self.roles)}")
        return self.roles[role]

    def of_call(self, role: str | None, model: str, route: str) -> CallPolicy | None:
        """Return the policy of a call; None if there are no policies.

        Raises:
            CallFailed: 404, there is no such role; 400, no policy matches, or role and model differ in policy.
        """
        policy = None if role is None else self.role_in_url(role)
        if not self._policies:
            return None
        if role is not None and policy is not None:
            other = self._models.get(model, policy)
            if policy.models and model not in policy.models:
                raise _contradiction(role, policy, model, f"which has the models {_listed(policy.models)}")
            if policy.kind == "trained" and other is not policy:
                raise _contradiction(role, policy, model, f"but the model belongs to the policy {other.name!r}")
            return policy
        policy = self._models.get(model) or self._routes.get(route) or self._rest
        if policy is None:
            text = (
                f"No policy of this gateway matches a call of {route} for the model {model!r} without a role. "
                f"Models: {_listed(self._models)}; roles: {_listed(self.roles)}; routes: {_listed(self._routes)}. "
                "A policy without models, roles and routes gets all other calls"
            )
            raise CallFailed(400, text, code="no_policy", param="model")
        return policy

    def of_fallback(self, asked: CallPolicy | None, role: str | None, model: str) -> CallPolicy:
        """Return the policy of a call to `asked` that the fallback `model` serves.

        It is not trained, unless the fallback is the model of a policy and no role has another policy.
        """
        own = self._models.get(model)
        if own is not None and (own is asked or role is None or own.kind != "trained"):
            return own
        return asked if asked is not None and asked.kind != "trained" else CallPolicy(model, "frozen")

    def role_in_url(self, role: str) -> CallPolicy | None:
        """Return the policy of a role in an agent's URL; None if there are no policies.

        Raises:
            CallFailed: 404, no policy lists it.
        """
        try:
            return self.of_role(role)
        except ValueError as error:
            raise CallFailed(404, f"{error}. It is in the URL, after /role/", code="unknown_role") from None


def _contradiction(role: str, policy: CallPolicy, model: str, why: str) -> CallFailed:
    text = f"The role {role!r} cannot call the model {model!r}: the role has the policy {policy.name!r}, {why}"
    return CallFailed(400, text, code="wrong_model_for_role", param="model")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
