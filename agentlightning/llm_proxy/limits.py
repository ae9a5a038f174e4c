"""The bounds of the gateway: bytes, calls and seconds. Beyond them a call is refused, never queued without end."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Every bound, with the answer that a call beyond it gets.

    Raises:
        ValueError: a bound is not positive; names it.
    """

    body_bytes: int = 32 * 1024 * 1024
    """Largest request (413) and largest reply of a model server (502)."""
    calls: int = 1024
    """Calls in hand at one time (429)."""
    calls_per_attempt: int = 64
    """Calls in hand for one attempt (429)."""
    waiting_calls: int = 1024
    """Calls that wait while the weights change (503)."""
    call_seconds: float = 600.0
    """Time of one call from its arrival, waiting and retries included (504)."""
    store_seconds: float = 5.0
    """Time that the store has for one question or one record (503)."""
    tokens_per_rollout: int | None = None
    """Tokens of all calls of a rollout, prompts included (429 for the next call); None is no bound."""
    cost_per_rollout: float | None = None
    """The same in money, by the prices in `ModelConfig` (429 for the next call)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if bound is not None and not bound > 0:
                raise ValueError(f"GatewayLimits.{field.name} must be positive; got {bound!r}")
