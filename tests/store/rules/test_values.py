"""Values on their way in: a request whose values are right at a look is the one that validation makes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from agentlightning.store.rules.idempotency import digest
from agentlightning.store.rules.values import new_request
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig


class Mode(enum.StrEnum):
    TRAIN = "train"


GIVEN: list[dict[str, Any]] = [
    {},
    {"mode": "train", "metadata": {"a": 1}, "run_id": "run", "resources_id": "rs", "priority": -3},
    {"mode": Mode.TRAIN},
    {"mode": "colour"},
    {"mode": ["train"]},
    {"config": RolloutConfig(max_attempts=2)},
    {"config": {"max_attempts": 2}},
    {"config": RolloutConfig(mode="val")},
    {"config": RolloutConfig(mode="val"), "mode": "train"},
    {"metadata": ["a"]},
    {"run_id": 7},
    {"priority": True},
    {"priority": "2"},
    {"priority": 2**31},
    {"not_before": 5},
    {"not_before": float("inf")},
    {"task_id": None},
]


def outcome(make: Callable[..., EnqueueRolloutRequest], given: dict[str, Any]) -> object:
    """What becomes of a request: its values with their classes, or why it is refused."""
    try:
        made = make(input={"task": 1}, **given)
    except ValidationError as error:
        return str(error)
    return made, {name: type(value) for name, value in made}, digest([made, 1]), made.model_dump_json()


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_request_is_the_one_that_validation_makes(given: dict[str, Any]) -> None:
    assert outcome(new_request, given) == outcome(EnqueueRolloutRequest, given)
