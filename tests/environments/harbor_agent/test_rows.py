"""The rows of each harness with a real template and tokenizer: docs/how-to/harnesses.md explains the numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers", reason="the tokenizer's library is not installed: make test-harbor")

from pathlib import Path

from tests.environments.harbor_agent.chat_engine import WEIGHTS
from tests.environments.harbor_agent.harness_rows import Case, measure, rows_of, tools_of
from tests.environments.harbor_agent.test_harbor_agent import Done

pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="no tokenizer: make build/prompts/.fetched")

EACH_TURN = [1] * 6
WORK = {
    # the template as published, and the same template when it trims texts
    "mini-swe-agent": ([1, 5], [6]),
    "pi": ([1, 5], [6]),
    "opencode": (EACH_TURN, [6]),
    "qwen-coder": (EACH_TURN, [6]),
    "claude-code": ([1, 3, 2], [4, 2]),  # it writes replace_all into the calls of its tool Edit
    "codex": (EACH_TURN, [6]),
}
AGENT = {"opencode": [4, 2], "qwen-coder": [4, 2], "claude-code": [4, 2], "codex": [5, 2]}


def measured(case: Case, folder: Path) -> Done:
    """Run a case, and check that each call is in one row or excluded as a helper, and each token is trained."""
    if missing := [path for path in tools_of(case.harness) if not path.exists()]:
        pytest.skip(f"{missing[0].name} is not installed: make test-harbor")
    done = measure(case, folder)
    assert (done.end, done.attempt.error) == (("scored", None), None)
    in_rows = [ref for row in done.record.samples for ref in row.call_refs()]
    assert sorted([*in_rows, *done.record.exclusions]) == sorted(call.ref for call in done.record.calls)
    assert set(done.record.exclusions.values()) <= {"helper"}
    work = [call for call in done.record.calls if call.ref not in done.record.exclusions]
    assert sum(sum(row.mask) for row in done.record.samples) == sum(len(call.completion_token_ids) for call in work)
    return done


@pytest.mark.parametrize("name", WORK)
def test_text_before_a_tool_call_begins_a_row_with_the_published_template(name: str, tmp_path: Path) -> None:
    done = measured(Case(name, "qwen3"), tmp_path)
    assert rows_of(done) == WORK[name][0]
    assert done.attempt.reward == 1.0


@pytest.mark.parametrize("name", WORK)
def test_a_template_that_trims_texts_keeps_the_work_in_one_row(name: str, tmp_path: Path) -> None:
    done = measured(Case(name, "qwen3", trims=True), tmp_path)
    assert rows_of(done) == WORK[name][1]
    assert done.attempt.reward == 1.0


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["mini-swe-agent", "pi"])
def test_the_same_holds_without_thinking(name: str, tmp_path: Path) -> None:
    assert rows_of(measured(Case(name, "qwen2_5"), tmp_path)) == [1, 5]
    assert rows_of(measured(Case(name, "qwen2_5", trims=True), tmp_path / "trimmed")) == [6]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] if name in ("qwen-coder", "codex") else []) for name in AGENT]
)
def test_a_sub_agent_is_a_row(name: str, tmp_path: Path) -> None:
    done = measured(Case(name, "qwen2_5", trims=True, plot="agent"), tmp_path)
    assert sorted(rows_of(done), reverse=True) == AGENT[name]


@pytest.mark.parametrize("name", ["pi", "opencode", "claude-code", "codex"])
def test_a_shortened_context_begins_a_row_and_the_summary_is_excluded(name: str, tmp_path: Path) -> None:
    done = measured(Case(name, "qwen3", trims=True, plot="long"), tmp_path)
    assert rows_of(done) == [3, 3]
    assert "helper" in done.record.exclusions.values()


def test_each_call_with_other_json_than_the_templates_is_followed_by_a_new_row(tmp_path: Path) -> None:
    assert rows_of(measured(Case("pi", "qwen3", trims=True, spelling="own"), tmp_path)) == EACH_TURN
