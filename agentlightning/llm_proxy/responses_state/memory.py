"""The responses and items that attempts may refer to by their id: in memory, bounded, and nowhere else.

Each attempt has a memory of its own, so an id of another attempt is unknown whoever guesses it. Items are kept as JSON
and shared between the responses of an attempt: a conversation that is sent again as a whole with each call is kept
once. What goes beyond the bounds is forgotten, the response that was not used for longest first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentlightning.llm_proxy.access.limits import GatewayLimits

logger = logging.getLogger(__name__)

AttemptName = tuple[str, str]
"""Rollout and attempt."""
_ITEM, _RESPONSE, _PLACE = 256, 512, 8
"""Bytes that an item, a response and the mention of an item take beside their JSON."""


@dataclass(slots=True, eq=False)
class Item:
    """One item of a conversation. It never changes, but for how many responses of the memory mention it."""

    item_id: str
    raw: bytes
    """JSON, as it was said."""
    uses: int = 0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with all that was said before it, so that it can be continued after others are forgotten."""

    attempt: AttemptName
    response_id: str
    body: bytes
    """JSON of the response without its output."""
    context: tuple[Item, ...]
    """The whole input of the call: what came before it, then what the request added."""
    output: tuple[Item, ...]

    @property
    def items(self) -> Iterator[Item]:
        yield from self.context
        yield from self.output

    @property
    def own_bytes(self) -> int:
        """What it takes without its items."""
        return _RESPONSE + len(self.body) + _PLACE * (len(self.context) + len(self.output))

    @property
    def all_bytes(self) -> int:
        """What it takes with its items, as if it shared none."""
        return self.own_bytes + sum(len(item.raw) for item in self.items)


@dataclass(slots=True)
class _AttemptMemory:
    """What one attempt may refer to."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict[str, StoredResponse])
    """By their id; the one that was used last stands at the end."""
    by_raw: dict[bytes, Item] = field(default_factory=dict[bytes, Item])
    by_id: dict[str, Item] = field(default_factory=dict[str, Item])
    """The first that was said with the id."""
    size: int = 0

    def add(self, response: StoredResponse) -> None:
        shared = [self.by_raw.setdefault(item.raw, item) for item in response.items]
        for item in shared:
            if not item.uses:
                self.size += _ITEM + len(item.raw)
                self.by_id.setdefault(item.item_id, item)
            item.uses += 1
        known = len(response.context)
        kept = (tuple(shared[:known]), tuple(shared[known:]))
        name = response.response_id
        self.responses[name] = StoredResponse(response.attempt, name, response.body, *kept)
        self.size += response.own_bytes

    def drop(self, response_id: str) -> None:
        response = self.responses.pop(response_id)
        self.size -= response.own_bytes
        for item in response.items:
            item.uses -= 1
            if not item.uses:
                self.size -= _ITEM + len(item.raw)
                del self.by_raw[item.raw]
                if self.by_id.get(item.item_id) is item:
                    del self.by_id[item.item_id]


class ResponseMemory:
    """Remembers responses until the gateway ends. Owned by the serving loop."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._attempts: OrderedDict[AttemptName, _AttemptMemory] = OrderedDict()
        """The one that was used last stands at the end."""
        self._reserved: set[tuple[AttemptName, str]] = set()
        """Ids of responses that are being made."""
        self.size = 0
        """Bytes that are remembered of all attempts."""

    def response(self, attempt: AttemptName, response_id: str) -> StoredResponse | None:
        """Return a response of this attempt; None if it is not remembered."""
        memory = self._of(attempt)
        if memory is None or response_id not in memory.responses:
            return None
        memory.responses.move_to_end(response_id)
        return memory.responses[response_id]

    def item(self, attempt: AttemptName, item_id: str) -> Item | None:
        """Return an item of this attempt; None if it is not remembered."""
        memory = self._of(attempt)
        return None if memory is None else memory.by_id.get(item_id)

    def reserve(self, attempt: AttemptName, response_id: str) -> bool:
        """Keep an id for a response that is being made; False if the attempt has one of that id."""
        memory = self._attempts.get(attempt)
        if (attempt, response_id) in self._reserved or (memory is not None and response_id in memory.responses):
            return False
        self._reserved.add((attempt, response_id))
        return True

    def release(self, attempt: AttemptName, response_id: str) -> None:
        """Give up an id that was reserved."""
        self._reserved.discard((attempt, response_id))

    def add(self, response: StoredResponse) -> None:
        """Remember a response, and forget others where that goes beyond the bounds."""
        memory = self._attempts.setdefault(response.attempt, _AttemptMemory())
        self._attempts.move_to_end(response.attempt)
        before = memory.size
        memory.add(response)
        limits = self._limits
        while len(memory.responses) > limits.remembered_responses or memory.size > limits.remembered_bytes_per_attempt:
            self._forget_oldest(memory)
        self.size += memory.size - before
        while self.size > limits.remembered_bytes:
            oldest, memory = next(iter(self._attempts.items()))
            before = memory.size
            self._forget_oldest(memory)
            self.size += memory.size - before
            if not memory.responses:
                del self._attempts[oldest]
        if not self._attempts.get(response.attempt, _AttemptMemory()).responses:
            self._attempts.pop(response.attempt, None)
            logger.warning("a response of attempt %s is larger than what is remembered", response.attempt[1])

    def delete(self, attempt: AttemptName, response_id: str) -> bool:
        """Forget a response; its items stay as long as others mention them. False if it is not remembered."""
        memory = self._of(attempt)
        if memory is None or response_id not in memory.responses:
            return False
        before = memory.size
        memory.drop(response_id)
        self.size += memory.size - before
        if not memory.responses:
            del self._attempts[attempt]
        return True

    def _of(self, attempt: AttemptName) -> _AttemptMemory | None:
        if attempt in self._attempts:
            self._attempts.move_to_end(attempt)
        return self._attempts.get(attempt)

    @staticmethod
    def _forget_oldest(memory: _AttemptMemory) -> None:
        memory.drop(next(iter(memory.responses)))
