"""One condition gives one alarm when it begins and one when it is over, whatever the figures in between."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import BadRequestError
from agentlightning.training.alarms import RULES, Alarm, Alarms, Measurement, Rule, Watch, make_rules
from agentlightning.training.progress import StepFigures
from tests.training.test_alarm_rules import PAGE, step


def failed(steps: Sequence[StepFigures]) -> Measurement | None:
    """More than 10 rollouts fail; a step of 99 failed ones tells nothing."""
    value = steps[-1].rollouts_failed
    return None if value == 99 else Measurement(value, 10, f"{value} failed", value > 10)


def told(values: Sequence[int], patience: int = 2) -> list[Alarm]:
    """The alarms over steps with so many failed rollouts."""
    watch = Watch(Rule("failed", "look", failed, {"patience": patience, "margin": 0.1}))
    steps = [step(number, rollouts_failed=value) for number, value in enumerate(values, start=1)]
    return [alarm for end in range(1, len(steps) + 1) if (alarm := watch.see(steps[:end])) is not None]


def test_an_alarm_comes_after_so_many_steps_in_a_row_and_once() -> None:
    [alarm] = told([0, 20, 0, 20, 20, 20, 20])
    assert (alarm.state, alarm.step, alarm.since, alarm.value, alarm.threshold) == ("raised", 5, 5, 20, 10)
    assert alarm.line == "step 5: alarm failed: 20 failed. To try: look"


def test_it_is_over_once_the_value_is_well_on_the_right_side_and_can_come_again() -> None:
    found = told([20, 20, 10, 10, 10, 8, 8, 20, 20])
    assert [(alarm.state, alarm.step, alarm.since) for alarm in found] == [
        ("raised", 2, 2), ("over", 7, 2), ("raised", 9, 9),
    ]  # fmt: skip
    assert found[1].what_to_try == ""
    assert found[1].line == "step 7: alarm failed (since step 2) is over: 8 failed"


def test_a_step_that_tells_nothing_breaks_no_row() -> None:
    assert [alarm.step for alarm in told([20, 99, 99, 20])] == [4]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_alarms_alternate_and_each_is_backed_by_its_steps_in_a_row(values: list[int], patience: int) -> None:
    found = told(values, patience)
    assert [alarm.state for alarm in found] == [("raised", "over")[place % 2] for place in range(len(found))]
    for before, alarm in zip([None, *found], found, strict=False):
        row = values[alarm.step - patience : alarm.step]
        assert len(row) == patience
        assert all(value > 10 if alarm.state == "raised" else value <= 9 for value in row)
        if alarm.state == "over" and before is not None:
            assert alarm.since == before.step


def test_a_whole_run_in_figures_gives_each_alarm_once() -> None:
    alarms = Alarms()
    figures = [step(number) for number in range(1, 6)]
    figures += [step(number, update={"entropy": 0.05}, drift_rate=0.2) for number in range(6, 12)]
    figures += [step(number) for number in range(12, 16)]
    found = [(alarm.name, alarm.state, alarm.step) for one in figures for alarm in alarms.see(one)]
    assert found == [
        ("entropy_collapse", "raised", 7), ("token_drift", "raised", 7),
        ("entropy_collapse", "over", 13), ("token_drift", "over", 13),
    ]  # fmt: skip


def test_thresholds_are_set_by_rule_and_none_switches_a_rule_off() -> None:
    rules = {rule.name: rule for rule in make_rules({"cut_off": {"limit": 0.9, "patience": 1}, "no_calls": None})}
    assert rules.keys() == RULES.keys() - {"no_calls"}
    assert rules["cut_off"].thresholds == {"patience": 1, "margin": 0.1, "limit": 0.9}
    assert make_rules("none") == []
    assert len(make_rules("default")) == len(RULES)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"entropy": {}}, "there is no rule 'entropy'"),
        ({"entropy_colapse": {}}, "Did you mean 'entropy_collapse'"),
        ({"cut_off": {"limt": 1}}, "cut_off has no threshold 'limt'. Did you mean 'limit'"),
        ({"cut_off": 0.5}, "cut_off takes thresholds by name, of patience, margin, limit, or None; got 0.5"),
        ({"cut_off": {"limit": math.nan}}, "cut_off.limit must be a number of at least 0; got nan"),
        ({"cut_off": {"patience": 0}}, "cut_off.patience must be a whole number of at least 1; got 0"),
        ({"cut_off": {"patience": 1.5}}, "whole number of at least 1; got 1.5"),
        ({"cut_off": {"limit": True}}, "got True"),
        ({"cut_off": {"margin": 1}}, "cut_off.margin is a share, below 1; got 1"),
        ({"length_drift": {"factor": 0.5}}, "length_drift.factor must be above 1; got 0.5"),
        ({3: {}}, "there is no rule 3"),
        ("all", "alarms must be 'default', 'none', or thresholds by rule"),
        (True, "got True"),
        ([], r"got \[\]"),
    ],
)
def test_what_cannot_be_a_setting_is_refused_with_what_could(given: object, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        make_rules(given)


def test_the_program_of_the_page_runs() -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(program, names)
    assert names["algorithm"].settings.alarms["cut_off"] is None  # type: ignore[attr-defined]
