"""What a run began with is read from its folder, and from nothing else that lies there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.training.resume import RUN_FILE, read_run_file, write_run_file

_FACTS = {"run_id": "a", "settings": {}, "model_files": "", "tasks": [], "held_out": [], "folder": "here"}


def test_the_facts_of_a_run_are_read_for_that_run_only(tmp_path: Path) -> None:
    assert read_run_file(tmp_path, "a") is None
    write_run_file(tmp_path, _FACTS)
    assert read_run_file(tmp_path, "a") == _FACTS
    assert read_run_file(tmp_path, "b") is None


@pytest.mark.parametrize("other", [[], "a", {"name": "of another program"}, {"run_id": "a", "state": "succeeded"}])
def test_a_file_of_that_name_by_another_program_is_no_run(tmp_path: Path, other: object) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(other))
    assert read_run_file(tmp_path, "a") is None
