"""What the Trainer is called with: old names, unknown names, and values out of their range."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from typing_extensions import ParamSpec

from agentlightning.execution.base import ExecutionStrategy
from agentlightning.trainer.init_utils import nearest
from agentlightning.types import Hook, NamedResources, Resource

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)

ELSEWHERE: dict[str, str] = {
    "epochs": "it is a setting of the algorithm: algorithm={'type': ..., 'epochs': ...}",
    "learning_rate": "it is a setting of the algorithm: algorithm={'type': 'grpo', 'learning_rate': ...}",
    "lr": "it is a setting of the algorithm: algorithm={'type': 'grpo', 'learning_rate': ...}",
    "max_iterations": "it is a setting of the algorithm: algorithm={'type': 'grpo', 'steps': ...}",
    "model": "it is a setting of the algorithm: algorithm={'type': 'grpo', 'model': ...}",
    "agent": "the agent goes to fit(agent, train_dataset=...)",
    "dataset": "datasets go to fit(agent, train_dataset=..., val_dataset=...)",
    "train_dataset": "datasets go to fit(agent, train_dataset=..., val_dataset=...)",
    "val_dataset": "datasets go to fit(agent, train_dataset=..., val_dataset=...)",
}
"""Settings that programs give to the Trainer and that belong elsewhere."""


def refuse_unknown(init: Callable[P, R]) -> Callable[P, R]:
    """Make a constructor refuse unknown keywords with the nearest right name, or the place where they belong."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in ELSEWHERE and name not in known:
                raise TypeError(f"Trainer has no setting {name!r}: {ELSEWHERE[name]}")
            if name not in known:
                raise TypeError(f"Trainer has no setting {name!r}{nearest(name, known)}")
        return init(*args, **kwargs)

    return wrapper


def resolve_alias(old_name: str, old: Any, new_name: str, new: Any) -> Any:
    """Return the value of a setting that may be given under an old name; the new name wins. Warns of every use."""
    if old is None:
        return new
    _warn(f"Trainer({old_name}=...) is deprecated; use {new_name}=")
    if new is not None and new != old:
        _warn(f"{new_name}={new!r} and {old_name}={old!r} differ; {new_name} wins")
    return old if new is None else new


def same_setting(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the value of a setting that has two names.

    Raises:
        TypeError: both are given and differ.
    """
    if value is not None and other is not None and value is not other and value != other:
        raise TypeError(f"{name} and {other_name} are two names of one setting and differ: {value!r}, {other!r}")
    return other if value is None else value


def check_whole(name: str, value: Any) -> int:
    """Return a whole number of at least 1.

    Raises:
        TypeError, ValueError: it is none; names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least 1; got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
    return value


def check_hooks(hooks: Any) -> tuple[Hook, ...]:
    """Return hooks as a tuple: of none, of one, of a sequence.

    Raises:
        TypeError: one is no `Hook`; says which.
    """
    if hooks is None:
        return ()
    if isinstance(hooks, Hook):
        return (hooks,)
    if isinstance(hooks, str | bytes) or not isinstance(hooks, Iterable):
        raise TypeError(f"hooks must be a Hook or a sequence of them; got {hooks!r}")
    found = tuple(cast("Iterable[Any]", hooks))
    for number, hook in enumerate(found):
        if not isinstance(hook, Hook):
            is_class = isinstance(hook, type) and issubclass(hook, Hook)
            hint = f"; give an object: {hook.__name__}()" if is_class else "; derive its class from agl.Hook"
            raise TypeError(f"hooks[{number}] is no Hook: {hook!r}{hint}")
    return found


def check_resources(resources: Any) -> NamedResources | None:
    """Return resources by name.

    Raises:
        TypeError: it is no mapping of names to resources; says which entry.
    """
    if resources is None:
        return None
    if not isinstance(resources, Mapping):
        raise TypeError(f"initial_resources must be a dict of names to resources; got {type(resources).__name__}")
    named = cast("Mapping[Any, Any]", resources)
    for name, resource in named.items():
        if not isinstance(name, str) or not isinstance(resource, Resource):
            raise TypeError(
                f"initial_resources[{name!r}] must be an agl.LLM, agl.ProxyLLM or agl.PromptTemplate; "
                f"got {type(resource).__name__}"
            )
    return dict(cast("Mapping[str, Any]", named))


def check_dataset(name: str, dataset: Any) -> None:
    """Check that a dataset has a length and items by index.

    Raises:
        TypeError: it has not, or it is a string.
    """
    if isinstance(dataset, str | bytes):
        raise TypeError(
            f"{name} must be a dataset (a list will do); got the text {dataset!r}. "
            "An address of a server is not a dataset: give the Trainer store='http://...'"
        )
    if dataset is not None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(f"{name} must have a length and items by index, such as a list; got {type(dataset).__name__}")


def check_nothing_needs_an_algorithm(given: Mapping[str, Any], strategy: ExecutionStrategy) -> None:
    """Check that nothing was given that only an algorithm in this process could use.

    Raises:
        ValueError: something was; names it.
    """
    unused = [name for name, value in given.items() if value is not None]
    if unused and getattr(strategy, "role", "both") != "runner":
        raise ValueError(
            f"Without an algorithm nobody uses {', '.join(unused)}: give the Trainer an algorithm, or call dev()"
        )


def runner_count(strategy: ExecutionStrategy, own: int, asked: int | None) -> int:
    """Return how many runners there will be: a strategy that has a number of its own is right."""
    count = getattr(strategy, "n_runners", None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return own
    if asked is not None and count != asked:
        logger.warning("n_runners=%d has no effect: the strategy has n_runners=%d of its own", asked, count)
    return count


def tell_of_old_settings(dev: bool, daemon: bool) -> None:
    """Warn of settings that belong to the v0.1 protocol."""
    if dev:
        _warn("Trainer(dev=True) is deprecated; call trainer.dev(...)")
    if not daemon:
        logger.warning("daemon=False belongs to the v0.1 protocol and has no effect: no process outlives fit()")


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=5)
