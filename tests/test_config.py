"""Constructors as a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.config import lightning_cli, nullable_str


class Machine:
    def __init__(self, host: str, port: int = 4747, tags: list[str] | None = None, limit: float | None = 1.5) -> None:
        self.host, self.port, self.tags, self.limit = host, port, tags, limit


class Plan:
    def __init__(self, n_steps: int = 3, fast: bool = False) -> None:
        self.n_steps, self.fast = n_steps, fast


def test_options_become_typed_arguments_with_dashes_or_underscores() -> None:
    machine, plan = lightning_cli(
        Machine,
        Plan,
        argv=["--machine.host", "h-1", "--machine.tags=[a-b,c]", "--machine.limit", "null", "--plan.n-steps", "7"],
    )
    assert (machine.host, machine.port, machine.tags, machine.limit) == ("h-1", 4747, ["a-b", "c"], None)
    assert (plan.n_steps, plan.fast) == (7, False)
    assert lightning_cli() == ()
    assert lightning_cli(Plan, argv=["--plan.fast", "true"]).fast is True


def test_a_file_may_hold_the_options(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("machine:\n  host: from-file\n  port: 1\n")
    assert lightning_cli(Machine, argv=["--config", str(path), "--machine.port", "2"]).port == 2


def test_a_wrong_or_missing_option_ends_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--machine.port", "1"], ["--machine.host", "h", "--machine.port", "x"], ["--machine.colour", "x"]):
        with pytest.raises(SystemExit) as ended:
            lightning_cli(Machine, argv=argv)
        assert ended.value.code == 2
    assert "machine.host" in capsys.readouterr().err


def test_words_for_none() -> None:
    assert [nullable_str(word) for word in ("None", "~", "null", "nil", "nothing")] == [
        None,
        None,
        None,
        None,
        "nothing",
    ]
