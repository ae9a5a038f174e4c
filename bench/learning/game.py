"""A game of several turns with a hidden state and a graded reward, and what policies of it are worth, exactly.

A number between 1 and `HIGHEST` is hidden. In each turn the player says a number and hears whether the hidden one is
lower or higher; at most `TURNS` turns. Found in turn t, it is worth `1 - TURN_COSTS * (t - 1)`; never found, a little
that falls with the distance of the last number. Whoever says anything but such a number ends the game with 0.

Two numbers show what must be learned: the best policy (dynamic programming over what the player knows), and the best
one that does not heed what was said to it (a fixed row of numbers).
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
"""What was said so far: each number with `lower` or `higher`, where the hidden number lies."""
Player = Callable[[History], Sequence[float]]
"""Probability of each of `NUMBERS` after a history; what is left of 1 is anything else."""


class Game(TypedDict):
    """One task: the agent sees nothing of it but the answers."""

    hidden: int


def hint(said: int, hidden: int) -> str:
    """Return where the hidden number lies, seen from what was said."""
    return "lower" if hidden < said else "higher"


def reward(said: int, hidden: int, turn: int) -> float:
    """Return the reward of a game that ends with `said` in a turn, the first being 1."""
    if said == hidden:
        return 1.0 - TURN_COSTS * (turn - 1)
    return CLOSE_IS_WORTH * (1 - abs(said - hidden) / (HIGHEST - 1))


def best_value() -> float:
    """Return the expected reward of the best policy, all hidden numbers being equally likely."""
    return _best(1, HIGHEST, 1) / HIGHEST


@functools.cache
def _best(low: int, high: int, turn: int) -> float:
    """Return the greatest sum of rewards over the numbers from `low` to `high`, all of which are possible."""
    if low > high:
        return 0.0
    values: list[float] = []
    for said in NUMBERS:
        if turn == TURNS:
            values.append(sum(reward(said, hidden, turn) for hidden in range(low, high + 1)))
            continue
        left = _best(low, min(said - 1, high), turn + 1) + _best(max(said + 1, low), high, turn + 1)
        values.append(left + (reward(said, said, turn) if low <= said <= high else 0.0))
    return max(values)


def best_deaf_value() -> float:
    """Return the expected reward of the best policy that says the same numbers whatever it hears."""
    rows = itertools.product(NUMBERS, repeat=TURNS)
    return max(value_of(lambda history, row=row: [float(n == row[len(history)]) for n in NUMBERS]) for row in rows)


def random_value() -> float:
    """Return the expected reward of saying any of the numbers, each with the same probability."""
    return value_of(lambda history: [1 / HIGHEST] * HIGHEST)


def value_of(player: Player) -> float:
    """Return the expected reward of a policy, over every hidden number and every game that can be played."""
    return sum(_value(player, hidden, ()) for hidden in NUMBERS) / HIGHEST


def _value(player: Player, hidden: int, history: History) -> float:
    turn = len(history) + 1
    value = 0.0
    for said, probability in zip(NUMBERS, player(history), strict=True):
        if probability == 0.0:
            continue
        if said == hidden or turn == TURNS:
            value += probability * reward(said, hidden, turn)
        else:
            value += probability * _value(player, hidden, (*history, (said, hint(said, hidden))))
    return value


def histories() -> list[History]:
    """Return every history after which a player may have to say something."""
    found: list[History] = [()]
    for length in range(1, TURNS):
        for said in itertools.product(NUMBERS, repeat=length):
            games = {tuple((n, hint(n, hidden)) for n in said) for hidden in NUMBERS if hidden not in said}
            found += sorted(games)
    return found
