"""Where the seed of a completion comes from when its request brings none.

By default seeds are drawn in the order in which requests arrive. Where runs are to be equal whatever the timing, the
seed follows from what is asked and for whom: the run's seed, the rollout's place in the run (step, task, sample), the
prompt, and how many calls of the same attempt have asked for the very same before. So it does not matter which
attempt of the rollout asks, nor in which order the agent makes calls side by side.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from agentlightning.engine.request.fields import RequestError

PlaceOf = Callable[[str], Awaitable[str | None]]
"""Gives the place of a rollout in the run; None for one that has none."""
_ATTEMPTS: Final = 8192
_ROLLOUTS: Final = 8192


class ArrivalSeeds:
    """Seeds in the order of arrival. Belongs to the loop of the server."""

    repeatable = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def place(self, attempt: str | None) -> str:
        """Return nothing: arrival is all that counts."""
        return ""

    @contextmanager
    def draw(self, attempt: str | None, place: str, prompt_ids: Sequence[int]) -> Generator[int]:
        """Give the next seed."""
        yield self._random.getrandbits(63)


@dataclass(slots=True)
class _Asker:
    """Who has a number among the requests that ask for the same: a call, or one that nobody names."""

    call_id: str
    in_hand: int = 0
    was_answered: bool = False


class PlaceSeeds:
    """Seeds that follow from a rollout's place in the run, and from what it asks. Belongs to the loop of the server."""

    repeatable = True

    def __init__(self, seed: int, place_of: PlaceOf) -> None:
        self._seed = seed
        self._place_of = place_of
        self._places: OrderedDict[str, str] = OrderedDict()
        self._asked: OrderedDict[str, dict[bytes, dict[int, _Asker]]] = OrderedDict()

    async def place(self, attempt: str | None) -> str:
        """Return the place of the rollout whose attempt asks; `attempt` is what the gateway says of it:
        `rollout/attempt/call`.

        Raises:
            RequestError: the request did not come through the gateway, or its rollout is none of the run's.
        """
        rollout_id = unquote((attempt or "").partition("/")[0])
        if rollout_id in self._places:
            self._places.move_to_end(rollout_id)
            return self._places[rollout_id]
        place = await self._place_of(rollout_id) if rollout_id else None
        if place is None:
            who = f"rollout {rollout_id!r} was not made by this run" if rollout_id else "it came past the gateway"
            raise RequestError(
                f"with deterministic=True a request without a seed must be of a rollout of the run: {who}"
            )
        self._places[rollout_id] = place
        if len(self._places) > _ROLLOUTS:
            self._places.popitem(last=False)
        return place

    @contextmanager
    def draw(self, attempt: str | None, place: str, prompt_ids: Sequence[int]) -> Generator[int]:
        """Give the seed of a request; one whose block fails or is cancelled does not count as asked. A call that the
        gateway makes again, because its reply was lost, gets the seed that it had."""
        rollout_id, _, rest = (attempt or "").partition("/")
        attempt_id, _, call_id = rest.partition("/")
        who = f"{rollout_id}/{attempt_id}"
        prompt = hashlib.sha256(",".join(map(str, prompt_ids)).encode()).digest()
        asked = self._asked.setdefault(who, {})
        self._asked.move_to_end(who)
        if len(self._asked) > _ATTEMPTS:
            self._asked.popitem(last=False)
        taken = asked.setdefault(prompt, {})
        same = (number for number, by in taken.items() if call_id and by.call_id == call_id)
        number = next(same, None)
        if number is None:
            number = next(n for n in range(len(taken) + 1) if n not in taken)
        by = taken.setdefault(number, _Asker(call_id))
        by.in_hand += 1
        try:
            yield hash_of(self._seed, place, prompt.hex(), number) >> 1
            by.was_answered = True
        finally:
            by.in_hand -= 1
            if not by.in_hand and not by.was_answered:
                del taken[number]


def hash_of(*parts: object) -> int:
    """Return 64 bits that follow from the parts alone, the same in every process."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
