"""The interval that fits the values, and the one that is named."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.evaluation.intervals import interval_of


@pytest.mark.parametrize(
    ("values", "method", "used", "low", "high"),
    [
        ([1.0] * 8 + [0.0] * 2, None, "wilson", 0.4902, 0.9433),
        ([1.0] * 8 + [0.0] * 2, "exact", "exact", 0.4439, 0.9748),
        ([0.1, 0.2, 0.3, 0.4], None, "student", 0.0446, 0.4554),
        ([0.1, 0.2, 0.3, 0.4], "bootstrap", "bootstrap", 0.15, 0.35),
    ],
)
def test_the_method_is_chosen_and_told(values: list[float], method: Any, used: str, low: float, high: float) -> None:
    found = interval_of(values, method=method)
    assert found is not None
    assert found.method == used
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))


def test_nothing_has_no_interval_and_one_value_a_mean_only() -> None:
    assert interval_of([]) is None
    found = interval_of([0.25])
    assert found is not None
    assert found.text() == "0.250"


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        ([0.5], {"method": "wilson"}, "for rewards of 0 and 1; got 0.5"),
        ([0.5], {"method": "normal"}, "must be one of wilson, exact, student, bootstrap"),
        ([1.0], {"confidence": 0.0}, r"confidence=0\.0"),
    ],
)
def test_a_method_that_does_not_fit_is_refused(values: list[float], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        interval_of(values, **settings)
