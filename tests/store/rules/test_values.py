"""Values on their way in and out: a request whose values are right at a look is the one that validation makes, what
becomes JSON shares nothing with what was given."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from agentlightning.store.rules.idempotency import digest
from agentlightning.store.rules.values import new_request, public_rollout, to_json
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig


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
    {"mode": "train", "config": RolloutConfig(mode="val")},
    {"metadata": ["a"]},
    {"run_id": 7},
    {"priority": True},
    {"priority": "2"},
    {"priority": 2**31},
    {"not_before": 5},
    {"not_before": float("inf")},
    {"task_id": None},
]


def outcome(make: Callable[..., EnqueueRolloutRequest], values: dict[str, Any]) -> object:
    """Return the values of a request with their classes, or the reason for which it is refused."""
    try:
        made = make(input={"task": 1}, **values)
    except ValidationError as error:
        return str(error)
    return made, {name: type(value) for name, value in made}, digest([made, 1]), made.model_dump_json()


@pytest.mark.parametrize("values", GIVEN, ids=str)
def test_a_request_is_the_one_that_validation_makes(values: dict[str, Any]) -> None:
    assert outcome(new_request, values) == outcome(EnqueueRolloutRequest, values)


class Counted(Mapping[str, int]):
    """A mapping that counts the iterations over it."""

    def __init__(self) -> None:
        self.times = 0

    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Key(enum.StrEnum):
    NAME = "name"


@pytest.mark.parametrize("key", ["näme", Key.NAME])
def test_what_is_nested_under_unusual_keys_is_converted_once(key: str) -> None:
    counted = Counted()
    value: object = counted
    for _ in range(8):
        value = {"a": value, key: "ü"}
    made = to_json(value)
    assert counted.times == 1
    for _ in range(8):
        assert [*map(type, made)] == [str, str]
        assert made[str(key)] == "ü"
        made = made["a"]
    assert made == {"a": 1}


class Proxy:
    """An object that reports the class of its target, as the proxies of frameworks do."""

    def __init__(self, target: str) -> None:
        self.target = target

    @property
    def __class__(self) -> type[str]:  # pyright: ignore[reportIncompatibleMethodOverride] -- what a proxy does
        return str

    def __str__(self) -> str:
        return self.target

    def isascii(self) -> bool:
        return self.target.isascii()


def test_a_proxy_becomes_what_it_stands_for() -> None:
    made = to_json({"a": Proxy("text"), "b": [Proxy("text")]})
    assert made == {"a": "text", "b": ["text"]}
    assert [type(made["a"]), type(made["b"][0])] == [str, str]


def test_conditions_that_a_program_assigned_as_a_tuple_are_handed_out_as_a_list() -> None:
    config = RolloutConfig(max_attempts=2)
    config.retry_condition = ("timeout",)  # pyright: ignore[reportAttributeAccessIssue] -- what a program may do
    rollout = Rollout(rollout_id="ro", input=1, start_time=0.0)
    rollout.config = config
    assert public_rollout(rollout).config.retry_condition == ["timeout"]
