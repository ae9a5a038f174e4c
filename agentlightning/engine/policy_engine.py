"""What the loop needs of whatever serves the policy: the embedded engine, or a server beside it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from agentlightning.engine.decode_thread import EngineStats


class PolicyEngine(Protocol):
    """Serves the present weights of a policy behind an OpenAI-style endpoint."""

    @property
    def model_name(self) -> str:
        """What requests must ask for as `model`."""
        ...

    @property
    def base_url(self) -> str:
        """Where the gateway sends calls. Known after `start`."""
        ...

    @property
    def api_key(self) -> str | None:
        """What calls must carry; None: nothing."""
        ...

    def start(self) -> None:
        """Serve; returns when requests are answered."""
        ...

    def stop(self) -> None:
        """End it."""
        ...

    def swap(self, timeout: float = 30.0) -> AbstractContextManager[None]:
        """Return the block in which the weights may change: nothing is in flight, and afterwards the new ones are
        served."""
        ...

    def stats(self) -> EngineStats:
        """Return sums since the start."""
        ...
