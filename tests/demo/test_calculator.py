"""The calculator evaluates the expressions that a model may write, and answers `error` to the rest."""

from __future__ import annotations

import pytest

from agentlightning.demo.calculator import calculate, run_tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("34 + 5", "39"),
        ("5 - 34", "-29"),
        ("12 * 12", "144"),
        ("5 / 2", "2.5"),
        ("6 / 3", "2"),
        (" (1 + 2) * -3 ", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("99999999999999999999 * 10", "999999999999999999990"),
    ],
)
def test_it_works_out_the_basic_operations(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "34 plus 5",
        "3and 4",
        "1 / 0",
        "2 ** 9999999",
        "9 // 2",
        "3 (4)",
        "007",
        "__import__('os')",
        "1" * 300,
        "(" * 90,
        "True",
    ],
)
def test_it_says_error_and_never_raises_or_warns(expression: str) -> None:
    assert calculate(expression) == "error"


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", '{"expression": "1 + 2"}', "3"),
        ("abacus", '{"expression": "1 + 2"}', "error"),
        ("calculator", '{"sum": "1 + 2"}', "error"),
        ("calculator", '{"expression": 3}', "error"),
        ("calculator", "[1]", "error"),
        ("calculator", "not json", "error"),
    ],
)
def test_a_call_of_the_model_is_run_or_answered_with_error(name: str, arguments: str, result: str) -> None:
    assert run_tool(name, arguments) == result
