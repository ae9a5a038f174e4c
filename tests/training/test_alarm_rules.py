"""Each rule on figures by hand and on random ones: when it is bad, when it is fine, when it cannot tell."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.training.alarms import RULES, Measurement
from agentlightning.training.progress import StepFigures

PAGE = (Path(__file__).parents[2] / "docs/how-to/watch-a-run.md").read_text()


def step(number: int = 1, *, update: dict[str, float] | None = None, **changes: Any) -> StepFigures:
    """A healthy step but for the changes."""
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


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_the_figure_tells_nothing(name: str) -> None:
    empty = StepFigures(9, 50, None, 0, 0, 0, 0, {}, 0.0, {})
    found = RULES[name].measure([*[step()] * 8, empty])
    assert found is None or name == "nothing_trained" or (name == "token_drift" and found.is_fine(0.1))


def test_replies_that_shrink_and_rewards_that_rise_are_found_as_well() -> None:
    shrunk = measured("length_drift", step(), step(), step(), step(completion_tokens=9.0))
    assert (shrunk.is_bad, shrunk.threshold, shrunk.value) == (True, 10.0, 9.0)
    risen = measured("reward_jump", *[step()] * 5, step(mean_reward=0.9))
    assert risen.is_bad
    assert risen.text == "mean reward rose to 0.9; the mean of the 5 steps before is 0.5 (limit 0.25 from it)"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(
    ("now", "spread", "bad"), [(0.9, 0.5, True), (0.24, 0.5, True), (0.7, 0.5, False), (0.7, 0.1, True)]
)
def test_a_jump_of_the_reward_is_measured_in_spreads_of_the_rewards(
    scale: float, now: float, spread: float, bad: bool
) -> None:
    before = [step(mean_reward=0.5 * scale, reward_spread=spread * scale)] * 5
    found = measured("reward_jump", *before, step(mean_reward=now * scale, reward_spread=0.01 * scale))
    assert (found.is_bad, found.threshold) == (bad, pytest.approx(spread / 2 * scale))


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
    found = measured("reward_jump", *(step(mean_reward=reward, reward_spread=size) for reward in rewards))
    assert math.isfinite(found.threshold)
    assert math.isfinite(found.value)


def test_stale_tokens_far_from_the_weights_that_learn_are_staleness_and_no_shift_of_the_update() -> None:
    update = {"approx_kl": 2.7, "fresh_kl": 0.01, "stale_kl": 2.69, "first_stale_kl": 2.9, "update_kl": 0.02}
    figures = step(update=update, versions_behind=0.9)
    stale, shift = measured("stale_weights", figures), measured("policy_shift", figures)
    assert (stale.is_bad, stale.value, stale.threshold) == (True, 2.9, 0.5)
    assert stale.text == "stale tokens are 2.9 nats each from the weights that learn from them (limit 0.5)"
    assert (shift.is_bad, shift.value) == (False, 0.02)
    without = measured("policy_shift", step(update={**update, "update_kl": math.nan}))
    assert without.value == 0.01, "of figures without the distance, that of fresh tokens"


@pytest.mark.parametrize(
    ("now", "error", "bad"), [(0.0, 0.0, True), (0.14, 0.04, False), (0.0, 0.1, False), (0.2, 0.0, False)]
)
def test_a_fall_in_the_first_steps_is_more_than_chance_and_half_of_what_there_was(
    now: float, error: float, bad: bool
) -> None:
    start = step(mean_reward=0.31, reward_error=0.05)
    fallen = step(7, mean_reward=now, reward_error=error)
    assert measured("early_fall", start, fallen).is_bad is bad
    later = [step(number) for number in range(2, 7)]
    assert not measured("early_fall", start, *later, fallen).is_bad, "a fall in later steps is for reward_jump"
    assert RULES["early_fall"].measure([start, step(2, mean_reward=now, reward_error=None)]) is None


def test_a_fall_of_negative_rewards_is_a_fall() -> None:
    start = step(mean_reward=-0.2, reward_error=0.1)
    assert measured("early_fall", start, step(2, mean_reward=-1.0, reward_error=0.0)).is_bad


def test_what_is_compared_with_the_first_steps_waits_for_them() -> None:
    for name, count in (("entropy_collapse", 3), ("length_drift", 3), ("reward_jump", 5)):
        assert RULES[name].measure([step()] * count) is None


_number = st.one_of(st.floats(), st.just(0.0), st.floats(0, 3))
_share = st.one_of(st.none(), st.floats())
_steps = st.lists(
    st.builds(
        lambda reward, spread, entropy, kl, error, tokens, cut, behind, held, taken, done, failed, calls, equal: step(
            mean_reward=reward, reward_spread=spread, completion_tokens=tokens, cut_share=cut,
            versions_behind=behind, held_out=held,
            update={"entropy": entropy, "approx_kl": kl, "kl": kl, "first_ratio_error": error, "steps": taken},
            rollouts_done=done, rollouts_failed=failed, calls_captured=calls, calls_trained=calls,
            groups={"compared": equal, "equal_rewards": equal} if equal else {},
        ),
        _share, _share, _number, _number, _number, _share, _share, _share, _share, st.integers(0, 2),
        st.integers(0, 20), st.integers(0, 20), st.integers(0, 5), st.integers(0, 4),
    ),
    min_size=1, max_size=20,
)  # fmt: skip


@given(_steps)
def test_whatever_the_figures_a_measurement_is_finite_and_never_bad_and_fine_at_once(steps: list[StepFigures]) -> None:
    for rule in RULES.values():
        if (found := rule.measure(steps)) is not None:
            assert math.isfinite(found.value)
            assert math.isfinite(found.threshold)
            assert not (found.is_bad and found.is_fine(rule.thresholds["margin"]))
            assert "\n" not in found.text


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_value_is_bad_beyond_the_limit_that_was_set(value: float, limit: float) -> None:
    at = step(
        update={"first_ratio_error": value, "approx_kl": value},
        **{"cut_share": value, "versions_behind": value, "drift_rate": value},
    )
    for name in ("cut_off", "engine_mismatch", "policy_shift", "stale_weights", "token_drift"):
        rule = RULES[name]
        found = dataclasses.replace(rule, thresholds={**rule.thresholds, "limit": limit}).measure([at])
        assert found is not None
        assert found.is_bad == (value > limit)


def test_the_table_of_the_page_has_every_rule_with_its_own_thresholds() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]*) ?\|$", PAGE, re.MULTILINE))
    usual = {("patience", 2), ("margin", 0.1), ("margin", 0.0)}
    expected = {
        name: sorted(f"`{key}` {value}" for key, value in rule.thresholds.items() if (key, value) not in usual)
        for name, rule in RULES.items()
    }
    assert {name: sorted(filter(None, cell.strip().split(", "))) for name, cell in rows.items()} == expected
