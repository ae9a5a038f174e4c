"""The bounds of the gateway: bytes, calls, seconds, and the shape of requests. Beyond them a call is refused, never
queued without end. What is linear and long is done beside the serving loop (`off_loop`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import NamedTuple

from agentlightning.errors import closest_name
from agentlightning.field_help import explain_fields
from agentlightning.utils.http.byte_budget import ATTEMPT_BYTES


class JsonBounds(NamedTuple):
    """How much one JSON text may hold; counted in the text, before a value is made of it."""

    values: int
    containers: int
    """Objects and lists."""
    keys: int = 200_000
    """Of all objects together."""
    texts: int = 500_000
    """Keys and strings."""

    @property
    def surely(self) -> int:
        """Bytes of a text that holds no more, whatever it is: each thing that is counted takes one at least."""
        return min(self.values, self.containers, self.keys, 2 * self.texts)


REQUEST_JSON = JsonBounds(values=2_000_000, containers=200_000)
"""Of an agent (400): more than a prompt of a million token ids, or a conversation of ten thousand turns. Only lists of
numbers come near to the bound of values: a key or a text takes several times as long."""
REPLY_JSON = JsonBounds(values=4_000_000, containers=1_000_000, keys=2_000_000, texts=3_000_000)
"""Of a model server (502): its log-probabilities take up to ten values, three containers and four keys a token, so
that a reply of a third of a million tokens passes whatever it tells of each."""
DEEPEST_JSON = 200
"""Objects and lists in each other."""
LONGEST_NAME = 512
"""Characters of the name of a model, a role, a tool or a field of a request (400)."""
MOST_ITEMS = 16_384
"""Messages, items, prompts, tools or parts in one list of a request (400); token ids are bounded as values."""
MOST_FIELDS = 2048
"""Fields of a request itself (400); an object in it may have `MOST_ITEMS`."""
MOST_CHOICES = 1024
"""Choices that a request may ask for (400)."""
LARGEST_COUNT = 2**53 - 1
"""Of tokens or choices, as a server reports them; beyond it JSON's numbers are not exact."""
MOST_FRAMES = 1_000_000
"""Frames of one stream of a model server; it is broken off then."""
LONGEST_ERROR = 4000
"""Characters of an error's message, for agent and record; the rest is cut."""
LONGEST_COMPARED = 128
"""Characters of a name for which similar names are looked for; a longer one is unlike all."""
MOST_COMPARED = 200
"""Names that it is compared with."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 60


def shown(value: object) -> str:
    """Return a value as an error shows it, however large it is."""
    return _SHORT.repr(value)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelt one; None if none is much like it."""
    if len(name) > LONGEST_COMPARED:
        return None
    compared = [other for other in islice(known, MOST_COMPARED) if len(other) <= LONGEST_COMPARED]
    return closest_name(name, compared)


def hint(name: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return what an error about an unknown name adds: the known name closest to it, else (`lists`) all known names."""
    known = list(known)
    if near := closest(name, known):
        return f"; did you mean {near!r}?"
    return f"; known: {', '.join(known)}" if known and lists else ""


def count_of(value: object) -> int:
    """Return a count out of foreign JSON; 0 if it is none."""
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else 0


@explain_fields
@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Every bound, with the answer that a call beyond it gets.

    Raises:
        ValueError: a bound is not positive; names it.
    """

    body_bytes: int = 32 * 1024 * 1024
    """Largest request (413) and largest reply of a model server (502)."""
    bytes_per_attempt: int = ATTEMPT_BYTES
    """Bytes of bodies that one attempt has in hand, from their arrival to the record of the call (429). All servers of
    a process together have `utils.byte_budget.PROCESS_BYTES`."""
    calls: int = 1024
    """Calls in hand at one time; further ones wait for room."""
    calls_per_attempt: int = 64
    """Calls in hand for one attempt; further ones wait for room."""
    waiting_calls: int = 1024
    """Calls that wait for room (429), and calls that wait while the weights change (503)."""
    remembered_responses: int = 1024
    """Responses that are remembered for one attempt, to be continued by their id; older ones are forgotten (400)."""
    remembered_bytes_per_attempt: int = 64 * 1024 * 1024
    """Bytes of them and of their items, for one attempt."""
    remembered_bytes: int = 256 * 1024 * 1024
    """The same of all attempts together; those of the attempt that was silent for longest are forgotten first."""
    call_seconds: float = 600.0
    """Time of one call from its arrival, waiting and retries included (504)."""
    store_seconds: float | None = None
    """Time that the store has for one question or one record (503); None is as long as it may be away, 60 seconds or
    the `store_unreachable_timeout` of the run's runner."""
    tokens_per_rollout: int | None = None
    """Tokens of all calls of a rollout, prompts included (429 for the next call); None is no bound."""
    cost_per_rollout: float | None = None
    """The same in money, by the prices in `ModelConfig` (429 for the next call)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if bound is not None and not bound > 0:
                raise ValueError(f"GatewayLimits.{field.name} must be positive; got {bound!r}")
