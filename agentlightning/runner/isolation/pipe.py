"""The messages between a runner and a process of its agent, and the store as that process sees it.

Orders and answers, each one pickled object:

| from the runner                             | from the process                                    |
| ------------------------------------------- | --------------------------------------------------- |
| `Order`: run this attempt                   | `READY`, once                                       |
| `Answer`: what the store said to an `Ask`   | `Ask`: call the store                               |
|                                             | `Outcome`: the attempt is over                      |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from agentlightning.runner.outcome import AttemptFault
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.wrappers.forward import forward_operations
from agentlightning.types import AttemptedRollout, NamedResources

READY = "ready"
Carry = Callable[[str, tuple[object, ...], dict[str, object]], Awaitable[object]]
"""Carries an operation with its arguments to the runner and returns what its store answers."""


class AgentRaised(AttemptFault):
    """The agent raised an exception that cannot leave its process; says what it was."""


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt to run."""

    rollout: AttemptedRollout
    resources: NamedResources


@dataclass(frozen=True, slots=True)
class Ask:
    """One operation of the store."""

    number: int
    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store gave, or raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the agent gave, or raised; the traceback as text, which an exception loses on its way."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


@forward_operations
class PipeStore(LightningStore):
    """The runner's store, from within a process that it has started; used by that process's event loop."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return {"async_safe": True}

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return await self._carry(operation, args, kwargs)
