"""The page on settings of other libraries: complete, true about ours, and its program runs."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.external.verl.settings import _FIXED
from agentlightning.training.settings import GRPOSettings
from tests.packaging import learning_settings as page
from tests.pages import blocks

each_library = pytest.mark.parametrize("library", page.LIBRARIES)


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text() == page.page(), "run: python -m tests.packaging.learning_settings"


@each_library
def test_every_setting_of_a_library_has_a_line_and_every_line_a_setting(library: str) -> None:
    found = page.chosen(library)
    assert [name for name in page.names_of(library) if name not in found] == []
    matched = {(line, name) for line, name in found.values()}
    assert [name for line in page.lines_of(library) for name in line.names if (line, name) not in matched] == []


@each_library
def test_a_setting_without_a_counterpart_has_a_reason(library: str) -> None:
    lines = page.lines_of(library)
    assert [line.names for line in lines if not line.ours and not line.note] == []
    not_one = [line.note for line in lines if line.note and (line.note[-1] != "." or ". " in line.note)]
    assert not_one == [], "a note is one sentence"


def test_settings_that_the_page_leaves_to_agl_verl_are_not_refused_by_it() -> None:
    leaves = re.compile(r"(use|with) `agl\.VERL`")
    left = {name for name, (line, _) in page.chosen("verl").items() if leaves.search(line.note)}
    assert "trainer.nnodes" in left
    assert left & {name.removeprefix("actor_rollout_ref.") for name in _FIXED} == set()


def named() -> set[str]:
    """Return the settings of ours that the files name."""
    return {ours for library in page.LIBRARIES for line in page.lines_of(library) for ours in line.ours}


def test_our_settings_that_the_page_names_exist_or_are_coming() -> None:
    assert {ours for ours in named() if not page.exists(ours)} <= page.COMING
    assert {ours for ours in page.COMING if page.exists(ours)} == set(), "they came: remove them from COMING"


def test_every_setting_of_grpo_is_on_the_page() -> None:
    text = page.PAGE.read_text()
    assert [name for name in page.fields_of(GRPOSettings) if f"`{name}`" not in text] == []


def test_the_name_of_trl_for_a_setting_is_refused_with_ours() -> None:
    ours, elsewhere = page.fields_of(GRPOSettings), GRPOSettings.names_elsewhere
    renamed = [
        name
        for line in page.lines_of("trl")
        for name in line.names
        if len(line.names) == 1 and line.ours and all(one in ours for one in line.ours) and "." not in name
    ]
    assert "per_device_train_batch_size" in renamed
    assert [name for name in renamed if name not in ours and name not in elsewhere] == []
    with pytest.raises(
        TypeError, match=r"no setting 'per_device_train_batch_size'\. Use batch_size, which counts tasks"
    ):
        agl.GRPO("model", per_device_train_batch_size=8)


def test_the_program_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")
    monkeypatch.chdir(tmp_path)
    trainer = run_program(1)
    assert trainer.result.steps == 1
    assert (tmp_path / "runs/words/model/config.json").is_file()


SHORTER = {
    "path/to/model": "tiny",
    '"tree", "river", "cloud", "stone"': '"1", "2", "3", "4"',
    "max_steps=100": "max_steps=1",
    "max_completion_length=64": "max_completion_length=8",
}
"""What makes the programs short, and their task one that a model solves by chance: words of the page and others."""


def run_program(number: int) -> Any:
    """Run a program of the page for one step, with the untrained model of the demo, and return its trainer."""
    from agentlightning.demo.model import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    program = blocks("algorithms/settings.md")[number]
    for long, short in SHORTER.items():
        assert long in program
        program = program.replace(long, short)
    module = types.ModuleType("page")
    exec(compile(program, "settings.md", "exec"), vars(module))
    return module.trainer
