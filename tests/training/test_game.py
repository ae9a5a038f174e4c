"""GRPO learns a game of several turns, in which each reply must use the earlier ones, to near the optimum."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.learning.game import NUMBERS, best_deaf_value, best_value, histories, random_value, value_of
from bench.learning.game_run import train_player


def test_the_best_policy_halves_what_is_possible() -> None:
    def halves(history: tuple[tuple[int, str], ...]) -> list[float]:
        low = max([1, *(guess + 1 for guess, where in history if where == "higher")])
        high = min([NUMBERS[-1], *(guess - 1 for guess, where in history if where == "lower")])
        return [float(number == (low + high) // 2) for number in NUMBERS]

    assert best_value() == pytest.approx((1.0 + 2 * 0.9 + 2 * 0.8) / 5)  # by hand: 3, then 1 or 4, then 2 or 5
    assert value_of(halves) == pytest.approx(best_value())


def test_whoever_does_not_heed_what_was_said_stays_below_the_target() -> None:
    assert random_value() < best_deaf_value() < 0.7 * best_value()


def test_every_history_that_can_be_played_is_known_once() -> None:
    all_histories = histories()
    assert len(all_histories) == len(set(all_histories)) == 53
    assert ((3, "lower"), (5, "higher")) not in all_histories


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_player_reaches_four_fifths_of_the_best_policy(tmp_path: Path) -> None:
    before, after = train_player(tmp_path, seed=0)
    assert before < best_deaf_value()
    assert after >= 0.8 * best_value()
