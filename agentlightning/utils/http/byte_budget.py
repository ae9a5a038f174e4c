"""How many bytes of requests a process holds at one time: in all, and for each owner. All servers of a process share
one budget, `PROCESS`, since they share its memory.

Bytes are counted as they arrive and until the work on them is done: what was read of a body that is not complete, what
a compressed body unpacks to, and a reply that is kept until it is recorded. What goes beyond is refused with 429 and
`Retry-After`, and what it held is free again. Whoever sends so slowly that it only holds is ended by
`HttpBounds.arrival_seconds`. A body of one piece up to `UNCOUNTED_BYTES` is not counted; the number of connections and
of calls bounds those.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from types import TracebackType
from typing import Self

from agentlightning.errors import BusyError

PROCESS_BYTES = 512 * 1024 * 1024
"""Of a process: sixteen bodies of the largest size."""
CLIENT_BYTES = 256 * 1024 * 1024
"""Of one address that asks a store, an engine or another server than the gateway."""
ATTEMPT_BYTES = 128 * 1024 * 1024
"""Of one attempt at the gateway: four bodies of the largest size."""
UNCOUNTED_BYTES = 64 * 1024


class ByteBudget:
    """Counts the bytes that are held. May be used from any thread."""

    def __init__(self, total: int = PROCESS_BYTES) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._by_owner: Counter[Hashable] = Counter()
        self._held = 0
        _budgets.add(self)

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def hold(self, owner: Hashable, share: int) -> Hold:
        """Return a hold, empty as yet; its owner's holds together may take `share` bytes."""
        return Hold(self, owner, share)

    def add(self, owner: Hashable, share: int, size: int) -> None:
        """Count bytes of an owner.

        Raises:
            BusyError: they do not fit; then nothing is counted.
        """
        with self._lock:
            if self._held + size > self.total:
                raise BusyError("Too many large requests are under way; send this one again a little later")
            if self._by_owner[owner] + size > share:
                text = f"Requests of one sender may hold {share} bytes at one time; send this one again when others end"
                raise BusyError(text)
            self._held += size
            self._by_owner[owner] += size

    def give_back(self, owner: Hashable, size: int) -> None:
        """Count bytes of an owner as free again."""
        with self._lock:
            self._held -= size
            self._by_owner[owner] -= size
            if self._by_owner[owner] <= 0:
                del self._by_owner[owner]

    def forget(self) -> None:
        """Begin anew: in a forked child, which holds none of its parent's requests."""
        self._lock, self._held = threading.Lock(), 0
        self._by_owner.clear()


class Hold:
    """The bytes of one piece of work; leaving the block, or `close`, gives them back."""

    __slots__ = ("_budget", "_owner", "_share", "size")

    def __init__(self, budget: ByteBudget, owner: Hashable, share: int) -> None:
        self._budget, self._owner, self._share = budget, owner, share
        self.size = 0

    def add(self, size: int) -> None:
        """Hold further bytes.

        Raises:
            BusyError: they do not fit.
        """
        self._budget.add(self._owner, self._share, size)
        self.size += size

    def close(self) -> None:
        """Give all bytes back; may be called twice."""
        size, self.size = self.size, 0
        if size:
            self._budget.give_back(self._owner, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_budgets: weakref.WeakSet[ByteBudget] = weakref.WeakSet()
PROCESS = ByteBudget()
"""The budget of this process."""


def _forget_all() -> None:
    for budget in list(_budgets):
        budget.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
