"""The seed of a completion whose request has none.

By default seeds are drawn in the order in which requests arrive. Where runs are to be equal whatever the timing, the
seed follows from the request and its owner: the run's seed, the rollout's place in the run (step, task, sample), the
prompt, and how many calls of the same attempt have sent the very same before. So it does not matter which attempt of
the rollout sends it, nor in which order the agent makes calls side by side.
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

from agentlightning.engine.request import RequestError

PlaceOf = Callable[[str], Awaitable[str | None]]
"""Returns the place of a rollout in the run; None for one that has none."""
_ATTEMPTS: Final = 8192
_ROLLOUTS: Final = 8192


class ArrivalSeeds:
    """Seeds in the order of arrival. Belongs to the loop of the server."""

    repeatable = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def place(self, attempt: str | None) -> str:
        """Return an empty place: only the arrival counts."""
        return ""

    @contextmanager
    def draw(self, attempt: str | None, place: str, prompt_ids: Sequence[int]) -> Generator[int]:
        """Yield the next seed."""
        yield self._random.getrandbits(63)


@dataclass(slots=True)
class _Call:
    """The owner of a number among equal requests: a call of the gateway, or one without an id."""

    call_id: str
    running: int = 0
    was_answered: bool = False


class PlaceSeeds:
    """Seeds that follow from a rollout's place in the run and the request. Belongs to the loop of the server."""

    repeatable = True

    def __init__(self, seed: int, place_of: PlaceOf) -> None:
        self._seed = seed
        self._place_of = place_of
        self._places: OrderedDict[str, str] = OrderedDict()
        self._calls: OrderedDict[str, dict[bytes, dict[int, _Call]]] = OrderedDict()  # attempt, prompt, number

    async def place(self, attempt: str | None) -> str:
        """Return the place of the attempt's rollout; `attempt` is the gateway's `rollout/attempt/call`.

        Raises:
            RequestError: the request did not come through the gateway, or its rollout is none of the run's.
        """
        rollout_id = unquote((attempt or "").partition("/")[0])
        if rollout_id not in self._places:
            place = await self._place_of(rollout_id) if rollout_id else None
            if place is None:
                who = f"rollout {rollout_id!r} was not made by this run" if rollout_id else "it came past the gateway"
                raise RequestError(
                    f"with deterministic=True a request without a seed must be of a rollout of the run: {who}"
                )
            self._places[rollout_id] = place
        self._places.move_to_end(rollout_id)
        place = self._places[rollout_id]
        if len(self._places) > _ROLLOUTS:
            self._places.popitem(last=False)
        return place

    @contextmanager
    def draw(self, attempt: str | None, place: str, prompt_ids: Sequence[int]) -> Generator[int]:
        """Yield the seed of a request; one whose block fails or is cancelled does not count. A call that the gateway
        makes again, because its reply was lost, gets the seed that it had."""
        rollout_id, _, rest = (attempt or "").partition("/")
        attempt_id, _, call_id = rest.partition("/")
        owner = f"{rollout_id}/{attempt_id}"
        prompts = self._calls.setdefault(owner, {})
        self._calls.move_to_end(owner)
        if len(self._calls) > _ATTEMPTS:
            self._calls.popitem(last=False)
        prompt = hashlib.sha256(",".join(map(str, prompt_ids)).encode()).digest()
        calls = prompts.setdefault(prompt, {})
        number = next((number for number, call in calls.items() if call_id and call.call_id == call_id), None)
        if number is None:
            number = next(n for n in range(len(calls) + 1) if n not in calls)
        call = calls.setdefault(number, _Call(call_id))
        call.running += 1
        try:
            yield hash_of(self._seed, place, prompt.hex(), number) >> 1
            call.was_answered = True
        finally:
            call.running -= 1
            if not call.running and not call.was_answered:
                del calls[number]


def hash_of(*parts: object) -> int:
    """Return 64 bits that follow from the parts alone, the same in every process."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
