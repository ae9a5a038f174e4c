"""The limits of the gateway: bytes, calls, seconds, and the shape of requests. Calls beyond them are refused, so no
queue grows without limit. Long linear work runs on threads (`off_loop`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import NamedTuple

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import closest_name
from agentlightning.utils.http.byte_budget import ATTEMPT_BYTES


class JsonBounds(NamedTuple):
    """Limits on the contents of one JSON text, counted in the text before it is decoded."""

    values: int
    containers: int
    """Number of objects and lists."""
    keys: int = 200_000
    """Number of keys of all objects together."""
    texts: int = 500_000
    """Number of keys and strings."""

    @property
    def surely(self) -> int:
        """Largest size in bytes of a text that is always within the limits: each counted item takes at least a byte."""
        return min(self.values, self.containers, self.keys, 2 * self.texts)


REQUEST_JSON = JsonBounds(values=2_000_000, containers=200_000)
"""Limits of an agent's request (400): a prompt of a million token ids or ten thousand turns is within them. Only lists
of numbers come near the limit of values: a key or a text takes several times as long."""
REPLY_JSON = JsonBounds(values=4_000_000, containers=1_000_000, keys=2_000_000, texts=3_000_000)
"""Limits of a model server's reply (502). Log-probabilities take up to ten values, three containers and four keys per
token, so a reply of a third of a million tokens is always within them."""
DEEPEST_JSON = 200
"""Depth of nested objects and lists."""
LONGEST_NAME = 512
"""Characters of the name of a model, a role, a tool or a field of a request (400)."""
MOST_ITEMS = 16_384
"""Number of messages, items, prompts, tools or parts in one list of a request (400). Token ids count as values."""
MOST_FIELDS = 2048
"""Number of top-level fields of a request (400); an object in it may have `MOST_ITEMS`."""
MOST_CHOICES = 1024
"""Number of choices that a request may have (400)."""
LARGEST_COUNT = 2**53 - 1
"""Number of tokens or choices that a server may report; JSON numbers above it are not exact."""
MOST_FRAMES = 1_000_000
"""Number of frames in one stream of a model server; a longer stream is cut off."""
LONGEST_ERROR = 4000
"""Characters of an error message, for the agent and the record; the rest is cut off."""
LONGEST_COMPARED = 128
"""Characters of a name for which similar names are looked up; a longer one has no similar names."""
MOST_COMPARED = 200
"""Number of known names to compare with."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 60


def shown(value: object) -> str:
    """Return a value as text for an error, shortened if it is long."""
    return _SHORT.repr(value)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if none is similar enough."""
    if len(name) > LONGEST_COMPARED:
        return None
    names = [other for other in islice(known, MOST_COMPARED) if len(other) <= LONGEST_COMPARED]
    return closest_name(name, names)


def hint(name: str, known: Iterable[str], *, lists: bool = True) -> str:
    """Return the end of an error about an unknown name: the closest known name, else (`lists`) all known names."""
    names = list(known)
    if near := closest(name, names):
        return f"; did you mean {near!r}?"
    return f"; known: {', '.join(names)}" if names and lists else ""


def count_of(value: object) -> int:
    """Return a count from untrusted JSON; 0 if the value is not a count."""
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else 0


@explain_fields
@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """All limits of the gateway, each with the HTTP status of a call that exceeds it.

    Raises:
        ValueError: a limit is not positive; names it.
    """

    body_bytes: int = 32 * 1024 * 1024
    """Largest request (413) and largest reply of a model server (502)."""
    bytes_per_attempt: int = ATTEMPT_BYTES
    """Bytes of bodies that one attempt holds, from their arrival to the record of the call (429). All servers of
    a process share `utils.byte_budget.PROCESS_BYTES`."""
    calls: int = 1024
    """Number of concurrent calls; further calls wait."""
    calls_per_attempt: int = 64
    """Number of concurrent calls of one attempt; further calls wait."""
    waiting_calls: int = 1024
    """Number of calls that wait for a free slot (429), and of calls that wait while the weights change (503)."""
    remembered_responses: int = 1024
    """Number of stored responses of one attempt that can be continued by their id; older ones are deleted (400)."""
    remembered_bytes_per_attempt: int = 64 * 1024 * 1024
    """Bytes of stored responses and their items, for one attempt."""
    remembered_bytes: int = 256 * 1024 * 1024
    """Bytes of stored responses of all attempts; those of the least recently active attempt are deleted first."""
    call_seconds: float = 600.0
    """Seconds of one call from its arrival, waiting and retries included (504)."""
    store_seconds: float | None = None
    """Seconds for one request to the store (503). None is the time for which the store may be unreachable: 60 seconds
    or the `store_unreachable_timeout` of the run's runner."""
    tokens_per_rollout: int | None = None
    """Number of tokens of all calls of a rollout, prompts included (429 for the next call); None is no limit."""
    cost_per_rollout: float | None = None
    """Cost of all calls of a rollout, by the prices in `ModelConfig` (429 for the next call); None is no limit."""

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if bound is not None and not bound > 0:
                raise ValueError(f"GatewayLimits.{field.name} must be positive; got {bound!r}")
