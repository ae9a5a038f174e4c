"""One condition gives one alarm when it begins and one when it is over, whatever the figures in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule
from agentlightning.training.alarms.watch import Alarm, Watch
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class Failed(Rule):
    """More than 10 rollouts fail; a step of 99 failed ones tells nothing."""

    name = "failed"
    what_to_try = "look"

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        value = steps[-1].rollouts_failed
        return None if value == 99 else self.above(value, 10, f"{value} failed")


def told(values: Sequence[int], rule: Rule) -> list[Alarm]:
    """The alarms over steps with so many failed rollouts."""
    watch, steps, found = Watch(rule), list[StepFigures](), list[Alarm]()
    for number, value in enumerate(values, start=1):
        steps.append(StepFigures(number, 100, 0.5, 1, value, 1, 1, {}, 1.0, {}))
        if (alarm := watch.see(steps)) is not None:
            found.append(alarm)
    return found


def test_an_alarm_comes_after_so_many_steps_in_a_row_and_once() -> None:
    [alarm] = told([0, 20, 0, 20, 20, 20, 20], Failed())
    assert (alarm.state, alarm.step, alarm.since, alarm.value, alarm.threshold) == ("raised", 5, 5, 20, 10)
    assert alarm.line == "step 5: alarm failed: 20 failed. To try: look"


def test_it_is_over_once_the_value_is_well_on_the_right_side_and_can_come_again() -> None:
    values = [20, 20, 10, 10, 10, 8, 8, 20, 20]
    found = told(values, Failed())
    assert [(alarm.state, alarm.step, alarm.since) for alarm in found] == [
        ("raised", 2, 2), ("over", 7, 2), ("raised", 9, 9),
    ]  # fmt: skip
    assert found[1].what_to_try == ""
    assert found[1].line == "step 7: alarm failed (since step 2) is over: 8 failed"


def test_a_step_that_tells_nothing_breaks_no_row() -> None:
    assert [alarm.step for alarm in told([20, 99, 99, 20], Failed())] == [4]


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_alarms_alternate_and_each_is_backed_by_its_steps_in_a_row(values: list[int], patience: int) -> None:
    found = told(values, Failed(patience=patience))
    assert [alarm.state for alarm in found] == [("raised", "over")[place % 2] for place in range(len(found))]
    for before, alarm in zip([None, *found], found, strict=False):
        row = values[alarm.step - patience : alarm.step]
        assert len(row) == patience
        assert all(value > 10 if alarm.state == "raised" else value <= 9 for value in row)
        if alarm.state == "over" and before is not None:
            assert alarm.since == before.step


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 40))
def test_a_run_that_goes_on_says_what_one_without_a_break_says(values: list[int], cut: int) -> None:
    whole = told(values, Failed())
    first = told(values[:cut], Failed())
    assert whole[: len(first)] == first
    assert all(alarm.step > cut for alarm in whole[len(first) :])
