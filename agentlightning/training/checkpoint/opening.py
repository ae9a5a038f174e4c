"""A run opened: what it is, how it goes on, and the folder that no other process trains in meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentlightning.training.checkpoint.begin import facts_of, write_run_file
from agentlightning.training.checkpoint.resume import STATE_NAME, Resumption, find_resumption
from agentlightning.training.resources import check_beside
from agentlightning.training.run_folder import RunFolder, held_folder, new_run_folder
from agentlightning.training.settings import GRPOSettings

if TYPE_CHECKING:
    from agentlightning.training.run_inputs import RunSource


@dataclass(frozen=True)
class OpenRun:
    """A run that may train."""

    facts: Mapping[str, Any]
    """What later starts are compared with."""
    resume: Resumption
    folder: RunFolder


async def open_run(
    algorithm: RunSource,
    settings: GRPOSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    held: ExitStack,
    **more_settings: object,
) -> OpenRun:
    """Return how the run of an algorithm goes on, with its folder, which is kept from other processes until `held` is
    closed.

    Args:
        more_settings: what else a later start is compared with, as JSON data by name.

    Raises:
        BadRequestError: the run was begun with something else, its folder is not there, has another run's files in
            it, or another process trains in it; or a resource of the Trainer's has the name of the policy.
    """
    beside = algorithm.get_initial_resources() or {}
    check_beside({settings.resource_name}, beside)
    store, log = algorithm.get_store(), algorithm.get_run_log()
    run_id = log.run_id or getattr(store, "run_id", None) or ""
    facts = await asyncio.to_thread(facts_of, run_id, settings, tasks, held_out, beside)
    facts["settings"].update(more_settings)
    resume = await find_resumption(store, log, facts, settings.output_dir, held)
    folder = RunFolder(resume.folder or settings.output_dir or new_run_folder())
    if resume.folder is None:
        folder.check_unused()
        held.enter_context(held_folder(folder.path))
        facts["folder"] = str(folder.path.resolve())
        write_run_file(folder.path, facts)
        await log.state(0, facts, STATE_NAME)
    return OpenRun(facts, resume, folder)
