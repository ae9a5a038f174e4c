"""Tests of HarborAgent, with the real Harbor in an environment of its own: make test-harbor."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.environments.harbor import trial_folder

pytest.importorskip("harbor", reason="Harbor is in an environment of its own: make test-harbor")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the trials of one test, which is empty at its end."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    folder = Path(tempfile.mkdtemp(prefix="agl-harbor-test-", dir=trial_folder.BASE))
    folder.chmod(0o755)
    monkeypatch.setattr(trial_folder, "BASE", folder)
    monkeypatch.setenv("AGL_TOKEN", "the-secret-of-the-server")  # the gateway demands keys
    yield folder
    left = list(trial_folder.parent_folder().iterdir())
    shutil.rmtree(folder)
    assert left == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of Harbor and its packages; ours stay errors."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in ("ignore", "error:::agentlightning"):
                item.add_marker(pytest.mark.filterwarnings(warning))
