"""Runners of a Trainer: one for each worker that shares a process, and no setting that silently has no effect."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

from agentlightning.runner.base import Runner
from agentlightning.tracer.base import Tracer

_NOTHING = object()


def check_serves(runner: Runner[Any]) -> None:
    """Check that a runner serves the queue.

    Raises:
        TypeError: its class has no `iter` of its own; says what to derive from.
    """
    kind: Any = type(runner)
    if kind.iter is cast("Any", Runner).iter:
        own = [name for name in ("execute", "run") if name in vars(kind)]
        unused = f" Nobody calls its {' and '.join(f'{name}()' for name in own)}." if own else ""
        raise TypeError(
            f"The runner {kind.__name__} has no iter(), so it would serve nothing.{unused} Derive from "
            "agl.LitAgentRunner and override _execute_rollout(rollout), step or iter; an agent is no runner: it is a "
            "function or an agl.LitAgent, and goes to fit(agent, train_dataset=...)."
        )


def replicas(first: Runner[Any], build: Callable[[], Runner[Any] | None], count: int) -> tuple[Runner[Any], ...]:
    """Return `count` runners, the first one among them: built anew, or copied where the first was given as it is.

    Raises:
        TypeError: it was given as an instance and cannot be copied.
    """
    return (first, *(build() or _copy(first) for _ in range(count - 1)))


def _copy(runner: Runner[Any]) -> Runner[Any]:
    try:
        return copy.deepcopy(runner)
    except Exception as error:  # any class may refuse to be copied, with any exception
        raise TypeError(
            f"Several runners in one process need a runner each, and this {type(runner).__name__} cannot be copied "
            f"({type(error).__name__}: {error}). Give runner= as a class, a factory or a dict, or use strategy='cs'."
        ) from error


def check_settings_are_used(runner: Runner[Any], spec: Any, settings: dict[str, Any], tracer: Tracer | None) -> None:
    """Check that a runner that was given ready-made, or by a factory, has what the Trainer was told of it.

    Raises:
        ValueError: a setting would have no effect; names it.
    """
    ready_made = spec is runner or (callable(spec) and not isinstance(spec, type))
    named = () if ready_made else inspect.signature(type(runner)).parameters
    given = settings if tracer is None else {**settings, "tracer": tracer}
    for name, value in given.items():
        own = getattr(runner, name, getattr(runner, f"_{name}", _NOTHING))
        if name not in named and own is not value and own != value:
            raise ValueError(
                f"{name} of the Trainer would have no effect: the runner {type(runner).__name__} does not take it from "
                f"here. Give it to the runner itself: runner={{'type': ..., {name!r}: ...}}, or leave one of them out."
            )
