"""A game of several turns with a hidden state and a graded reward, and the exact values of its policies.

A number between 1 and `HIGHEST` is hidden. In each turn the player names a number and learns whether the hidden one is
lower or higher; at most `TURNS` turns. If it is found in turn t, the reward is `1 - TURN_COSTS * (t - 1)`; if not, a
small one that falls with the distance of the last number. Any other reply ends the game with reward 0.

Two values show what must be learned: that of the best policy (dynamic programming over the player's knowledge), and
that of the best one that ignores the answers (a fixed row of numbers).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final, TypedDict

HIGHEST: Final = 5
TURNS: Final = 3
TURN_COSTS: Final = 0.1
CLOSE_IS_WORTH: Final = 0.2

NUMBERS: Final = tuple(range(1, HIGHEST + 1))
History = tuple[tuple[int, str], ...]
"""The turns so far: each number with `lower` or `higher`, the side of the hidden number."""
Player = Callable[[History], Sequence[float]]
"""Probability of each of `NUMBERS` after a history; the remainder to 1 is any other reply."""


class Game(TypedDict):
    """One task. The agent only sees the answers."""

    hidden: int


def hint(number: int, hidden: int) -> str:
    """Return the side of the hidden number relative to `number`."""
    return "lower" if hidden < number else "higher"


def reward(number: int, hidden: int, turn: int) -> float:
    """Return the reward of a game that ends with `number` in a turn; the first turn is 1."""
    if number == hidden:
        return 1.0 - TURN_COSTS * (turn - 1)
    return CLOSE_IS_WORTH * (1 - abs(number - hidden) / (HIGHEST - 1))


def best_value() -> float:
    """Return the expected reward of the best policy, all hidden numbers being equally likely."""
    return _best(1, HIGHEST, 1) / HIGHEST


@functools.cache
def _best(low: int, high: int, turn: int) -> float:
    """Return the greatest sum of rewards over the numbers from `low` to `high`, all of which are possible."""
    if low > high:
        return 0.0
    values: list[float] = []
    for number in NUMBERS:
        if turn == TURNS:
            values.append(sum(reward(number, hidden, turn) for hidden in range(low, high + 1)))
            continue
        later = _best(low, min(number - 1, high), turn + 1) + _best(max(number + 1, low), high, turn + 1)
        values.append(later + (reward(number, number, turn) if low <= number <= high else 0.0))
    return max(values)


def best_deaf_value() -> float:
    """Return the expected reward of the best policy that ignores the answers."""
    rows = itertools.product(NUMBERS, repeat=TURNS)
    return max(value_of(lambda history, row=row: [float(n == row[len(history)]) for n in NUMBERS]) for row in rows)


def random_value() -> float:
    """Return the expected reward of uniformly random numbers."""
    return value_of(lambda history: [1 / HIGHEST] * HIGHEST)


def value_of(player: Player) -> float:
    """Return the expected reward of a policy, over every hidden number and every possible game."""
    return sum(_value(player, hidden, ()) for hidden in NUMBERS) / HIGHEST


def _value(player: Player, hidden: int, history: History) -> float:
    turn = len(history) + 1
    value = 0.0
    for number, probability in zip(NUMBERS, player(history), strict=True):
        if probability == 0.0:
            continue
        if number == hidden or turn == TURNS:
            value += probability * reward(number, hidden, turn)
        else:
            value += probability * _value(player, hidden, (*history, (number, hint(number, hidden))))
    return value


def histories() -> list[History]:
    """Return every history after which it is the player's turn."""
    result: list[History] = [()]
    for length in range(1, TURNS):
        for numbers in itertools.product(NUMBERS, repeat=length):
            games = {tuple((n, hint(n, hidden)) for n in numbers) for hidden in NUMBERS if hidden not in numbers}
            result += sorted(games)
    return result
