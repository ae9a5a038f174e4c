"""What a search over prompts begins with: the templates among the initial resources, and the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, NamedResources, PromptTemplate


def seed_templates(resources: NamedResources | None, wanted: Sequence[str] | None) -> dict[str, PromptTemplate]:
    """Return the prompt templates among the resources, in their order; those that are `wanted` if that is given.

    Raises:
        ValueError: there are no resources, or no prompt template among them.
        BadRequestError: one that is wanted is no template.
    """
    if resources is None:
        raise ValueError("initial_resources are not set: give the Trainer initial_resources={'prompt': template}")
    found = {name: each for name, each in resources.items() if isinstance(each, PromptTemplate)}
    if not found:
        names = ", ".join(resources) or "nothing"
        raise ValueError(
            f"No prompt template resource found in initial_resources, which holds {names}: give one as "
            "agl.PromptTemplate(template='...', engine='f-string')"
        )
    if wanted is None:
        return found
    if not wanted or any(name not in found for name in wanted):
        raise BadRequestError(f"templates={list(wanted)}: the templates are {', '.join(found)}")
    return {name: found[name] for name in wanted}


def items_of(algorithm: str, name: str, dataset: Dataset[Any] | None) -> list[Any]:
    """Return the tasks of a data set.

    Raises:
        ValueError: there are none.
    """
    if dataset is None or len(dataset) == 0:
        raise ValueError(f"{name} is required: {algorithm} learns from train_dataset and chooses by val_dataset")
    return [dataset[index] for index in range(len(dataset))]
