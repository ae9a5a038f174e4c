"""The settings of VERL: those that the page of settings lists are those of the installed version."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not installed (make test-verl)")

from tests.packaging import learning_settings as page


def test_the_settings_on_the_page_are_those_of_the_installed_version() -> None:
    assert page.names_of("verl") == page.installed("verl"), "run: python -m tests.packaging.learning_settings verl"
