"""The Ray actor between the loop of the run and VERL's processes.

VERL requests the rows of each session of a step and waits; the loop passes all rows when the step is collected. The
loop waits until VERL reports that the step is done. Either side may be first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Part = Literal["train", "val"]
Row = dict[str, Any]
"""Fields of a token row: `prompt_ids`, `response_ids`, `response_mask`, `logprobs`, `reward`, `versions`, `calls`."""
Rows = Sequence[Sequence[Sequence[Row]]]
"""rows[place][session]: the rows of each task and session; empty if the rollout is excluded."""


class Bridge:
    """The actor; its methods run on one event loop. Methods that wait raise a RuntimeError when VERL has ended."""

    def __init__(self, token: str) -> None:
        """Store the token that calls to the chat services must include."""
        self._token = token
        self._rows: dict[tuple[Part, int], Rows] = {}
        self._steps: dict[int, dict[str, Any]] = {}
        self._places: dict[str, int] = {}
        self._skipped: set[int] = set()
        self._addresses: list[str] = []
        self._error: str | None = None
        self._changed = asyncio.Condition()

    async def token(self) -> str:
        return self._token

    async def announce(self, address: str) -> None:
        """Add the address of a chat service."""
        self._addresses.append(address)
        await self._notify()

    async def addresses(self) -> list[str]:
        """Wait for the first chat service and return all addresses."""
        await self._wait_for(lambda: bool(self._addresses) and self._error is None)
        return list(self._addresses)

    async def give(self, part: Part, step: int, rows: Rows, skips: bool = False) -> None:
        """Set the rows of a step, in the order of its tasks. With `skips` the weights do not change."""
        for old_key in [key for key in self._rows if key[0] == "val" and key[1] < step]:
            del self._rows[old_key]
        if skips:
            self._skipped.add(step)
        self._rows[part, step] = rows
        await self._notify()

    async def skips(self, step: int) -> bool:
        """Return whether the update of a step is skipped."""
        return step in self._skipped

    async def rows(self, part: Part, step: int, place: int, session: int, uid: str) -> Sequence[Row]:
        """Wait until the step is collected and return the rows of a session; empty if its rollout is excluded. `uid`:
        task name."""
        if part == "train":
            self._places[uid] = place
        await self._wait_for(lambda: (part, step) in self._rows)
        rows = self._rows[part, step]
        return rows[place][session] if place < len(rows) and session < len(rows[place]) else ()

    async def stepped(self, step: int, report: Mapping[str, Any]) -> None:
        """Report that the update of a step is done and its weights are served."""
        for old_key in [key for key in self._rows if key[0] == "train" and key[1] <= step]:
            del self._rows[old_key]
        self._steps[step] = {**report, "places": self._places}
        self._places = {}
        await self._notify()

    async def step(self, step: int) -> dict[str, Any]:
        """Wait for the report of a step and return it; its `places` maps VERL's name of each task to its position."""
        await self._wait_for(lambda: step in self._steps)
        return self._steps.pop(step)

    async def end(self, error: str) -> None:
        """Report that VERL has ended: all current and later waiting calls raise a RuntimeError with this text."""
        self._error = error
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: ready() or self._error is not None)
        if not ready():
            raise RuntimeError(self._error)
