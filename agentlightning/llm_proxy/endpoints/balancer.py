"""Chooses the endpoint of a model for a rollout: the rollout's current one while it works, else the least busy one,
relative to its weight. Endpoints that are out are avoided.

A rollout keeps its endpoint, where its prompts are cached. An endpoint that fails several times in a row is out for a
time that doubles with each failure (a circuit breaker: Nygard, Release It!, chapter 5); then one call tries it.
Meanwhile its health is checked at intervals: known engines with `GET /health` below their root, which returns 503 if
they cannot serve; others with `GET /models`. Any response below 500 is a success. Neither request costs tokens. An
endpoint without these routes is brought back only by the circuit breaker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from agentlightning.base.field_help import explain_fields
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint

logger = logging.getLogger(__name__)
_REMEMBERED = 100_000


@explain_fields
@dataclass(frozen=True, slots=True)
class HealthChecks:
    """Settings for taking an endpoint out and bringing it back. The only one of a model without fallbacks is never out.

    Raises:
        ValueError: a setting is out of range; names it.
    """

    failures: int = 3
    """Number of failures in a row after which an endpoint is out."""
    rest_seconds: float = 2.0
    """Seconds for which it is out the first time, unless a health check succeeds earlier."""
    longest_rest_seconds: float = 60.0
    """Upper limit of that time, in seconds; it doubles each time."""
    interval_seconds: float = 2.0
    """Seconds between two health checks of an endpoint that is out."""
    timeout_seconds: float = 2.0
    """Seconds to wait for the response to a health check."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"HealthChecks.{field.name} must be a positive number; got {value!r}")
        if self.failures != int(self.failures):
            raise ValueError(f"HealthChecks.failures must be a whole number; got {self.failures!r}")
        if self.longest_rest_seconds < self.rest_seconds:
            raise ValueError(
                f"HealthChecks.longest_rest_seconds ({self.longest_rest_seconds!r}) must not be less than rest_seconds "
                f"({self.rest_seconds!r})"
            )


@dataclass(slots=True)
class _Circuit:
    rest: float
    """Seconds for which the endpoint is out after the next failure."""
    failures: int = 0
    until: float = 0.0
    """Time before which it gets no call; monotonic clock."""
    reported: bool = False
    """True if a health check succeeded and no call has succeeded since."""


class Balancer:
    """Orders the endpoints of a call by their health and load. Owned by the serving loop."""

    def __init__(self, checks: HealthChecks, clock: Callable[[], float] = time.monotonic) -> None:
        self._checks, self._clock = checks, clock
        self._homes: OrderedDict[tuple[str, str], ModelEndpoint] = OrderedDict()
        self._circuits: dict[ModelEndpoint, _Circuit] = {}
        self.in_flight: Counter[ModelEndpoint] = Counter()
        self.some_are_out = asyncio.Event()

    def order(self, rollout_id: str, model: str, endpoints: list[ModelEndpoint]) -> list[ModelEndpoint]:
        """Return the endpoints in the order in which a call tries them; the first becomes the rollout's endpoint.

        Those that are out come last; if all are out, they are still tried.
        """
        if len(endpoints) == 1 and endpoints[0] not in self._circuits:
            return endpoints
        key = (rollout_id, model)
        home = self._homes.get(key)
        serving = [endpoint for endpoint in endpoints if not self._rests(endpoint)]
        least = min(endpoint.weight for endpoint in endpoints)

        def load(endpoint: ModelEndpoint) -> int:  # else an idle endpoint of low weight would be the least busy
            return int(self.in_flight[endpoint] * (least / endpoint.weight))

        ordered = sorted(serving, key=lambda endpoint: (endpoint != home, load(endpoint)))
        ordered += [endpoint for endpoint in endpoints if endpoint not in serving]
        circuit = self._circuits.get(ordered[0])
        if circuit is not None and self._is_out(circuit):
            # this one call tries it; if it gives no result, a later one does
            circuit.until = self._clock() + circuit.rest
        self._homes[key] = ordered[0]
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return ordered

    def all_rest(self, endpoints: list[ModelEndpoint]) -> bool:
        """True if each endpoint is out and no call is due to try it."""
        return all(self._rests(endpoint) for endpoint in endpoints)

    @contextmanager
    def busy(self, endpoint: ModelEndpoint) -> Generator[None, None, None]:
        """Count a call at the endpoint while the block runs."""
        self.in_flight[endpoint] += 1
        try:
            yield
        finally:
            self.in_flight[endpoint] -= 1

    def served(self, endpoint: ModelEndpoint) -> None:
        """Record that the endpoint responded; a 4xx is also a response."""
        if self._circuits.pop(endpoint, None) is not None:
            self._update_event()

    def failed(self, endpoint: ModelEndpoint) -> float | None:
        """Record that the endpoint failed or is unreachable; return the seconds for which it is out, or None."""
        circuit = self._circuits.setdefault(endpoint, _Circuit(self._checks.rest_seconds))
        circuit.failures += 1
        if not self._is_out(circuit):
            return None
        rest, circuit.rest = circuit.rest, min(circuit.rest * 2, self._checks.longest_rest_seconds)
        circuit.until = self._clock() + rest
        self._update_event()
        return rest

    def reported_healthy(self, endpoint: ModelEndpoint) -> None:
        """Record a successful health check: the endpoint gets calls again; it is out again after the next failure.

        If calls fail after a successful check, further checks have no effect until a call succeeds.
        """
        circuit = self._circuits.get(endpoint)
        if circuit is not None and not circuit.reported:
            circuit.failures, circuit.until, circuit.reported = self._checks.failures - 1, 0.0, True
            logger.info("the model server %s passed its health check; it receives calls again", endpoint.label)
            self._update_event()

    def out(self) -> list[ModelEndpoint]:
        """Return the endpoints that are out."""
        return [endpoint for endpoint, circuit in self._circuits.items() if self._is_out(circuit)]

    def state(self, endpoint: ModelEndpoint) -> str:
        """Return `serving`, `failing` (lately, not often enough) or `out`."""
        circuit = self._circuits.get(endpoint)
        if circuit is None:
            return "serving"
        return "out" if self._is_out(circuit) else "failing"

    def _rests(self, endpoint: ModelEndpoint) -> bool:
        circuit = self._circuits.get(endpoint)
        return circuit is not None and self._is_out(circuit) and circuit.until > self._clock()

    def _is_out(self, circuit: _Circuit) -> bool:
        return circuit.failures >= self._checks.failures

    def _update_event(self) -> None:
        (self.some_are_out.set if self.out() else self.some_are_out.clear)()
