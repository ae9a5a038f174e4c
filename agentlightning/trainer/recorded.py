"""What is recorded of a Trainer with each of its runs; keys and resources are no part of it."""

from __future__ import annotations

from typing import Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.decorator import FunctionalAlgorithm
from agentlightning.litagent.litagent import LitAgent
from agentlightning.store.spec import public_form
from agentlightning.trainer.stores import place_of
from agentlightning.types import Dataset


def name_of(algorithm: Algorithm) -> str:
    """Return how a run names its algorithm: the function, or the class."""
    return algorithm.__name__ if isinstance(algorithm, FunctionalAlgorithm) else type(algorithm).__name__


def settings_of(
    trainer: Any, agent: LitAgent[Any], train: Dataset[Any] | None, val: Dataset[Any] | None
) -> dict[str, object]:
    """Return the settings of a `Trainer`, the classes of its parts, and the sizes of the data sets."""
    parts = {"adapter": trainer.adapter, "runner": trainer.runner}
    parts |= {"strategy": trainer.strategy, "tracer": trainer.tracer}
    agents_name = getattr(agent, "__name__", None)
    return {
        "agent": agents_name if isinstance(agents_name, str) else type(agent).__name__,
        "n_runners": trainer.n_runners,
        "max_rollouts": trainer.max_rollouts,
        "rollout_config": trainer.rollout_config,
        "reward_dimensions": list(trainer.reward_dimensions),
        "store": public_form(place_of(trainer.store)),
        **{name: type(part).__name__ for name, part in parts.items()},
        "train_tasks": None if train is None else len(train),
        "val_tasks": None if val is None else len(val),
    }
