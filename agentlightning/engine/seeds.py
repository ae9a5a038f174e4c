"""The seed of a completion whose request has none.

By default, seeds are drawn in the order of arrival. For runs that must not depend on timing, the seed is computed from
the request and its owner: the run's seed, the rollout's position in the run (step, task, sample), the prompt, and the
number of earlier calls of the same attempt with the same prompt. The seed depends neither on the attempt of the rollout
nor on the order of the agent's concurrent calls.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import unquote

from agentlightning.engine.request import RequestError

T = TypeVar("T")
PlaceOf = Callable[[str], Awaitable[str | None]]
"""A function that returns the position of a rollout in the run; None if it has none."""
_KEPT: Final = 8192  # rollouts and attempts


class ArrivalSeeds:
    """Seeds in the order of arrival. Belongs to the loop of the server."""

    repeatable = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    @asynccontextmanager
    async def draw(self, attempt: str | None, prompt_ids: Sequence[int]) -> AsyncGenerator[int]:
        """Yield the next seed."""
        yield self._random.getrandbits(63)


@dataclass(slots=True)
class _Call:
    """The owner of a number among equal requests: a call of the gateway, or a call without an id."""

    call_id: str
    running: int = 0
    was_answered: bool = False


class PlaceSeeds:
    """Seeds computed from a rollout's position in the run and the request. Belongs to the loop of the server."""

    repeatable = True

    def __init__(self, seed: int, place_of: PlaceOf) -> None:
        self._seed = seed
        self._place_of = place_of
        self._places: OrderedDict[str, str] = OrderedDict()
        self._calls: OrderedDict[str, dict[bytes, dict[int, _Call]]] = OrderedDict()  # attempt, prompt, number

    @asynccontextmanager
    async def draw(self, attempt: str | None, prompt_ids: Sequence[int]) -> AsyncGenerator[int]:
        """Yield the seed of a request; a request whose block fails or is cancelled does not count. A call that the
        gateway retries because its reply was lost has the same seed. `attempt` is the gateway's `rollout/attempt/call`.

        Raises:
            RequestError: the request did not come through the gateway, or its rollout does not belong to the run.
        """
        rollout_id, _, rest = (attempt or "").partition("/")
        attempt_id, _, call_id = rest.partition("/")
        place = await self._place(unquote(rollout_id))
        prompts = _kept(self._calls, f"{rollout_id}/{attempt_id}", {})
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

    async def _place(self, rollout_id: str) -> str:
        place = self._places.get(rollout_id)
        if place is None:
            place = await self._place_of(rollout_id) if rollout_id else None
        if place is None:
            who = f"rollout {rollout_id!r} is not of this run" if rollout_id else "it did not pass the gateway"
            raise RequestError(
                f"with deterministic=True, a request without a seed must belong to a rollout of the run: {who}"
            )
        return _kept(self._places, rollout_id, place)


def _kept(entries: OrderedDict[str, T], key: str, new: T) -> T:
    """Return the entry of a key, or add the new one; remove the least recently used entries."""
    entry = entries.setdefault(key, new)
    entries.move_to_end(key)
    if len(entries) > _KEPT:
        entries.popitem(last=False)
    return entry


def hash_of(*parts: object) -> int:
    """Return a 64-bit hash of the parts, the same in every process."""
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
