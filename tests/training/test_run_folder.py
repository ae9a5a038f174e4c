"""The folder of a run: made or refused, and whole lines in it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.training.run_folder import RunFolder, check_writable, new_run_folder, read_lines


def test_a_folder_is_made_with_its_parents_and_a_file_in_its_place_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = check_writable(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert not list(folder.iterdir())
    (folder / "file").write_text("mine")
    with pytest.raises(BadRequestError, match=r"output folder '.*file' cannot be written: File exists. Choose another"):
        check_writable(folder / "file")
    assert (folder / "file").read_text() == "mine"
    for parent in ("/proc", "/dev/null"):
        with pytest.raises(BadRequestError, match=f"output folder '{parent}/run' cannot be written"):
            check_writable(f"{parent}/run")


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [new_run_folder(tmp_path / "runs") for _ in range(4)]
    assert len(set(folders)) == 4
    assert all(folder.is_dir() and folder.parent == tmp_path / "runs" for folder in folders)


def test_a_folder_that_holds_figures_of_a_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.check_unused()
    folder.append_metrics({"step": 1})
    with pytest.raises(BadRequestError, match=r"already has a run\. Choose another folder"):
        RunFolder(tmp_path).check_unused()


def test_settings_of_several_parts_stand_side_by_side_with_the_versions(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_config(demo={"runners": 2, "tasks": Path("tasks.jsonl")})
    RunFolder(tmp_path).write_config(grpo={"seed": 1, "betas": (0.9, 0.99)})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["demo"] == {"runners": 2, "tasks": "tasks.jsonl"}
    assert config["grpo"] == {"seed": 1, "betas": [0.9, 0.99]}
    assert config["versions"]["python"].startswith("3.")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_metrics_are_one_line_of_json_per_step_and_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "update": {"loss": math.nan, "values": [1.0, math.inf]}})
    folder.append_metrics({"step": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "up')  # the process was killed
    assert read_lines(tmp_path / "metrics.jsonl") == {
        1: {"step": 1, "update": {"loss": None, "values": [1.0, None]}},
        2: {"step": 2},
    }


@contextlib.contextmanager
def full_disk(room: int) -> Generator[None]:
    """Have the system refuse to write more than so many bytes to a file, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_for_which_the_disk_has_no_room_are_kept_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "text": "x" * 50})
    with full_disk(100), caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            folder.append_metrics({"step": step, "text": "x" * 50})
        assert list(read_lines(tmp_path / "metrics.jsonl")) == [1], "whole lines only"
        with pytest.raises(OSError, match=r"too large.*metrics\.jsonl"):
            folder.finish()
    assert caplog.text.count("metrics.jsonl'. They stay in memory") == 1
    folder.append_metrics({"step": 5})
    folder.finish()
    assert list(read_lines(tmp_path / "metrics.jsonl")) == [1, 2, 3, 4, 5]
