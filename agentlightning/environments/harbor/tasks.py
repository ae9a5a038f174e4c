"""Checks a data set of Harbor before training: whether each task starts, and whether its verifier is right."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentlightning.environments.harbor.agent import HarborAgent
from agentlightning.environments.harbor.trial_folder import remove_left_trials, trial_folder
from agentlightning.litagent.command.sandbox import Bubblewrap

Verdict = Literal["ready", "not ready", "no solution"]


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """The check of one task."""

    name: str
    path: str
    verdict: Verdict
    """`ready`: the solution gets a higher reward than no work at all. `no solution`: the task has none to try."""
    untouched: float | None
    """Reward if nothing is done; None if there is no verdict."""
    solved: float | None
    """Reward of the task's own solution; None if there is no verdict."""
    problem: str | None
    """What must be changed; None for a task that is ready."""
    seconds: float
    """Duration of the check."""


def task_folders(folder: Path) -> list[Path]:
    """Return the tasks of a data set: its sub-folders with a task.toml, or the folder itself.

    Raises:
        ValueError: it contains no task.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder on this machine")
    found = [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise ValueError(f"{folder} contains no task of Harbor: neither it nor its sub-folders have a task.toml")
    return found


async def check_tasks(
    folders: Sequence[Path],
    environment: str | Bubblewrap,
    *,
    tools: Sequence[str | os.PathLike[str]] = (),
    concurrency: int = 2,
) -> AsyncIterator[CheckedTask]:
    """Run no agent and the solution on each task, and yield the tasks in their order.

    Raises:
        RuntimeError: the environment cannot be used on this machine.
    """
    HarborAgent("nop", environment, tools=tools).require_environment()
    await remove_left_trials()
    slots = asyncio.Semaphore(concurrency)

    async def within(folder: Path) -> CheckedTask:
        async with slots:
            return await _check(folder, environment, tools)

    checks = [asyncio.ensure_future(within(folder)) for folder in folders]
    try:
        for check in checks:
            yield await check
    finally:
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)


async def _check(folder: Path, environment: str | Bubblewrap, tools: Sequence[str | os.PathLike[str]]) -> CheckedTask:
    began = asyncio.get_running_loop().time()
    untouched, problem = await _reward_of("nop", folder, environment, tools)
    solved: float | None = None
    has_solution = _has_solution(folder)
    if problem is None and has_solution:
        solved, problem = await _reward_of("oracle", folder, environment, tools)
    if problem is None and untouched is not None and solved is not None and solved <= untouched:
        problem = f"the verifier returns {solved:g} for the solution, which is not more than {untouched:g} for no work"
    verdict: Verdict = "not ready" if problem is not None else "ready" if has_solution else "no solution"
    seconds = asyncio.get_running_loop().time() - began
    return CheckedTask(folder.name, str(folder), verdict, untouched, solved, problem, round(seconds, 2))


def _has_solution(folder: Path) -> bool:
    return (folder / "solution").is_dir() or any(folder.glob("steps/*/solution"))


async def _reward_of(
    name: str, folder: Path, environment: str | Bubblewrap, tools: Sequence[str | os.PathLike[str]]
) -> tuple[float | None, str | None]:
    """Return the reward of one trial, or its problem."""
    agent = HarborAgent(name, environment, tools=tools)
    what = "without any work" if name == "nop" else "with the solution"
    try:
        with trial_folder(f"check-{name}") as place:
            result: Any = await agent.run_trial(str(folder), None, place)
            return agent.verdict(result)["reward"], None
    except Exception as error:  # of the task; the others are still checked
        return None, f"{what}: {error}"
