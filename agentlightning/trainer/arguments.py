"""Checks of the Trainer's arguments: old names, unknown names, and values out of range.

Each check names the setting in a `TypeError` for a wrong type, and in a `ValueError` for a value that is out of range
or would have no effect. A check that returns a value returns it in the form that the Trainer stores.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from types import FunctionType
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError
from typing_extensions import override

from agentlightning.algorithm.base import Algorithm
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.runner.base import check_hook
from agentlightning.trainer.init_utils import nearest
from agentlightning.training.progress import Style
from agentlightning.types import Hook, NamedResources, Resource, RolloutConfig
from agentlightning.types.resources import stored_forms

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., None])

ELSEWHERE: dict[str, str] = {
    "epochs": "this is a setting of the algorithm: algorithm={'type': 'grpo', 'max_steps': ...}",
    "learning_rate": "this is a setting of the algorithm: algorithm={'type': 'grpo', 'learning_rate': ...}",
    "lr": "this is a setting of the algorithm: algorithm={'type': 'grpo', 'learning_rate': ...}",
    "max_iterations": "pass it to train(), or use the setting of the algorithm: {'type': 'grpo', 'max_steps': ...}",
    "model": "this is a setting of the algorithm: algorithm={'type': 'grpo', 'model': ...}",
    "agent": "pass the agent to fit(agent, train_dataset=...)",
    "dataset": "pass datasets to fit(agent, train_dataset=..., val_dataset=...)",
    "train_dataset": "pass datasets to fit(agent, train_dataset=..., val_dataset=...)",
    "val_dataset": "pass datasets to fit(agent, train_dataset=..., val_dataset=...)",
}
"""Settings that users often pass to the Trainer by mistake, each with a hint."""

RETRIED: Final = ("failed", "timeout", "unresponsive")
"""Statuses of an attempt that may be retried."""


def refuse_unknown(init: F) -> F:
    """Make a constructor reject unknown keywords, with the nearest valid name or a hint."""
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name in ELSEWHERE and name not in names:
                raise TypeError(f"Trainer has no setting {name!r}: {ELSEWHERE[name]}")
            if name not in names:
                raise TypeError(f"Trainer has no setting {name!r}{nearest(name, names)}")
        init(*args, **kwargs)

    return cast("F", wrapper)


def resolve_alias(old_name: str, old: object, new_name: str, new: object) -> Any:
    """Return the value of a setting that also has an old name; the new name takes precedence. Warn about the old."""
    if old is None:
        return new
    _warn(f"Trainer({old_name}=...) is deprecated; use {new_name}=")
    if new is not None and new != old:
        _warn(f"{new_name}={new!r} and {old_name}={old!r} differ; using {new_name}")
    return old if new is None else new


def same_setting(name: str, value: object, other_name: str, other: object) -> Any:
    """Return the value of a setting that has two names."""
    if value is not None and other is not None and value is not other and value != other:
        raise TypeError(f"{name}={value!r} and {other_name}={other!r} are the same setting. Pass only one of them.")
    return other if value is None else value


def check_hooks(hooks: object) -> tuple[Hook, ...]:
    """Return hooks as a tuple. Accept None, one hook, or a sequence."""
    if hooks is None:
        return ()
    if isinstance(hooks, Hook):
        hooks = (hooks,)
    if isinstance(hooks, str | bytes) or not isinstance(hooks, Iterable):
        raise TypeError(f"hooks must be a Hook or a sequence of them; got {hooks!r}")
    checked = tuple(cast("Iterable[Any]", hooks))
    for number, hook in enumerate(checked):
        if not isinstance(hook, Hook):
            is_class = isinstance(hook, type) and issubclass(hook, Hook)
            hint = f"; pass an instance: {hook.__name__}()" if is_class else "; derive its class from agl.Hook"
            raise TypeError(f"hooks[{number}] is not a Hook: {hook!r}{hint}")
    for hook in checked:
        check_hook(hook)
    return checked


def check_resources(resources: object, setting: str = "initial_resources") -> NamedResources | None:
    """Return resources by name."""
    if resources is None:
        return None
    if not isinstance(resources, Mapping):
        raise TypeError(f"{setting} must be a dict from names to resources; got {type(resources).__name__}")
    named = cast("Mapping[Any, Any]", resources)
    for name, resource in named.items():
        if not isinstance(name, str) or not isinstance(resource, Resource | Mapping):
            raise TypeError(
                f"{setting}[{name!r}] must be an agl.LLM, agl.ProxyLLM, agl.PromptTemplate, a subclass of agl.Resource "
                f"or a dict; got {type(resource).__name__}"
            )
    stored = stored_forms(cast("Mapping[str, Any]", named))
    resources_by_name = {name: named[name] if isinstance(named[name], Resource) else stored[name] for name in named}
    return cast("NamedResources", resources_by_name)


def check_rollout_config(config: object) -> RolloutConfig | None:
    """Return the limits of rollouts from a `RolloutConfig` or a dict of its fields."""
    if config is None:
        return None
    if isinstance(config, Mapping):
        fields, names = cast("Mapping[Any, Any]", config), list(RolloutConfig.model_fields)
        for name in fields:
            if name not in names:
                raise TypeError(f"rollout_config has no field {name!r}{nearest(str(name), names)}")
        try:
            config = RolloutConfig(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"rollout_config: {where}={first['input']!r} is invalid: {first['msg']}") from error
    if not isinstance(config, RolloutConfig):
        raise TypeError(f"rollout_config must be an agl.RolloutConfig or a dict of its fields; got {config!r}")
    if config.mode is not None:
        raise ValueError(
            f"rollout_config: mode={config.mode!r} would have no effect: the algorithm sets the mode of each rollout, "
            "'train' for tasks of train_dataset and 'val' for tasks of val_dataset"
        )
    for name in ("timeout_seconds", "unresponsive_seconds"):
        seconds = getattr(config, name)
        if seconds is not None and seconds <= 0:
            raise ValueError(f"rollout_config: {name} must be more than 0 seconds; got {seconds}")
    idle = [status for status in config.retry_condition if status not in RETRIED]
    if idle:
        raise ValueError(
            f"rollout_config: retry_condition={idle} has no effect; expected some of {', '.join(map(repr, RETRIED))}"
        )
    if config.max_attempts > 1 and not config.retry_condition:
        raise ValueError(
            f"rollout_config: max_attempts={config.max_attempts} has no effect without retry_condition. Set it to the "
            f"statuses after which to retry: some of {', '.join(map(repr, RETRIED))}"
        )
    if config.retry_condition and config.max_attempts == 1:
        raise ValueError(
            f"rollout_config: retry_condition={config.retry_condition} has no effect with max_attempts=1; increase it"
        )
    return config


def check_run_id(run_id: object) -> str | None:
    """Return the name of a run if it is valid."""
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"run_id must be a string that names the run; got {run_id!r}")
    if run_id == "":
        raise ValueError("run_id must not be empty; omit it for a run without a name")
    return run_id


def check_algorithm_uses(
    algorithm: Algorithm | None, settings: Mapping[str, object], config: RolloutConfig | None, progress: Style
) -> None:
    """Check that the algorithm uses the settings that are set for it, and accepts the limits."""
    if algorithm is None:
        return
    unused = [name for name, value in settings.items() if value is not None and name in algorithm.unused_parts()]
    if unused:
        name = getattr(algorithm, "__name__", type(algorithm).__name__)
        hint = f"; to use it, add a parameter {unused[0]!r}" if hasattr(algorithm, "__name__") else ""
        them = "it" if len(unused) == 1 else "them"
        raise ValueError(f"{' and '.join(unused)} would have no effect: the algorithm {name} does not use {them}{hint}")
    if config is not None:
        algorithm.check_rollout_config(config)
    if progress == "live" and algorithm.shows_progress:
        name = type(algorithm).__name__
        raise ValueError(f"progress='live' has no effect: {name} shows its own progress; set progress='none' there")


def check_nothing_needs_an_algorithm(settings: Mapping[str, object], strategy: ExecutionStrategy) -> None:
    """Raise `ValueError` if a setting is set that only an algorithm in this process uses."""
    unused = [name for name, value in settings.items() if value is not None]
    if unused and getattr(strategy, "role", "both") != "runner":
        raise ValueError(
            f"{', '.join(unused)} would have no effect without an algorithm: set Trainer(algorithm=...) or call dev()"
        )


def runner_count(strategy: ExecutionStrategy, own: int, requested: int | None) -> int:
    """Return the number of runners; a strategy's own number takes precedence."""
    count = getattr(strategy, "n_runners", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return own
    if requested is not None and count != requested:
        logger.warning("n_runners=%d has no effect: the strategy has its own n_runners=%d", requested, count)
    return count


def tell_of_old_settings(dev: bool, daemon: bool) -> None:
    """Warn about settings that belong to the v0.1 protocol."""
    if dev:
        _warn("Trainer(dev=True) is deprecated; call trainer.dev(...)")
    if not daemon:
        logger.warning("daemon=False belongs to the v0.1 protocol and has no effect: no process outlives fit()")


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=5)


def check_children_can_import(method: str | None, *parts: object) -> None:
    """Check that a spawned child can import everything that it is sent, so nothing is defined in a notebook cell."""
    if method in (None, "fork") or getattr(sys.modules["__main__"], "__file__", None) is not None:
        return
    for part in parts:
        pickler = _NamesOfMain()
        with contextlib.suppress(Exception):  # the strategy reports a part that cannot be pickled
            pickler.dump(part)
        if pickler.found:
            names = ", ".join(pickler.found)
            raise TypeError(
                f"start_method={method!r} starts child processes, which cannot import {names} because it is defined "
                "in a notebook cell or an interactive session. Move it into a module and import it from there, use "
                "strategy='shm', which starts no child processes, or use start_method='fork' on Linux."
            )


class _NamesOfMain(pickle.Pickler):
    """Records the objects that it would pickle by their name in `__main__`."""

    def __init__(self) -> None:
        super().__init__(BytesIO())
        self.found: dict[str, None] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        named = isinstance(obj, type | FunctionType) or "__qualname__" in getattr(obj, "__dict__", {})
        if named and obj.__module__ == "__main__":
            self.found[obj.__qualname__] = None
        return NotImplemented
