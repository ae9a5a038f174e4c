"""`RolloutMode` is a type in annotations and fields, and has each mode as an attribute."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel, ValidationError

import agentlightning as agl
from agentlightning.types import core, mode

Modes: Any = agl.RolloutMode
"""For checkers it is a type alone."""


def test_each_mode_has_its_names() -> None:
    assert {Modes.TRAIN, Modes.TRAINING} == {"train"}
    assert {Modes.VAL, Modes.VALIDATION, Modes.EVAL, Modes.EVALUATION} == {"val"}
    assert {Modes.TEST, Modes.TESTING, Modes.INFERENCE} == {"test"}
    assert core.RolloutMode is agl.RolloutMode


@pytest.mark.parametrize("name", ["VALUATION", "train"])
def test_another_mode_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no '{name}'.*RolloutMode.TRAINING.*RolloutMode.VALIDATION.*'test'"):
        getattr(Modes, name)
    assert not hasattr(Modes, name)


class Note(BaseModel):
    mode: agl.RolloutMode | None = None
    others: list[agl.RolloutMode] = []
    default: agl.RolloutMode = Modes.TRAINING


def test_it_is_the_literal_type_for_whoever_reads_annotations() -> None:
    literal = Literal["train", "val", "test"]
    assert (agl.RolloutMode, hash(agl.RolloutMode), repr(agl.RolloutMode)) == (literal, hash(literal), repr(literal))
    assert typing.get_args(agl.RolloutMode) == ("train", "val", "test")
    assert typing.get_origin(agl.RolloutMode) is Literal
    assert agl.RolloutMode | None == Optional[literal]  # noqa: UP045 -- the older form of the same
    assert inspect.signature(agl.LightningStore.enqueue_rollout).parameters["mode"].default is None
    assert Note(mode="val", others=["test"]).model_dump() == {"mode": "val", "others": ["test"], "default": "train"}
    with pytest.raises(ValidationError, match="'train', 'val' or 'test'"):
        Note.model_validate({"mode": "eval"})
    assert pickle.loads(pickle.dumps(agl.RolloutMode)) is agl.RolloutMode
    assert copy.deepcopy(agl.RolloutMode) is agl.RolloutMode


class _OtherForm:
    """A type form that is made in another way than today's."""

    def __init_subclass__(cls, **_: Any) -> None: ...


@pytest.mark.parametrize("form", [int | str, _OtherForm()])
def test_where_python_refuses_the_names_it_is_the_plain_type(form: Any) -> None:
    assert vars(mode)["_with_names"](form) is form
