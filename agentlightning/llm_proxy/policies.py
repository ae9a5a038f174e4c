"""Which policy a call belongs to: found by the agent's role, by the model that it asks for, or by its route.

Several agents of one rollout train different policies this way, and calls of a judge or of a bought model are never
mistaken for those of the policy that learns. A call that fits no policy, and one whose role and model contradict each
other, is refused: its tokens would be counted for the wrong policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentlightning.llm_proxy.access.limits import hint
from agentlightning.llm_proxy.replies import CallFailed

PolicyKind = Literal["trained", "frozen", "external"]
"""`trained` learns from its calls; `frozen` is ours and stays as it is; `external` is a provider's."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """One policy, checked."""

    name: str
    kind: PolicyKind
    models: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()


class PolicyTable:
    """Read-only map from role, model and route to policy. Without policies no call has one.

    Raises:
        ValueError: two policies name the same; says which.
    """

    def __init__(self, policies: Sequence[CallPolicy] = ()) -> None:
        self._policies = list(policies)
        self.roles = self._index("roles", lambda policy: policy.roles)
        """The policy of each role, in the order in which they are named."""
        self._models = self._index("models", lambda policy: policy.models)
        self._routes = self._index("routes", lambda policy: policy.routes)
        takes_all = [policy for policy in self._policies if not (policy.models or policy.roles or policy.routes)]
        if len(takes_all) > 1:
            names = " and ".join(repr(policy.name) for policy in takes_all)
            raise ValueError(
                f"policies: {names} name no models, roles or routes; only one policy takes all other calls"
            )
        self._rest = takes_all[0] if takes_all else None

    def _index(self, field: str, named: Callable[[CallPolicy], tuple[str, ...]]) -> dict[str, CallPolicy]:
        table: dict[str, CallPolicy] = {}
        for policy in self._policies:
            for value in named(policy):
                if value in table:
                    both = f"{table[value].name!r} and {policy.name!r}"
                    raise ValueError(f"policies: {both} both name {value!r} in {field}; a call belongs to one policy")
                table[value] = policy
        return table

    def missing_models(self, served: Sequence[str]) -> str | None:
        """Return what to say of models that trained policies name and that are not served yet; None if all are.

        Raises:
            ValueError: another policy names one that is not served; says what it may have meant.
        """
        missing: str | None = None
        for model, policy in self._models.items():
            if model in served:
                continue
            text = f"policies[{policy.name!r}].models: there is no model {model!r} in model_list{hint(model, served)}"
            if policy.kind != "trained":
                raise ValueError(text)
            missing = missing or text
        return missing

    def of_role(self, role: str) -> CallPolicy:
        """Return the policy of a role.

        Raises:
            ValueError: there is none; says what it may have meant.
        """
        if role not in self.roles:
            raise ValueError(f"No policy names the role {role!r}{hint(role, self.roles)}")
        return self.roles[role]

    def of_call(self, role: str | None, model: str, route: str) -> CallPolicy | None:
        """Return the policy of a call; None where there are no policies.

        Raises:
            CallFailed: 404, there is no such role; 400, no policy fits, or role and model contradict each other.
        """
        if role is not None:
            policy = self.role_in_url(role)
            other = self._models.get(model, policy)
            if policy.models and model not in policy.models:
                raise _contradiction(role, policy, model, f"which is served by {_listed(policy.models)}")
            if policy.kind == "trained" and other is not policy:
                raise _contradiction(role, policy, model, f"and the model belongs to the policy {other.name!r}")
            return policy
        if not self._policies:
            return None
        policy = self._models.get(model) or self._routes.get(route) or self._rest
        if policy is None:
            text = (
                f"No policy of this gateway fits a call of {route} for the model {model!r} without a role. "
                f"Models: {_listed(self._models)}; roles: {_listed(self.roles)}; routes: {_listed(self._routes)}. "
                "A policy that names none of them takes every other call"
            )
            raise CallFailed(400, text, code="no_policy", param="model")
        return policy

    def role_in_url(self, role: str) -> CallPolicy:
        """Return the policy of a role that an agent's URL names.

        Raises:
            CallFailed: 404, there is none.
        """
        try:
            return self.of_role(role)
        except ValueError as error:
            raise CallFailed(404, f"{error}. A role stands in the URL, after /role/", code="unknown_role") from None


def _contradiction(role: str, policy: CallPolicy, model: str, why: str) -> CallFailed:
    text = f"The role {role!r} asks for the model {model!r}, but acts by the policy {policy.name!r}, {why}"
    return CallFailed(400, text, code="wrong_model_for_role", param="model")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
