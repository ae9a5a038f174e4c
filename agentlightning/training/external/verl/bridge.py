"""The Ray actor between the loop of the run and VERL's processes.

VERL asks for the rows of each session of a step and waits; the loop gives all of them when the step is collected. VERL
says when a step is taken; the loop waits for that. Who asks and who gives may come first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Part = Literal["train", "val"]
Row = dict[str, Any]
"""Fields of a token row: `prompt_ids`, `response_ids`, `response_mask`, `logprobs`, `reward`, `versions`, `calls`."""


class Bridge:
    """The actor; its methods run on one event loop."""

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(32)
        self._rows: dict[tuple[str, int], asyncio.Future[Sequence[Sequence[Sequence[Row]]]]] = {}
        self._steps: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._places: dict[str, int] = {}
        self._skipped: set[int] = set()
        self._addresses: list[str] = []
        self._first = asyncio.Event()
        self._error: str | None = None

    async def token(self) -> str:
        """Return what calls to the chat services must carry."""
        return self._token

    async def announce(self, address: str) -> None:
        """Say where a chat service answers."""
        self._addresses.append(address)
        self._first.set()

    async def addresses(self) -> list[str]:
        """Return where the chat services answer, as soon as there is one.

        Raises:
            RuntimeError: VERL ended before.
        """
        await self._first.wait()
        self._check()
        return list(self._addresses)

    async def known_addresses(self) -> list[str]:
        """Return where the chat services answer that have come up so far."""
        return list(self._addresses)

    async def give(self, part: Part, step: int, rows: Sequence[Sequence[Sequence[Row]]], skips: bool = False) -> None:
        """Give what was collected: rows[place][session], in the order of the tasks. With `skips` there is nothing to
        learn from, and the weights stay as they are."""
        for known in [key for key in self._rows if key[0] == "val" and key[1] < step]:
            del self._rows[known]
        if skips:
            self._skipped.add(step)
        self._of(part, step).set_result(rows)

    async def skips(self, step: int) -> bool:
        """Return whether the update of a step is left out."""
        return step in self._skipped

    async def rows(self, part: Part, step: int, place: int, session: int, uid: str) -> Sequence[Row]:
        """Return the rows of a session, none if its rollout is excluded, as soon as the step is collected. `uid` is
        VERL's name of the task."""
        if part == "train":
            self._places[uid] = place
        found = await asyncio.shield(self._of(part, step))
        return found[place][session] if place < len(found) and session < len(found[place]) else ()

    async def stepped(self, step: int, told: Mapping[str, Any]) -> None:
        """Say that the update of a step is taken and its weights are served, and what the update was like."""
        for part, known in [*self._rows]:
            if part == "train" and known <= step:
                del self._rows[part, known]
        places, self._places = self._places, {}
        self._step(step).set_result({**told, "places": places})

    async def step(self, step: int) -> dict[str, Any]:
        """Return what `stepped` said of a step, as soon as it did.

        Raises:
            RuntimeError: VERL ended before.
        """
        try:
            return await asyncio.shield(self._step(step))
        finally:
            self._steps.pop(step, None)

    async def end(self, error: str) -> None:
        """Say that VERL has ended: whoever waits for it is told so."""
        self._error = error
        self._first.set()
        for step in self._steps.values():
            if not step.done():
                step.set_exception(RuntimeError(error))
                step.exception()  # seen, so that nothing is logged where nobody waits

    def _of(self, part: str, step: int) -> asyncio.Future[Sequence[Sequence[Sequence[Row]]]]:
        if (part, step) not in self._rows:
            self._rows[part, step] = asyncio.get_running_loop().create_future()
        return self._rows[part, step]

    def _step(self, step: int) -> asyncio.Future[dict[str, Any]]:
        if step not in self._steps:
            self._steps[step] = asyncio.get_running_loop().create_future()
            if self._error is not None:
                self._steps[step].set_exception(RuntimeError(self._error))
        return self._steps[step]

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)
