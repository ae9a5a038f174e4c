"""The untrained model of the tests of whole runs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that knows nothing."""
    from tests.algorithm.parts import save_untrained_model

    return save_untrained_model(tmp_path_factory.mktemp("model"))
