"""The interface between the training loop and the engine of a policy: the embedded engine, or a separate server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class EngineStats:
    """Totals since the start: completions finished, tokens read and sampled, seconds with completions in progress."""

    completions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    busy_seconds: float = 0.0


class PolicyEngine(Protocol):
    """Serves the current weights of a policy behind an OpenAI-compatible endpoint."""

    @property
    def model_name(self) -> str:
        """The `model` of requests."""
        ...

    @property
    def base_url(self) -> str:
        """The address to which the gateway sends calls. Available after `start`."""
        ...

    @property
    def api_key(self) -> str | None:
        """The key that calls must include; None requires no key."""
        ...

    def start(self) -> None:
        """Serve; return when the server responds."""
        ...

    def stop(self) -> None:
        """End it."""
        ...

    def paused(self, timeout: float = 30.0) -> AbstractContextManager[None]:
        """Return the block in which the weights may change: no completion is in progress, and the new weights are
        served afterwards."""
        ...

    def stats(self) -> EngineStats:
        """Return totals since the start."""
        ...
