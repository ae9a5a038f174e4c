"""Kernels of the real package for tests, with a tool `query` and a policy that looks into its arguments."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

needs_agent_os = pytest.mark.skipif(
    importlib.util.find_spec("agent_control_plane") is None,
    reason="needs the package agent-os-kernel: make test-vendors",
)
ROLE = "analyst"
DENIED = ("DROP", "DELETE")


class SQLPolicy:
    """Refuses statements with a word that is denied, and other tools than `query`."""

    def check_violation(self, agent_role: str, tool_name: str, args: dict[str, Any]) -> str | None:
        if agent_role != ROLE or tool_name not in ("query", "file_read", "file_write", "syscall_sys_checkpolicy"):
            return f"{agent_role} may not use {tool_name}"
        arguments = args.get("args", args)
        words = [word for word in DENIED if word in str(arguments.get("statement", ""))]
        return f"{words[0]} is denied in {arguments['statement']}" if words else None


def query(statement: str, **options: object) -> str:
    return f"rows of {statement}"


def kernel_of(policy: object, recorder: object = None) -> Any:
    from agent_control_plane.kernel_space import KernelSpace

    kernel: Any = KernelSpace(policy_engine=policy, flight_recorder=recorder)
    kernel.register_tool("query", query)
    return kernel


def recorder_at(folder: Path) -> Any:
    from agent_control_plane.flight_recorder import FlightRecorder

    return FlightRecorder(str(folder / "flight.db"))


def unknown_agent(kernel: Any) -> Any:
    """Return the context of an agent that the kernel has no dispatcher for: it is refused and lives on."""
    from agent_control_plane.kernel_space import AgentContext

    return AgentContext(ROLE, kernel)


async def execute(context: Any, statement: str, **more: Any) -> Any:
    """Return the result of a system call that runs the tool."""
    from agent_control_plane.kernel_space import SyscallType

    return await context.syscall(SyscallType.SYS_EXEC, tool="query", args={"statement": statement, **more})


def living_agent(kernel: Any) -> Callable[[list[str]], Any]:
    """Return an agent that runs each statement of its task, whatever the result of those before."""

    async def agent(task: list[str]) -> Any:
        results = [await execute(unknown_agent(kernel), statement) for statement in task]
        return {"codes": [result.error_code for result in results]}

    return agent


def known_agent(kernel: Any) -> Callable[[list[str]], Any]:

    async def agent(task: list[str]) -> Any:
        from agent_control_plane.kernel_space import user_space_execution

        async with user_space_execution(kernel, ROLE) as context:
            return {"codes": [(await execute(context, statement)).error_code for statement in task]}

    return agent


def blocking_agent(kernel: Any) -> Callable[[list[str]], Any]:
    """Return the same as `living_agent` as a plain function, with an event loop of its own."""
    agent = living_agent(kernel)
    return lambda task: asyncio.run(agent(task))
