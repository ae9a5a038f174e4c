"""What model calls may still use: limits, the bill, and what calls under way may come to.

A limit on tokens or money holds for calls that run at the same time, because each reserves what it is expected to use
before it is sent: its prompt by its length, and of the reply `max_tokens` where the request names it, else the longest
reply of the model so far. A model that has not answered yet is asked by one call alone. What does not fit waits for
calls under way, which mostly use less than they reserve; with none under way the limit is reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.chat.bill import Bill, BillLine, LimitReached, Limits

CHARACTERS_PER_TOKEN: Final = 4
"""Of a prompt, where no server has counted."""
_ROUNDING: Final = 1 + 1e-9
"""Of sums of money: what is equal to the bound is not beyond it."""
_BOUNDS: Final = ("max_tokens", "max_completion_tokens")
"""Fields of a request that bound its reply, in tokens."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of a call."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Need:
    """What a call is expected to use."""

    tokens: float
    cost: float
    alone: bool
    """True if its model has not answered yet, so that little is known: no other call may run beside it."""


@dataclass(slots=True)
class _Seen:
    """What the answers of a model were like."""

    tokens_per_character: float = 0.0
    completion_tokens: int = 0


class Budget:
    """Keeps calls within limits. Serves any number of event loops and threads; a copy by pickle has a bill of its own,
    with the same figures, and counts time anew."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bill = Bill()
        self._forget_threads()

    def _forget_threads(self) -> None:
        self.lock = threading.Lock()
        self._began: float | None = None
        self._sent = 0  # requests of calls that are not over
        self._reserved: dict[object, Need] = {}
        self._seen: dict[str, _Seen] = {}
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __getstate__(self) -> dict[str, object]:
        return {"limits": self.limits, "bill": self.bill}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._forget_threads()

    # --- time ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the time begin, if it has not."""
        with self.lock:
            self._start()

    def _start(self) -> None:
        self._began = time.monotonic() if self._began is None else self._began

    def _elapsed(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def seconds_left(self) -> float:
        """Return how much time the limit leaves; infinite without one."""
        return math.inf if self.limits.seconds is None else self.limits.seconds - self._elapsed()

    # --- limits --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Let pass who wants to make a call.

        Raises:
            LimitReached: nothing is left; says of what.
        """
        with self.lock:
            self._check()

    def _check(self) -> None:
        used: dict[str, float] = {"calls": self.bill.requests + self._sent, "tokens": self.bill.tokens}
        used |= {"seconds": self._elapsed(), "cost": self.bill.cost or 0.0}
        for name, amount in used.items():
            bound = getattr(self.limits, name)
            if bound is not None and amount >= bound:
                raise LimitReached(name, amount, bound)

    def count_request(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            LimitReached: nothing is left; says of what.
        """
        with self.lock:
            self._check()
            self._sent += 1
            self._start()

    # --- reservations --------------------------------------------------------------------------------------------

    async def reserve(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        price: Price | None,
    ) -> object:
        """Return a reservation of what a call is expected to use; waits for calls under way if it does not fit.

        Raises:
            LimitReached: it does not fit, and no call is under way.
        """
        mark = object()
        if self.limits.tokens is None and self.limits.cost is None:
            return mark
        while True:
            changed = asyncio.Event()
            with self.lock:
                self._check()
                need = self._need(model, messages, fields, price)
                lacking = self._lacking(need)
                if lacking is None and not self._must_wait(need):
                    self._reserved[mark] = need
                    return mark
                if lacking is not None and not self._reserved:
                    raise lacking
                entry = asyncio.get_running_loop(), changed
                self._waiting.append(entry)
            left = self.seconds_left()
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), None if left == math.inf else max(0.0, left))
            finally:
                with self.lock:
                    if entry in self._waiting:
                        self._waiting.remove(entry)

    def _need(
        self, model: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], price: Price | None
    ) -> Need:
        seen = self._seen.get(model)
        ratio = max(1 / CHARACTERS_PER_TOKEN, 0.0 if seen is None else seen.tokens_per_character)
        prompt = math.ceil(characters_of(messages) * ratio)
        bounds = [bound for name in _BOUNDS if isinstance(bound := fields.get(name), (int, float))]
        completion = min(bounds) if bounds else 0 if seen is None else seen.completion_tokens
        cost = 0.0 if price is None else price.of(prompt, completion)
        return Need(prompt + completion, cost, alone=seen is None)

    def _lacking(self, need: Need) -> LimitReached | None:
        """Return what is lacking for a call beside those under way; None if nothing is."""
        others = list(self._reserved.values())
        used = self.bill.tokens, self.bill.cost or 0.0
        reserved = sum(each.tokens for each in others), sum(each.cost for each in others)
        bounds, wanted = (self.limits.tokens, self.limits.cost), (need.tokens, need.cost)
        for name, spent, held, more, bound in zip(("tokens", "cost"), used, reserved, wanted, bounds, strict=True):
            if bound is not None and spent + held + more > bound * _ROUNDING:
                return LimitReached(name, spent, bound, more)
        return None

    def _must_wait(self, need: Need) -> bool:
        under_way = self._reserved.values()
        return bool(under_way) and (need.alone or any(each.alone for each in under_way))

    def settle(self, mark: object | None, line: BillLine, requests: int, characters: int) -> None:
        """Put a call that is over on the bill in the place of its reservation, and let those that wait look again.

        Args:
            mark: its reservation; None if it had none.
            requests: how many of `count_request` were its own.
            characters: of its prompt.
        """
        with self.lock:
            self._sent -= requests
            self.bill.add(line)
            if line.calls:
                seen = self._seen.setdefault(line.model, _Seen())
                seen.completion_tokens = max(seen.completion_tokens, line.completion_tokens)
                if characters:
                    seen.tokens_per_character = max(seen.tokens_per_character, line.prompt_tokens / characters)
            if mark is not None:
                self._reserved.pop(mark, None)
            waiting, self._waiting = self._waiting, []
        for loop, changed in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(changed.set)


def characters_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how long a prompt is."""
    return sum(len(str(message.get("content") or "")) for message in messages)
