"""Settings of the health checks, which ask endpoints that are out at intervals whether they can serve again.

Engines that are known are asked by `GET /health` below their root, which they answer with 503 when they cannot serve;
others by `GET /models`. Any answer below 500 counts, and neither costs tokens. One that does not answer these routes
comes back by the circuit breaker alone (`balancer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from agentlightning.field_help import explain_fields


@explain_fields
@dataclass(frozen=True, slots=True)
class HealthChecks:
    """When an endpoint is out, and how it comes back. An endpoint that is a model's only one is never out.

    Raises:
        ValueError: a setting is out of its bounds; names it.
    """

    failures: int = 3
    """Failures in a row that put an endpoint out."""
    rest_seconds: float = 2.0
    """How long it is out the first time, unless a health check succeeds."""
    longest_rest_seconds: float = 60.0
    """The most that the time grows to; it doubles each time."""
    interval_seconds: float = 2.0
    """Between two questions to an endpoint that is out."""
    timeout_seconds: float = 2.0
    """For the answer to one."""

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
