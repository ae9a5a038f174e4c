"""Each rule is bad on its condition and fine on a healthy run; one condition gives one alarm and one end of it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import BadRequestError
from agentlightning.training.alarms import RULES, Alarm, Alarms, Measurement, make_rules
from agentlightning.training.progress import StepFigures

PAGE = (Path(__file__).parents[2] / "docs/how-to/watch-a-run.md").read_text()


def step(number: int = 1, *, update: dict[str, float] | None = None, **changes: Any) -> StepFigures:
    """Return a healthy step but for the changes."""
    figures: dict[str, Any] = {
        "step": number, "steps": 50, "mean_reward": 0.5, "rollouts_done": 16, "rollouts_failed": 0,
        "calls_captured": 32, "calls_trained": 32, "calls_excluded": {}, "tokens_per_second": 100.0, "seconds": {},
        "completion_tokens": 20.0, "cut_share": 0.0, "versions_behind": 0.0,
        "groups": {"compared": 4, "equal_rewards": 1}, "reward_error": 0.05,
        "reward_spread": 0.5,
        "update": {"steps": 1, "entropy": 1.0, "approx_kl": 0.01, "kl": 0.0, "first_ratio_error": 1e-4,
                   "clip_fraction": 0.0, **(update or {})},
    }  # fmt: skip
    return StepFigures(**{**figures, **changes})


def measured(name: str, *steps: StepFigures) -> Measurement:
    measurement = RULES[name].measure(steps)
    assert measurement is not None
    return measurement


# --- rules -----------------------------------------------------------------------------------------------------------

BAD: dict[str, list[dict[str, Any]]] = {
    "cut_off": [{"cut_share": 0.31}],
    "early_fall": [{"mean_reward": 0.31, "reward_error": 0.05}, {"mean_reward": 0.0, "reward_error": 0.0}],
    "engine_mismatch": [{"update": {"first_ratio_error": 0.21}}],
    "entropy_collapse": [{}, {}, {}, {"update": {"entropy": 0.09}}],
    "equal_rewards": [{"groups": {"compared": 16, "equal_rewards": 15}}],
    "held_out_drop": [{"held_out": 0.8}, {"held_out": 0.69}],
    "infrastructure": [{"rollouts_done": 7, "rollouts_failed": 9, "rollouts_excluded": {"infrastructure_fault": 9}}],
    "length_drift": [{}, {}, {}, {"completion_tokens": 41.0}],
    "no_calls": [{"calls_captured": 0, "calls_trained": 0}],
    "nothing_trained": [{"calls_trained": 0, "calls_excluded": {"equal_rewards": 32}}],
    "policy_shift": [{"update": {"update_kl": 0.51}}],
    "reference_distance": [{"update": {"kl": 1.1}}],
    "reward_jump": [{}, {}, {}, {}, {}, {"mean_reward": 0.24}],
    "stale_weights": [{"versions_behind": 2.1}],
    "token_drift": [{"drift_rate": 0.11}],
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_fine_on_a_healthy_run_and_bad_on_its_condition(name: str) -> None:
    healthy = measured(name, *(step(number, held_out=0.8) for number in range(1, 9)))
    assert (healthy.is_bad, healthy.is_fine(0.1)) == (False, True)
    steps = [step(number, **changes) for number, changes in enumerate(BAD[name], start=1)]
    assert measured(name, *steps).is_bad
    others = {other for other in RULES if (m := RULES[other].measure(steps)) is not None and m.is_bad} - {name}
    assert others <= {"nothing_trained"}, "one condition, one alarm; without any call nothing is trained either"
    empty = RULES[name].measure([*[step()] * 8, StepFigures(9, 50, None, 0, 0, 0, 0, {}, 0.0, {})])
    assert empty is None or name == "nothing_trained" or (name == "token_drift" and empty.is_fine(0.1))


SHRUNK = "replies have 9.0 tokens on average, 20.0 in the first 3 steps (limit 10.0)"
ROSE = "mean reward rose to 0.9; the mean of the 5 steps before is 0.5 (limit 0.25 from it)"
STALE = "the weights of stale tokens differ from the learner by 2.9 nats per token (limit 0.5)"


@pytest.mark.parametrize(
    ("name", "steps", "text"),
    [
        ("length_drift", [step(), step(), step(), step(completion_tokens=9.0)], SHRUNK),
        ("reward_jump", [*[step()] * 5, step(mean_reward=0.9)], ROSE),
        ("stale_weights", [step(update={"first_stale_kl": 2.9}, versions_behind=0.9)], STALE),
    ],
)
def test_the_other_side_of_a_rule_is_bad_too_and_says_why(name: str, steps: list[StepFigures], text: str) -> None:
    measurement = measured(name, *steps)
    assert (measurement.is_bad, measurement.text) == (True, text)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(
    ("now", "spread", "bad"), [(0.9, 0.5, True), (0.24, 0.5, True), (0.7, 0.5, False), (0.7, 0.1, True)]
)
def test_a_jump_of_the_reward_is_measured_in_spreads_of_the_rewards(
    scale: float, now: float, spread: float, bad: bool
) -> None:
    before = [step(mean_reward=0.5 * scale, reward_spread=spread * scale)] * 5
    jump = measured("reward_jump", *before, step(mean_reward=now * scale, reward_spread=0.01 * scale))
    assert (jump.is_bad, jump.threshold) == (bad, pytest.approx(spread / 2 * scale))


@pytest.mark.parametrize(
    ("now", "spread", "bad"),
    [(15 / 16, 0.25, False), (3 / 4, 0.5, False), (1 / 2, 0.52, True), (0.0, 0.0, True), (1.0 - 1e-15, 0.0, False)],
)
def test_one_failure_or_rounding_among_equal_rewards_is_no_jump_and_a_new_level_of_equal_ones_is(
    now: float, spread: float, bad: bool
) -> None:
    solved = [step(mean_reward=1.0, reward_spread=0.0)] * 5
    assert measured("reward_jump", *solved, step(mean_reward=now, reward_spread=spread)).is_bad is bad
    unknown = [step(reward_spread=None)] * 5
    assert RULES["reward_jump"].measure([*unknown, step(mean_reward=now, reward_spread=None)]) is None


@pytest.mark.parametrize("size", [2.25e307, 1.7e308])
def test_rewards_at_the_end_of_what_a_float_holds_have_a_finite_limit(size: float) -> None:
    rewards = [size, size, 0.0, -size, size, 0.0]
    jump = measured("reward_jump", *(step(mean_reward=reward, reward_spread=size) for reward in rewards))
    assert math.isfinite(jump.threshold)
    assert math.isfinite(jump.value)


def test_the_shift_of_an_update_is_that_of_fresh_tokens() -> None:
    update = {"approx_kl": 2.7, "fresh_kl": 0.01, "stale_kl": 2.69, "update_kl": 0.02}
    assert measured("policy_shift", step(update=update)).value == 0.02
    assert measured("policy_shift", step(update={**update, "update_kl": math.nan})).value == 0.01


@pytest.mark.parametrize(
    ("before", "now", "error", "bad"),
    [
        (0.31, 0.0, 0.0, True),
        (0.31, 0.14, 0.04, False),
        (0.31, 0.0, 0.1, False),
        (0.31, 0.2, 0.0, False),
        (-0.2, -1.0, 0.0, True),
    ],
)
def test_a_fall_in_the_first_steps_is_more_than_chance_and_half_of_what_there_was(
    before: float, now: float, error: float, bad: bool
) -> None:
    start, fallen = step(mean_reward=before, reward_error=0.05), step(7, mean_reward=now, reward_error=error)
    assert measured("early_fall", start, fallen).is_bad is bad
    later = [step(number) for number in range(2, 7)]
    assert not measured("early_fall", start, *later, fallen).is_bad, "a fall in later steps is for reward_jump"
    assert RULES["early_fall"].measure([start, step(2, mean_reward=now, reward_error=None)]) is None


@pytest.mark.parametrize(("name", "count"), [("entropy_collapse", 3), ("length_drift", 3), ("reward_jump", 5)])
def test_a_comparison_with_the_first_steps_waits_for_them(name: str, count: int) -> None:
    assert RULES[name].measure([step()] * count) is None


_number = st.one_of(st.floats(), st.just(0.0), st.floats(0, 3))
_share = st.one_of(st.none(), st.floats())
_update = st.fixed_dictionaries({name: _number for name in ("entropy", "approx_kl", "kl", "first_ratio_error")})
_shares = st.fixed_dictionaries(
    {name: _share for name in ("mean_reward", "reward_spread", "completion_tokens", "cut_share", "versions_behind")}
)
_counts = st.fixed_dictionaries({name: st.integers(0, 20) for name in ("rollouts_done", "rollouts_failed")})
_steps = st.lists(
    st.builds(
        lambda update, steps, shares, held_out, counts, calls, equal: step(
            update={**update, "steps": steps}, **shares, held_out=held_out, **counts, calls_captured=calls,
            calls_trained=calls, groups={"compared": equal, "equal_rewards": equal} if equal else {},
        ),
        _update, st.integers(0, 2), _shares, _share, _counts, st.integers(0, 5), st.integers(0, 4),
    ),
    min_size=1, max_size=20,
)  # fmt: skip


@given(_steps)
def test_whatever_the_figures_a_measurement_is_finite_and_never_bad_and_fine_at_once(steps: list[StepFigures]) -> None:
    for rule in RULES.values():
        if (measurement := rule.measure(steps)) is not None:
            assert math.isfinite(measurement.value)
            assert math.isfinite(measurement.threshold)
            assert not (measurement.is_bad and measurement.is_fine(rule.thresholds["margin"]))
            assert "\n" not in measurement.text


# --- alarms ----------------------------------------------------------------------------------------------------------


def alarms_over(percents: Sequence[int | None], patience: int = 2) -> list[Alarm]:
    """The alarms over steps in which so many of 100 calls were cut off, of which 10 are allowed."""
    alarms = Alarms({name: {"limit": 0.1, "patience": patience} if name == "cut_off" else None for name in RULES})
    shares = [None if percent is None else percent / 100 for percent in percents]
    return [alarm for n, share in enumerate(shares, start=1) for alarm in alarms.see(step(n, cut_share=share))]


def test_an_alarm_comes_after_so_many_steps_in_a_row_and_once() -> None:
    [alarm] = alarms_over([0, 20, 0, 20, None, 20, 20, 20])
    assert (alarm.state, alarm.step, alarm.since, alarm.value, alarm.threshold) == ("raised", 6, 6, 0.2, 0.1)
    text = "20% of the calls ended at max_completion_length (limit 10%)"
    assert alarm.line.startswith(f"step 6: alarm cut_off: {text}. To try: increase max_completion_length; ")


def test_it_is_over_once_the_value_is_well_on_the_right_side_and_can_come_again() -> None:
    alarms = alarms_over([20, 20, 10, 10, 10, 8, 8, 20, 20])
    assert [(alarm.state, alarm.step, alarm.since) for alarm in alarms] == [
        ("raised", 2, 2), ("over", 7, 2), ("raised", 9, 9),
    ]  # fmt: skip
    assert alarms[1].what_to_try == ""
    assert alarms[1].line.startswith("step 7: alarm cut_off (since step 2) is over: 8% of the calls")


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_alarms_alternate_and_each_is_backed_by_its_steps_in_a_row(values: list[int], patience: int) -> None:
    alarms = alarms_over(values, patience)
    assert [alarm.state for alarm in alarms] == [("raised", "over")[place % 2] for place in range(len(alarms))]
    for before, alarm in zip([None, *alarms], alarms, strict=False):
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
    assert [(alarm.name, alarm.state, alarm.step) for one in figures for alarm in alarms.see(one)] == [
        ("entropy_collapse", "raised", 7), ("token_drift", "raised", 7),
        ("entropy_collapse", "over", 13), ("token_drift", "over", 13),
    ]  # fmt: skip


# --- the setting -----------------------------------------------------------------------------------------------------


def test_thresholds_are_set_by_rule_and_none_switches_a_rule_off() -> None:
    rules = {rule.name: rule for rule in make_rules({"cut_off": {"limit": 0.9, "patience": 1}, "no_calls": None})}
    assert rules.keys() == RULES.keys() - {"no_calls"}
    assert rules["cut_off"].thresholds == {"patience": 1, "margin": 0.1, "limit": 0.9}
    assert make_rules("none") == []
    assert len(make_rules("default")) == len(RULES)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"entropy": {}}, "unknown rule 'entropy'"),
        ({"entropy_colapse": {}}, "Did you mean 'entropy_collapse'"),
        ({"cut_off": {"limt": 1}}, "cut_off has no threshold 'limt'. Did you mean 'limit'"),
        ({"cut_off": 0.5}, r"cut_off must be a dict of thresholds \(patience, margin, limit\) or None; got 0.5"),
        ({"cut_off": {"limit": math.nan}}, "cut_off.limit must be a number of at least 0; got nan"),
        ({"cut_off": {"patience": 0}}, "cut_off.patience must be a whole number of at least 1; got 0"),
        ({"cut_off": {"patience": 1.5}}, "whole number of at least 1; got 1.5"),
        ({"cut_off": {"limit": True}}, "got True"),
        ({"cut_off": {"margin": 1}}, "cut_off.margin must be a number of at least 0 and below 1; got 1"),
        ({"length_drift": {"factor": 0.5}}, "length_drift.factor must be a number above 1; got 0.5"),
        ({3: {}}, "unknown rule 3"),
        ("all", "alarms must be 'default', 'none', or a dict of thresholds by rule"),
        ([], r"got \[\]"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_ones(setting: object, error: str) -> None:
    with pytest.raises(BadRequestError, match=error):
        make_rules(setting)


def test_the_page_has_every_rule_with_its_thresholds_and_its_program_runs() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]*) ?\|$", PAGE, re.MULTILINE))
    usual = {("patience", 2), ("margin", 0.1), ("margin", 0.0)}
    assert {name: sorted(filter(None, cell.strip().split(", "))) for name, cell in rows.items()} == {
        name: sorted(f"`{key}` {value}" for key, value in rule.thresholds.items() if (key, value) not in usual)
        for name, rule in RULES.items()
    }
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(program, names)
    assert names["algorithm"].settings.alarms["cut_off"] is None  # type: ignore[attr-defined]
