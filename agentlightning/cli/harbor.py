"""`agl harbor`: data sets of Harbor."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.cli.output import JSON, say, shortened, show_json, show_table

if TYPE_CHECKING:
    from agentlightning.environments.harbor.tasks import CheckedTask

app = typer.Typer(no_args_is_help=True)
_FOLDER = typer.Argument(metavar="FOLDER", help="Folder of a task, or of several tasks")


@app.callback()
def harbor() -> None:
    """Work with tasks in Harbor's format.

    Example: agl harbor tasks my-tasks
    """


@app.command("tasks")
def tasks(
    folder: Path = _FOLDER,
    environment: str = typer.Option("bwrap", help="Environment of the trials: bwrap, docker, podman, ..."),
    tools: list[str] = typer.Option([], help="Folder that a bwrap sandbox can read; may be repeated"),
    concurrency: int = typer.Option(2, min=1, help="Number of tasks to check at the same time"),
    check: bool = typer.Option(True, "--check/--list", help="Check the tasks, or only list them"),
    as_json: bool = JSON,
) -> None:
    """List the tasks of a folder, and check that each can be trained on.

    Each task is run twice: without any work, and with its own solution, which must get a higher reward. This finds
    images, programs and verifiers that are missing or broken before a training run does. Exit code 1 if a task is
    not ready.

    Example: agl harbor tasks my-tasks --environment docker
    """
    from agentlightning.environments.harbor.tasks import task_folders

    found = task_folders(folder.absolute())
    if not check:
        if as_json:
            show_json([{"name": each.name, "path": str(each)} for each in found])
        else:
            show_table(("task", "folder"), [(each.name, str(each)) for each in found])
        return
    checked = asyncio.run(_checked(found, environment, tools, concurrency))
    not_ready = [each for each in checked if each.verdict == "not ready"]
    if as_json:
        show_json([asdict(each) for each in checked])
    else:
        lines = [
            (each.name, each.verdict, _number(each.untouched), _number(each.solved), f"{each.seconds:.1f} s")
            for each in checked
        ]
        show_table(("task", "check", "no work", "solution", "time"), lines)
        for each in not_ready:
            say(f"{each.name}: {shortened(each.problem or '', 400)}")
        say(f"{len(checked) - len(not_ready)} of {len(checked)} tasks can be used")
    if not_ready:
        raise typer.Exit(1)


async def _checked(found: list[Path], environment: str, tools: list[str], concurrency: int) -> list[CheckedTask]:
    from agentlightning.environments.harbor.tasks import check_tasks

    return [each async for each in check_tasks(found, environment, tools=tools, concurrency=concurrency)]


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"
