"""Each rule on figures by hand and on random ones: when it is bad, when it is fine, when it cannot tell."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import BadRequestError
from agentlightning.training.alarms.alarms import RULES, Alarms, make_rules
from agentlightning.training.alarms.rule import Measurement
from agentlightning.training.progress import StepFigures


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


def measured(name: str, *steps: StepFigures, **thresholds: float) -> Measurement | None:
    return RULES[name](**thresholds).measure(steps)  # type: ignore[arg-type]


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
    assert healthy is not None
    assert healthy.is_fine
    assert not healthy.is_bad
    steps = [step(number, **changes) for number, changes in enumerate(BAD[name], start=1)]
    found = measured(name, *steps)
    assert found is not None
    assert found.is_bad
    assert f"{found.text}"
    others = {other for other in RULES if (m := measured(other, *steps)) is not None and m.is_bad} - {name}
    assert others <= {"nothing_trained"}, "one condition, one alarm; without any call nothing is trained either"


def test_replies_that_shrink_and_rewards_that_rise_are_found_as_well() -> None:
    shrunk = measured("length_drift", step(), step(), step(), step(completion_tokens=9.0))
    assert shrunk is not None
    assert (shrunk.is_bad, shrunk.threshold, shrunk.value) == (True, 10.0, 9.0)
    risen = measured("reward_jump", *[step()] * 5, step(mean_reward=0.9))
    assert risen is not None
    assert risen.is_bad
    assert risen.text == "mean reward rose to 0.9; the mean of the 5 steps before is 0.5 (limit 0.25 from it)"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0, 1e9])
@pytest.mark.parametrize(
    ("now", "spread", "bad"), [(0.9, 0.5, True), (0.24, 0.5, True), (0.7, 0.5, False), (0.7, 0.1, True)]
)
def test_a_jump_of_the_reward_is_measured_in_spreads_of_the_rewards(
    scale: float, now: float, spread: float, bad: bool
) -> None:
    before = [step(mean_reward=0.5 * scale, reward_spread=spread * scale)] * 5
    found = measured("reward_jump", *before, step(mean_reward=now * scale, reward_spread=0.01 * scale))
    assert found is not None
    assert found.is_bad is bad
    assert found.threshold == pytest.approx(spread / 2 * scale)


def test_one_failure_among_equal_rewards_is_no_jump_and_a_new_level_of_equal_ones_is() -> None:
    solved = [step(mean_reward=1.0, reward_spread=0.0)] * 5
    for now, spread, bad in ((15 / 16, 0.25, False), (3 / 4, 0.5, False), (1 / 2, 0.52, True), (0.0, 0.0, True)):
        found = measured("reward_jump", *solved, step(mean_reward=now, reward_spread=spread))
        assert found is not None
        assert found.is_bad is bad, now
    noise = measured("reward_jump", *solved, step(mean_reward=1.0 - 1e-15, reward_spread=0.0))
    assert noise is not None
    assert not noise.is_bad, "what rounding alone makes is no change"
    unknown = [step(reward_spread=None)] * 5
    assert measured("reward_jump", *unknown, step(mean_reward=0.0, reward_spread=None)) is None


@pytest.mark.parametrize("size", [2.25e307, 1.7e308])
def test_rewards_at_the_end_of_what_a_float_holds_have_a_finite_limit(size: float) -> None:
    rewards = [size, size, 0.0, -size, size, 0.0]
    found = measured("reward_jump", *(step(mean_reward=reward, reward_spread=size) for reward in rewards))
    assert found is not None
    assert math.isfinite(found.threshold)
    assert math.isfinite(found.value)


def test_stale_tokens_far_from_the_weights_that_learn_are_staleness_and_no_shift_of_the_update() -> None:
    update = {"approx_kl": 2.7, "fresh_kl": 0.01, "stale_kl": 2.69, "first_stale_kl": 2.9, "update_kl": 0.02}
    figures = step(update=update, versions_behind=0.9)
    stale, shift = measured("stale_weights", figures), measured("policy_shift", figures)
    assert stale is not None
    assert shift is not None
    assert (stale.is_bad, stale.value, stale.threshold) == (True, 2.9, 0.5)
    assert stale.text == "stale tokens are 2.9 nats each from the weights that learn from them (limit 0.5)"
    assert "max_staleness" in RULES["stale_weights"].what_to_try
    assert (shift.is_bad, shift.value) == (False, 0.02)
    without = measured("policy_shift", step(update={**update, "update_kl": math.nan}))
    assert without is not None
    assert without.value == 0.01, "of figures without the distance, that of fresh tokens"


def test_a_fall_in_the_first_steps_is_more_than_chance_and_half_of_what_there_was() -> None:
    start = step(mean_reward=0.31, reward_error=0.05)
    for now, error, bad in (
        (0.0, 0.0, True),
        (0.14, 0.04, False),
        (0.0, 0.1, False),
        (0.2, 0.0, False),
        (0.6, 0.0, False),
    ):
        found = measured("early_fall", start, step(2, mean_reward=now, reward_error=error))
        assert found is not None
        assert found.is_bad is bad, (now, error)
    later = [step(number) for number in range(2, 7)]
    last = measured("early_fall", start, *later, step(7, mean_reward=0.0, reward_error=0.0))
    assert last is not None
    assert (last.is_bad, last.is_fine) == (False, False), "a fall in later steps is for reward_jump"
    assert measured("early_fall", start, step(2, mean_reward=0.0, reward_error=None)) is None
    graded = measured(
        "early_fall", step(mean_reward=-0.2, reward_error=0.1), step(2, mean_reward=-1.0, reward_error=0.0)
    )
    assert graded is not None
    assert graded.is_bad
    assert "learning_rate" in RULES["early_fall"].what_to_try
    assert "batch_size" in RULES["early_fall"].what_to_try


def test_what_is_compared_with_the_first_steps_waits_for_them() -> None:
    for name in ("entropy_collapse", "length_drift"):
        assert measured(name, step(), step(), step()) is None
    assert measured("reward_jump", *[step()] * 5) is None


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_the_figure_tells_nothing(name: str) -> None:
    empty = StepFigures(9, 50, None, 0, 0, 0, 0, {}, 0.0, {})
    found = measured(name, *[step()] * 8, empty)
    assert found is None or name == "nothing_trained" or (name == "token_drift" and found.is_fine)


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
    for name in RULES:
        if (found := measured(name, *steps)) is not None:
            assert math.isfinite(found.value)
            assert math.isfinite(found.threshold)
            assert not (found.is_bad and found.is_fine)
            assert "\n" not in found.text


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_greater_limit_is_never_reached_sooner(value: float, limit: float) -> None:
    for name in ("cut_off", "engine_mismatch", "policy_shift", "stale_weights", "token_drift"):
        changes: dict[str, Any] = {"cut_share": value, "versions_behind": value, "drift_rate": value}
        at = step(update={"first_ratio_error": value, "approx_kl": value}, **changes)
        strict, loose = measured(name, at, limit=limit), measured(name, at, limit=2 * limit)
        assert strict is not None
        assert loose is not None
        assert strict.is_bad or not loose.is_bad
        assert strict.is_bad == (value > limit)


def test_thresholds_are_set_by_rule_and_none_switches_a_rule_off() -> None:
    rules = {rule.name: rule for rule in make_rules({"cut_off": {"limit": 0.9, "patience": 1}, "no_calls": None})}
    assert rules.keys() == RULES.keys() - {"no_calls"}
    assert rules["cut_off"] == RULES["cut_off"](limit=0.9, patience=1)  # type: ignore[call-arg]
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
    assert alarms.raised == {}
