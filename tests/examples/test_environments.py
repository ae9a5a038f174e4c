"""The environments of examples: what is in their files, and what is said of a name that has none."""

from __future__ import annotations

import re

import pytest

from tests.examples.environments import examples, main
from tests.examples.shown import EXAMPLES, RECIPES
from tests.frameworks.environments import in_turn

FOLDERS = {path.parent.name: path.parent for path in EXAMPLES.glob("*/constraints.txt")}
FOLDERS |= {path.parents[1].name: path.parent for path in RECIPES.glob("*/agl/constraints.txt")}
NAMES = sorted(FOLDERS)


def test_an_example_with_constraints_has_an_environment_and_asks_for_something() -> None:
    assert sorted(examples()) == NAMES
    assert "own_store" not in examples(), "it needs nothing that the main environment lacks"


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_asked_for_is_pinned_to_one_version_that_any_machine_is_offered(name: str) -> None:
    def lines(file: str) -> list[str]:
        return [line for line in (FOLDERS[name] / file).read_text().splitlines() if not line.startswith("#")]

    pinned = lines("constraints.txt")
    assert [line for line in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+( ;.*)?", line)] == []
    asked = {re.split(r"[\[<>=~ ]", line)[0] for line in lines("requirements.txt")}
    assert asked - {line.split("==")[0] for line in pinned} == set()


def test_an_example_without_an_environment_is_named_with_those_that_have_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["minimal"])
    assert "no environment of minimal; there are those of" in capsys.readouterr().err


def test_commits_take_the_examples_with_an_environment_in_turn() -> None:
    taken = {name for first in range(len(NAMES)) for name in in_turn(NAMES, 1, f"{first:012x}")}
    assert taken == set(NAMES)
