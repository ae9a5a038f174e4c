"""What `agl run` runs: a Trainer with its agent and its datasets, out of a file or out of Python.

The file (YAML or JSON) has the keys of `Plan`; `trainer` holds the settings of `agl.Trainer`, each in the form that can
be written down: parts as names, import paths or dicts, functions and hooks as `module:object`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentlightning.cli.support.target import is_target, load_dataset, load_target, read_mapping
from agentlightning.errors import BadRequestError, did_you_mean

if TYPE_CHECKING:
    from agentlightning.trainer import Trainer
    from agentlightning.types import NamedResources


@dataclass
class Plan:
    """The keys of a file."""

    trainer: Any = None
    agent: Any = None
    train_dataset: Any = None
    val_dataset: Any = None
    dev: bool = False

    def checked(self) -> Plan:
        """Return the plan with everything that it names in place of the names.

        Raises:
            BadRequestError: something is missing or is not there; names the key.
        """
        if self.agent is None:
            raise BadRequestError("Say which agent runs: agent: module:object in the file, or --agent module:object")
        agent = load_target("agent", self.agent) if isinstance(self.agent, str) else self.agent
        return Plan(
            trainer=made_trainer(self.trainer),
            agent=agent() if isinstance(agent, type) else agent,
            train_dataset=load_dataset("train_dataset", self.train_dataset),
            val_dataset=load_dataset("val_dataset", self.val_dataset),
            dev=self.dev,
        )


def read_plan(path: Path, settings: Sequence[str]) -> Plan:
    """Return the plan in a file; `settings` are texts `key=value` that go before it, `trainer.n_runners=4`.

    Raises:
        BadRequestError: the file cannot be read, or has an unknown key; names the nearest right one.
    """
    import yaml

    found = read_mapping("the file", path)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise BadRequestError(f"--set {setting!r}: expected key=value, such as trainer.n_runners=4")
        value, place = yaml.safe_load(text), found
        *above, last = key.split(".")
        for part in above:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                raise BadRequestError(f"--set {key}=...: {part!r} is {below!r} in the file, and has nothing below")
            place = cast("dict[str, Any]", below)
        place[last] = value
    known = [each.name for each in fields(Plan)]
    for key in found:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
            raise BadRequestError(f"{path} has an unknown key {key!r}{hint}")
    return Plan(**found)


def made_trainer(settings: object) -> Trainer[Any]:
    """Return the Trainer with these settings; one that is made already is returned as it is.

    Raises:
        BadRequestError: they are no mapping.
        TypeError, ValueError: as `agl.Trainer` raises them.
    """
    from agentlightning.trainer import Trainer

    if isinstance(settings, Trainer):
        return cast("Trainer[Any]", settings)
    if settings is not None and not isinstance(settings, Mapping):
        raise BadRequestError(f"trainer must be a mapping with the settings of agl.Trainer; got {settings!r}")
    given = dict(cast("Mapping[str, Any]", settings or {}))
    for key, read in _READERS.items():
        if given.get(key) is not None:
            given[key] = read(given[key])
    return Trainer(**given)


def _resources(value: object) -> NamedResources:
    from pydantic import TypeAdapter, ValidationError

    from agentlightning.types import NamedResources

    try:
        return TypeAdapter(NamedResources).validate_python(value)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise BadRequestError(
            f"trainer.initial_resources: {wrong}. Expected a name for each resource, such as "
            "prompt: {resource_type: prompt_template, engine: f-string, template: ...}"
        ) from None


def _hooks(value: object) -> list[object]:
    named = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    found = [_object("trainer.hooks", each) for each in named]
    return [each() if isinstance(each, type) else each for each in found]


def _faults(value: object) -> dict[object, float]:
    import builtins

    if not isinstance(value, Mapping):
        raise BadRequestError(f"trainer.policy_faults must map exceptions to rewards; got {value!r}")
    rewards = cast("Mapping[str, float]", value)
    return {
        getattr(builtins, name, None) or _object("trainer.policy_faults", name): reward
        for name, reward in rewards.items()
    }


def _object(option: str, value: object) -> object:
    return load_target(option, value) if isinstance(value, str) else value


def _algorithm(value: object) -> object:
    return load_target("trainer.algorithm", value) if isinstance(value, str) and is_target(value) else value


_READERS: dict[str, Callable[[object], object]] = {
    "initial_resources": _resources,
    "hooks": _hooks,
    "policy_faults": _faults,
    "reward_fn": partial(_object, "trainer.reward_fn"),
    "algorithm": _algorithm,
}
"""Settings of a Trainer that are no specs in their own right, and how their written form is read."""
