"""The display of a run: plain lines into a pipe or file, a live table on a terminal, nothing when switched off."""

from __future__ import annotations

import io

import pytest

from agentlightning.training.progress import Live, Plain, Progress, StepFigures, excluded_text, make_progress, step_line
from tests.cli.terminal import on_terminal


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def _figures(step: int = 3, **changes: object) -> StepFigures:
    values: dict[str, object] = {
        "step": step,
        "steps": 20,
        "mean_reward": 0.4375,
        "rollouts_done": 125,
        "rollouts_failed": 3,
        "calls_captured": 250,
        "calls_trained": 200,
        "calls_excluded": {"equal_rewards": 40, "no_tokens": 0, "infrastructure_fault": 10},
        "tokens_per_second": 1234.5,
        "seconds": {"generate": 1.25, "wait": 0.5, "train": 0.75},
        "held_out": None,
    }
    return StepFigures(**{**values, **changes})  # type: ignore[arg-type]


def test_a_step_is_one_line_with_all_figures() -> None:
    changes = {"held_out_tasks": 8, "held_out_change": {"p_value": 0.7266}}
    assert step_line(_figures(held_out=0.5, held_out_solved=0.5, **changes)) == (
        "step   3/20  reward 0.438  held-out 0.500 (8 tasks, 50.0% solved, p = 0.73 against the best before)  "
        "rollouts 125 done 3 failed  "
        "calls: 200 trained, 50 excluded (equal_rewards 40, infrastructure_fault 10)  "
        "1234 tok/s  generate 1.25s  wait 0.50s  train 0.75s"
    )

    line = step_line(_figures(mean_reward=None))
    assert "reward -" in line
    assert "held-out" not in line
    assert "held-out 0.500 (1 task)  " in step_line(_figures(held_out=0.5, held_out_tasks=1))
    assert excluded_text({"no_group": 1, "equal_rewards": 5, "stale": 0}) == "6 excluded (equal_rewards 5, no_group 1)"
    assert excluded_text({}) == "0 excluded"


def test_a_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    progress = make_progress("auto", stream)
    progress.note("held-out after 0 updates")
    progress.rollouts(3, 128, "step 1")
    progress.step(_figures())
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines == ["held-out after 0 updates", step_line(_figures())]


def test_a_terminal_gets_a_table_of_the_latest_steps_and_notes_as_they_are_written(terminal: Terminal) -> None:
    progress = make_progress("auto", terminal)
    assert isinstance(progress, Live)
    progress.note("[Worker 0] [bold]not a style[/bold]")
    progress.rollouts(3, 128, "step 3")
    for step in range(1, 20):
        progress.step(_figures(step, held_out=0.5, held_out_solved=0.5, held_out_tasks=8))
    shown = terminal.getvalue()
    terminal.truncate(0)
    progress.close()
    last = terminal.getvalue()
    assert "[Worker 0] [bold]not a style[/bold]" in shown
    for text in ("held-out", "4/8", "0.438", "equal_rewards 40", "1234", "1.25", "19/20"):
        assert text in last
    assert " 1/20" not in last
    assert "\x1b[" in last
    assert last.rstrip("\n").endswith("\x1b[?25h")  # the cursor is visible again


def test_the_style_can_be_chosen_whatever_the_stream_is(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(make_progress("plain", terminal), Plain)
    progress = make_progress("none", terminal)
    progress.note("x")
    progress.step(_figures())
    progress.close()
    assert terminal.getvalue() + capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout", None)
    assert type(make_progress("auto")) is Progress, "a process without standard output shows nothing"


SHOW_STEPS = """
from agentlightning.training.progress import StepFigures, make_progress
progress = make_progress("auto")
seconds = {"generate": 12.34, "wait": 0.12, "train": 123.45}
excluded = {"equal_rewards": 80, "no_tokens": 10}
more = {"held_out": 0.957, "held_out_solved": 0.957, "held_out_tasks": 256, "rollouts_excluded": {"refused_call": 3}}
progress.step(StepFigures(16, 16, 0.125, 120, 8, 2500, 90, excluded, 12345.6, seconds, **more))
progress.close()
"""


def test_the_table_has_whole_headers_and_figures_on_a_terminal_of_80_columns() -> None:
    code, lines = on_terminal(program=("-c", SHOW_STEPS))
    assert code == 0
    header, figures = [line for line in lines if line.lstrip().startswith(("step", "16/16"))][-2:]
    assert " ".join(header.split()) == "step reward held-out done failed trained excluded tok/s gen s wait s train s"
    assert {"16/16", "0.125", "245/256", "120", "12346", "12.34", "0.12", "123.45"} <= set(figures.split())
    assert all(len(line) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in line for line in lines)
