"""What runner and reward share about a policy kernel such as Agent-OS: the violations of the attempt that runs.

A kernel is any object with `on_violation(callback)`: it calls the callback with what it refused, in the thread or task
of the agent that asked. The agent itself uses the kernel as it likes. Nothing of Agent-OS is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

VIOLATION_NAME = "policy_violation"
"""Name of the annotation that records a violation in the trace."""

violations_of_attempt: ContextVar[list[tuple[PolicyKernel, object]] | None] = ContextVar("agl_violations", default=None)
"""Kernel and violation, in their order; None outside of an attempt that is watched."""


@runtime_checkable
class PolicyKernel(Protocol):
    """What is asked of a kernel."""

    def on_violation(self, callback: Callable[[Any], None], /) -> object:
        """Call `callback` with every action that is refused from here on."""


def check_kernel(kernel: object) -> PolicyKernel:
    """Return the kernel.

    Raises:
        TypeError: it has no `on_violation`.
    """
    if isinstance(kernel, type) or not isinstance(kernel, PolicyKernel):
        raise TypeError(
            f"kernel must have a method on_violation(callback), which it calls with what it refuses; got {kernel!r}"
        )
    return kernel
