"""Which endpoint of a model a rollout goes to: its own as long as that serves, else the least busy; never a broken one.

A rollout stays where its prompts are cached. An endpoint that fails several times in a row is left alone for a while
that doubles (a circuit breaker: Nygard, Release It!, chapter 5), then one call tries it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from agentlightning.llm_proxy.models import Endpoint

FAILURES = 3
"""So many in a row open the circuit."""
_REST_SECONDS = (2.0, 60.0)
"""How long a broken endpoint is left alone: first and longest."""
_REMEMBERED = 100_000


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    rest: float = _REST_SECONDS[0]
    until: float = 0.0
    """Closed, if in the past; monotonic clock."""
    trying: bool = False


class Balancer:
    """What is known of the endpoints. Owned by the serving loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._homes: OrderedDict[tuple[str, str], Endpoint] = OrderedDict()
        self._circuits: dict[Endpoint, _Circuit] = {}
        self.in_flight: Counter[Endpoint] = Counter()

    def order(self, rollout_id: str, model: str, endpoints: list[Endpoint]) -> list[Endpoint]:
        """Return the endpoints in the order in which a call is to try them; the first becomes the rollout's own.

        Broken ones come last: if all are broken, trying is better than refusing.
        """
        if len(endpoints) == 1:
            return endpoints
        key = (rollout_id, model)
        home = self._homes.get(key)
        serving = [endpoint for endpoint in endpoints if self._serves(endpoint)]
        ordered = sorted(serving, key=lambda endpoint: (endpoint != home, self.in_flight[endpoint]))
        ordered += [endpoint for endpoint in endpoints if endpoint not in serving]
        self._homes[key] = ordered[0]
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return ordered

    @contextmanager
    def busy(self, endpoint: Endpoint) -> Generator[None, None, None]:
        """Count a call at the endpoint while the block runs."""
        self.in_flight[endpoint] += 1
        try:
            yield
        finally:
            self.in_flight[endpoint] -= 1

    def served(self, endpoint: Endpoint) -> None:
        """The endpoint answered; a 4xx is an answer, too."""
        self._circuits.pop(endpoint, None)

    def failed(self, endpoint: Endpoint) -> float | None:
        """The endpoint could not be reached, or failed; returns for how long it is left alone, if it is."""
        circuit = self._circuits.setdefault(endpoint, _Circuit())
        circuit.failures += 1
        circuit.trying = False
        if circuit.failures < FAILURES:
            return None
        rest, circuit.rest = circuit.rest, min(circuit.rest * 2, _REST_SECONDS[1])
        circuit.until = self._clock() + rest
        return rest

    def state(self, endpoint: Endpoint) -> str:
        """Return `serving`, `failing` (lately, not often enough) or `broken`."""
        circuit = self._circuits.get(endpoint)
        if circuit is None:
            return "serving"
        return "broken" if circuit.failures >= FAILURES else "failing"

    def _serves(self, endpoint: Endpoint) -> bool:
        circuit = self._circuits.get(endpoint)
        if circuit is None or circuit.failures < FAILURES:
            return True
        if circuit.until > self._clock() or circuit.trying:
            return False
        circuit.trying = True  # the rest is over: this one call finds out
        return True
