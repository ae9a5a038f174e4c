"""`agl export` as a user calls it: a folder in, a folder out, or one line with the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")

from agentlightning.cli import main
from tests.algorithm.parts import save_untrained_model


def test_a_model_is_written_in_the_form_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_untrained_model(tmp_path / "model"))
    assert main(["export", model, "--out", str(tmp_path / "out")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["export", model, "--format", "adapter", "--out", str(tmp_path / "other")]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert main(["export", model, "--out", str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_place_without_a_model_and_a_store_that_is_not_there_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert main(["export", "run-1", "--store", str(tmp_path / "none.db"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "'run-1' is neither the folder of a checkpoint, run or model nor the id of a run" in error
    assert "none.db' not found" in error
    assert "Or pass an existing folder" in error
