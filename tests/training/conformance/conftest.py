"""One suite for all algorithms that train weights: every test of this folder runs with each for which it makes sense.

TRL and VERL are in environments of their own: `make test-trl`, `make test-verl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tests.training.external.verl.conftest  # noqa: F401 -- the environment of VERL's processes  # pyright: ignore[reportUnusedImport]
from tests.trackers.parts import Remembers
from tests.training.conformance.cases import Books, Case, fit_whole, read


@dataclass
class Whole:
    """A run that nothing interrupted."""

    folder: Path
    result: Any
    books: Books
    tracker: Remembers


@pytest.fixture(scope="session")
def whole(case: Case, untrained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train once with each algorithm; `case` is the parameter of the test."""
    folder, tracker = tmp_path_factory.mktemp(case.name), Remembers()
    settings: dict[str, Any] = {
        "alarms": {"policy_shift": {"limit": 1e-12}},
        "trainer_rollout_config": {"max_attempts": 2, "retry_condition": ["unresponsive"]},
        "step_timeout_seconds": 90.0,
        "trainer_trackers": [tracker],
    }
    result = fit_whole(case, untrained_model, folder, **settings)
    return Whole(folder, result, read(folder), tracker)
