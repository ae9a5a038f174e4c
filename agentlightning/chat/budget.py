"""The budget of model calls: limits, the bill, and the reservations of calls in progress.

A limit on tokens or cost also holds for concurrent calls, because each call reserves what it needs before it is sent:
its prompt by its length, and `max_tokens` for the reply if the request has it. Without `max_tokens`, it reserves as
much as the longest reply of the model so far, but may need far more. It therefore runs concurrently only if `UNBOUNDED`
tokens, or four times that reply, also fit, and otherwise alone: a limit is exceeded by one call at most. A call that
does not fit waits for calls in progress; if none is in progress, the limit is reached.
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
"""Characters per prompt token, if no server has counted the tokens."""
UNBOUNDED: Final = 8192
"""Assumed tokens of a reply without `max_tokens`, unless one was longer than a quarter of this."""
_ROUNDING: Final = 1 + 1e-9
"""Tolerance for sums of costs, so that a sum equal to the limit does not exceed it."""
_BOUNDS: Final = ("max_tokens", "max_completion_tokens")
"""Fields of a request that limit its reply, in tokens."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens."""

    prompt: float
    completion: float

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of a call."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


Amounts = dict[str, float]
"""Amounts by the names of `Limits`."""


@dataclass(slots=True)
class _Seen:
    """The greatest figures of the calls of a model so far."""

    tokens_per_character: float = 0.0
    completion_tokens: int = 0
    characters: int = 0
    """Characters of the longest prompt."""


class Budget:
    """Keeps calls within limits. May be used by any number of event loops and threads; a pickled copy has a separate
    bill with the same numbers, and restarts the time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.bill = Bill()
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.Lock()
        self._began: float | None = None
        self._sent = 0  # requests of calls that have not ended
        self._reserved: dict[object, Amounts] = {}
        self._seen: dict[str, _Seen] = {}
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def __getstate__(self) -> dict[str, object]:
        return {"limits": self.limits, "bill": self.bill}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    # --- limits --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the time, if it has not started."""
        with self.lock:
            self._began = time.monotonic() if self._began is None else self._began

    def seconds_left(self) -> float:
        """Return the remaining seconds of the limit; infinite without a limit."""
        return math.inf if self.limits.seconds is None else self.limits.seconds - self._elapsed()

    def check(self) -> None:
        """Check that a call may be made.

        Raises:
            LimitReached: a limit is used up. The message names it.
        """
        with self.lock:
            self._check()

    def count_request(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            LimitReached: a limit is used up. The message names it.
        """
        self.start()
        with self.lock:
            self._check()
            self._sent += 1

    def _check(self) -> None:
        for name, amount in self._used().items():
            bound = getattr(self.limits, name)
            if bound is not None and amount >= bound:
                raise LimitReached(name, amount, bound)

    def _elapsed(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _used(self) -> Amounts:
        calls, cost = self.bill.requests + self._sent, self.bill.cost or 0.0
        return {"calls": calls, "tokens": self.bill.tokens, "seconds": self._elapsed(), "cost": cost}

    # --- reservations --------------------------------------------------------------------------------------------

    async def reserve(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        price: Price | None,
    ) -> object:
        """Return a reservation for a call; wait for calls in progress if it does not fit.

        Raises:
            LimitReached: it does not fit, and no call is in progress.
        """
        mark = object()
        if self.limits.tokens is None and self.limits.cost is None:
            return mark
        while True:
            event = asyncio.Event()
            with self.lock:
                self._check()
                expected, most = self._needs(model, characters_of(messages), fields, price)
                limit = self._lacking(most if self._reserved else expected)
                if limit is None:
                    self._reserved[mark] = most
                    return mark
                if not self._reserved:
                    raise limit
                entry = asyncio.get_running_loop(), event
                self._waiting.append(entry)
            remaining = self.seconds_left()
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), None if remaining == math.inf else max(0.0, remaining))
            finally:
                with self.lock:
                    if entry in self._waiting:
                        self._waiting.remove(entry)

    def calls_left(self, model: str, fields: Mapping[str, Any], price: Price | None) -> float:
        """Return the number of calls to a model that fit into the limits, with its longest prompt and reply."""
        with self.lock:
            characters = self._seen[model].characters if model in self._seen else 0
            _, most = self._needs(model, characters, fields, price)
            used = {**self._used(), "calls": self.bill.requests}
        count = math.inf
        for name, amount in {"calls": 1, **most}.items():
            bound = getattr(self.limits, name)
            if bound is not None and amount:
                count = min(count, (bound - used[name]) / amount)
        return count

    def _needs(
        self, model: str, characters: int, fields: Mapping[str, Any], price: Price | None
    ) -> tuple[Amounts, Amounts]:
        """Return the expected use of a call, and the most that is reserved for it."""
        largest = self._seen.get(model)
        ratio = (
            1 / CHARACTERS_PER_TOKEN if largest is None else max(1 / CHARACTERS_PER_TOKEN, largest.tokens_per_character)
        )
        longest = 0 if largest is None else largest.completion_tokens
        bounds = [bound for name in _BOUNDS if isinstance(bound := fields.get(name), (int, float))]
        replies = (min(bounds), min(bounds)) if bounds else (longest, max(UNBOUNDED, 4 * longest))
        prompts = math.ceil(characters * ratio), math.ceil(characters * (1.0 if largest is None else ratio))
        expected, most = (
            {"tokens": prompt + reply, "cost": 0.0 if price is None else price.of(prompt, reply)}
            for prompt, reply in zip(prompts, replies, strict=True)
        )
        return expected, most

    def _lacking(self, need: Amounts) -> LimitReached | None:
        """Return the limit that a call does not fit into beside those in flight; None if it fits."""
        used = self._used()
        for name, amount in need.items():
            bound, whole = getattr(self.limits, name), used[name] + sum(each[name] for each in self._reserved.values())
            if bound is not None and whole + amount > bound * _ROUNDING:
                return LimitReached(name, used[name], bound, amount)
        return None

    def settle(self, mark: object | None, line: BillLine, characters: int) -> None:
        """Add an ended call to the bill and release its reservation, so that waiting calls try again.

        Args:
            mark: its reservation, or None.
            line: its numbers; `count_request` was called for each of its requests.
            characters: length of its prompt.
        """
        with self.lock:
            self._sent -= line.requests
            self.bill.add(line)
            if line.calls:
                largest = self._seen.setdefault(line.model, _Seen())
                largest.completion_tokens = max(largest.completion_tokens, line.completion_tokens)
                largest.characters = max(largest.characters, characters)
                if characters:
                    largest.tokens_per_character = max(largest.tokens_per_character, line.prompt_tokens / characters)
            self._reserved.pop(mark, None)
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(event.set)


def characters_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of a prompt."""
    return sum(len(str(message.get("content") or "")) for message in messages)
