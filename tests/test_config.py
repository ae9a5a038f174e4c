"""Constructors as a command line."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

import agentlightning as agl
from agentlightning.config import lightning_cli, nullable_str


class Machine:
    def __init__(self, host: str, port: int = 4747, tags: list[str] | None = None, limit: float | None = 1.5) -> None:
        self.host, self.port, self.tags, self.limit = host, port, tags, limit


class Plan:
    def __init__(self, n_steps: int = 3, fast: bool = False) -> None:
        self.n_steps, self.fast = n_steps, fast


def test_options_become_typed_arguments_with_dashes_or_underscores() -> None:
    machine, plan = lightning_cli(
        Machine,
        Plan,
        argv=["--machine.host", "h-1", "--machine.tags=[a-b,c]", "--machine.limit", "null", "--plan.n-steps", "7"],
    )
    assert (machine.host, machine.port, machine.tags, machine.limit) == ("h-1", 4747, ["a-b", "c"], None)
    assert (plan.n_steps, plan.fast) == (7, False)
    assert lightning_cli() == ()
    assert lightning_cli(Plan, argv=["--plan.fast", "true"]).fast is True


class Lists:
    def __init__(
        self,
        texts: list[str] | None = None,
        some: list[Optional[str]] = [],  # noqa: B006, UP045 -- as programs of an earlier Python write it
        numbers: list[int | None] | None = None,
    ) -> None:
        self.texts, self.some, self.numbers = texts, some, numbers


@pytest.mark.parametrize(
    ("argv", "texts", "some", "numbers"),
    [
        (["--lists.some", "a", "null", "None"], None, ["a", None, None], None),
        (["--lists.some", "null"], None, [None], None),
        (["--lists.some=nil"], None, [None], None),
        (["--lists.some=[a b, null]"], None, ["a b", None], None),
        (["--lists.texts", "a", "null"], ["a", "null"], [], None),
        (["--lists.texts", "null"], None, [], None),
        (["--lists.numbers", "1", "~", "3"], None, [], [1, None, 3]),
        (["--lists.numbers", "null"], None, [], None),
    ],
)
def test_null_in_a_list_is_none_where_its_type_says_so(
    argv: list[str], texts: list[str] | None, some: list[str | None], numbers: list[int | None] | None
) -> None:
    lists = lightning_cli(Lists, argv=argv)
    assert (lists.texts, lists.some, lists.numbers) == (texts, some, numbers)


def test_a_file_may_hold_the_options(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("machine:\n  host: from-file\n  port: 1\n")
    assert lightning_cli(Machine, argv=["--config", str(path), "--machine.port", "2"]).port == 2


def test_a_wrong_or_missing_option_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--machine.port", "1"], ["--machine.host", "h", "--machine.port", "x"], ["--machine.colour", "x"]):
        with pytest.raises(SystemExit) as ended:
            lightning_cli(Machine, argv=argv)
        assert ended.value.code == 2
    assert "machine.host" in capsys.readouterr().err


def test_words_for_none() -> None:
    assert [nullable_str(word) for word in ("None", "~", "null", "nil", "nothing")] == [
        None,
        None,
        None,
        None,
        "nothing",
    ]


# --- modern types ----------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "#f00"
    BLUE = "#00f"


class Modern:
    """A class with what is written today.

    Args:
        old: deprecated.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["fast", "exact"] = "fast",
        colour: Colour = Colour.RED,
        weights: dict[str, float] | None = None,
        steps: int | None = 3,
        sizes: list[int] | None = None,
        names: list[str] | None = None,
        loud: bool = False,
        anything: Any = None,
        old: int = 1,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name != "self"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--modern.mode exact", {"mode": "exact"}),
        ("--modern.colour BLUE", {"colour": Colour.BLUE}),
        ("--modern.colour #00f", {"colour": Colour.BLUE}),
        ("--modern.weights {a:\u00a01.5}", {"weights": {"a": 1.5}}),
        ("--modern.steps none", {"steps": None}),
        ("--modern.steps=NIL", {"steps": None}),
        ("--modern.sizes 1 2 3 --modern.loud y", {"sizes": [1, 2, 3], "loud": True}),
        ("--modern.names 1 two", {"names": ["1", "two"]}),
        ("--modern.names [a,b]", {"names": ["a", "b"]}),
        ("--modern.loud T", {"loud": True}),
        ("--modern.loud=0", {"loud": False}),
        ("--modern.anything [1,2]", {"anything": [1, 2]}),
        ("--modern.old 7", {"old": 7}),
    ],
)
def test_each_type_is_read_as_people_write_it(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    argv = ["--modern.path", str(tmp_path), *(word.replace("\u00a0", " ") for word in words.split(" "))]
    values = lightning_cli(Modern, argv=argv).given
    assert {name: values[name] for name in expected} == expected
    assert values["path"] == tmp_path


def test_a_value_that_is_none_of_the_choices_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--modern.mode", "slow"], ["--modern.colour", "green"], ["--modern.loud", "maybe"]):
        with pytest.raises(SystemExit) as ended:
            lightning_cli(Modern, argv=["--modern.path", "x", *words])
        assert ended.value.code == 2
    assert "modern.loud" in capsys.readouterr().err


def test_what_is_deprecated_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lightning_cli(Modern, argv=["--help"])
    shown = capsys.readouterr().out
    assert "--modern.steps" in shown
    assert "--modern.old" not in shown


def test_the_parts_of_a_trainer_are_names_import_paths_or_dicts() -> None:
    trainer = lightning_cli(
        agl.Trainer,
        argv=[
            *("--trainer.n-runners", "2", "--trainer.algorithm", "baseline"),
            *("--trainer.strategy", "{type: cs, server_port: 0, graceful_timeout: 3}"),
            *("--trainer.tracer", "agentlightning.tracer.dummy.DummyTracer", "--trainer.max-rollouts", "none"),
        ],
    )
    assert isinstance(trainer.algorithm, agl.Baseline)
    assert isinstance(trainer.tracer, agl.DummyTracer)
    assert isinstance(trainer.strategy, agl.ClientServerExecutionStrategy)
    assert (trainer.n_runners, trainer.strategy.graceful_timeout, trainer.max_rollouts) == (2, 3, None)
