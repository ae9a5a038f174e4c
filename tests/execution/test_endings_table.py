"""Every ending of a run, in every layout: within its time, with its exit code, and nothing is left.

A few cells run by default; the whole table is for `make test-heavy`, and `python -m tests.execution.endings` prints it.
"""

from __future__ import annotations

import pytest

from tests.execution.endings import EXIT_CODES, LIMIT_SECONDS, cells, observe

DEFAULT = {
    ("shm, algorithm on the main thread", "SIGTERM to the program"),
    ("cs, fork", "SIGTERM to the program"),
    ("cs, fork", "kill -9 of a child"),
    ("cs, fork", "kill -9 of the program"),
    ("cs, runner in the main process", "kill -9 of the program"),
    ("cs, runner in the main process", "the algorithm returns, work is queued"),
}


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("layout", "ending"),
    [pytest.param(*cell, marks=() if cell in DEFAULT else pytest.mark.heavy) for cell in cells()],
)
def test_an_ending_is_quick_and_leaves_nothing(layout: str, ending: str) -> None:
    observation = observe(layout, ending)
    assert observation.exit_code == EXIT_CODES[ending], observation.output
    assert observation.left == [], observation.output
    assert observation.seconds < LIMIT_SECONDS
