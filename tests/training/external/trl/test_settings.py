"""The settings of TRL: the page of settings lists those of the installed version, and its program for TRL runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed (make test-trl)")

from agentlightning.training.external.trl.settings import _REFUSED
from tests.packaging import learning_settings as page
from tests.packaging.test_learning_settings import SHORTER, run_program


def test_the_settings_on_the_page_are_those_of_the_installed_version() -> None:
    assert page.names_of("trl") == page.installed("trl"), "run: python -m tests.packaging.learning_settings trl"


def test_settings_that_the_page_leaves_to_agl_trl_are_not_refused_by_it() -> None:
    left = {name for line in page.lines_of("trl") for name in line.names if "`agl.TRL`" in line.note}
    assert "torch_compile" in left
    assert left & set(_REFUSED) == set()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")  # of TRL
def test_the_program_of_trl_on_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SHORTER, 'output_dir="runs/words"', 'output_dir="runs", use_cpu=True, bf16=False')
    trainer = run_program(0)
    assert trainer.state.global_step == 1
