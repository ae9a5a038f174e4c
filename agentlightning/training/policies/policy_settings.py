"""`policies=` of a run: the names of several policies that learn, and in what their settings differ from the run's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from agentlightning.errors import BadRequestError, closest_name

OWN_SETTINGS: Final = ("model", "lora", "learning_rate", "lr_scheduler_type", "max_grad_norm", "bf16")
"""Settings that a policy may have of its own."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_policies(policies: object) -> dict[str, dict[str, object]] | None:
    """Return the settings of each policy of `policies=` by name; None for one policy without a name.

    A list of names is policies that differ in nothing but what they learn.

    Raises:
        BadRequestError: it is neither, a name cannot stand in a URL, or a policy has a setting that is the run's.
    """
    if policies is None:
        return None
    if isinstance(policies, (list, tuple)):
        policies = {name: dict[str, object]() for name in cast("list[object]", policies)}
    if not isinstance(policies, Mapping) or not policies:
        raise BadRequestError(
            "policies must name the policies that learn, such as ['planner', 'solver'] or "
            f"{{'planner': {{'model': 'folder'}}, 'solver': {{}}}}; got {policies!r}"
        )
    by_name: dict[str, dict[str, object]] = {}
    for name, own in cast("Mapping[object, object]", policies).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadRequestError(f"policies: {name!r} is no name: 1 to 128 letters, digits, '-' and '_'")
        if not isinstance(own, Mapping):
            raise BadRequestError(f"policies[{name!r}] must be a dict of settings, such as {{}}; got {own!r}")
        fields = cast("Mapping[str, object]", own)
        for field in fields:
            if field not in OWN_SETTINGS:
                near = closest_name(str(field), OWN_SETTINGS)
                hint = f"did you mean {near!r}?" if near else f"its own can be {', '.join(OWN_SETTINGS)}"
                raise BadRequestError(f"policies[{name!r}] has no setting {field!r} of its own: {hint}")
        by_name[name] = {key: str(value) if key == "model" else value for key, value in fields.items()}
    return by_name
