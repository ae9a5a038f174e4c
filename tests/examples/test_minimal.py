"""examples/minimal: each program prints what its README shows."""

from __future__ import annotations

import pytest

from tests.examples.shown import Shown, run, same, shown


@pytest.mark.parametrize("one", shown("minimal"), ids=lambda one: one.command.split("/")[-1])
def test_each_program_prints_what_its_readme_shows(one: Shown) -> None:
    printed = run(one.command)
    assert same(printed, one.output, tolerance=0.02), printed
