"""The folder of one Harbor trial, and the removal of what a killed runner left behind.

A runner holds a lock on the folder of each of its trials. A folder without a lock belongs to a runner that was killed,
or to a sandbox that did not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.environments.harbor.package import load_harbor
from agentlightning.litagent.command.attempt_folder import held_folder, left_folders

logger = logging.getLogger(__name__)

BASE = Path("/var/tmp")
"""Not TMPDIR, which other users often may not enter, as a sandbox of a runner that is root must."""
_RECORD = "trial.json"


@dataclass(slots=True)
class TrialFolder:
    """A folder that exists while its trial runs."""

    path: Path
    kept: bool = False
    """Whether the folder remains, like that of a killed runner, because the sandbox of the trial did not end."""

    @property
    def trials(self) -> Path:
        """The folder for the output of Harbor."""
        return self.path / "trials"

    def record(self, config: dict[str, Any]) -> None:
        """Store the configuration of the trial, by which its sandbox is found after a kill."""
        with open(os.open(self.path / _RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(config, file)


def parent_folder() -> Path:
    """Return the folder for the trials of this user on this machine.

    Raises:
        RuntimeError: another user has made it.
    """
    path = BASE / f"agl-harbor-{os.geteuid()}"
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{path} must be a folder that only its owner, user {os.geteuid()}, can write to. Remove it")
    path.chmod(0o711)
    return path


@contextlib.contextmanager
def trial_folder(name: str) -> Generator[TrialFolder]:
    """Make a folder for a trial, hold its lock, and remove it at the end."""
    path, lock = held_folder(f"{name}-", parent_folder())
    folder = TrialFolder(path)
    try:
        folder.path.chmod(0o711)
        folder.trials.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            if not folder.kept:
                shutil.rmtree(folder.path, ignore_errors=True)
        finally:
            os.close(lock)


def left_behind() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of trials whose runner was killed, each with the recorded configuration; each is then removed.

    Trials without a record have started no sandbox. Each folder is locked while it is handled.
    """
    for path, _ in left_folders(sorted(parent_folder().iterdir())):
        try:
            config: dict[str, Any] = json.loads((path / _RECORD).read_bytes())
        except (OSError, ValueError):
            config = {}
        yield path, config
        shutil.rmtree(path, ignore_errors=True)


async def remove_left_trials() -> None:
    """End the sandboxes of killed runners on this machine, and remove their folders."""
    for path, config in left_behind():
        logger.warning(
            "trial %s was left by a runner that has ended; ending its sandbox", config.get("trial_name", path.name)
        )
        if config and not str(config["environment"].get("import_path", "")).startswith("agentlightning."):
            try:
                await _end_sandboxes({**config, "trials_dir": str(path / "ended")})
            except Exception as error:  # of the provider; the others are still removed
                kind = config["environment"].get("type") or config["environment"].get("import_path")
                logger.error(
                    "the sandbox of trial %s in the environment %s may still run; ending it failed: %s: %s",
                    *(config.get("trial_name"), kind, type(error).__name__, error),
                )


async def _end_sandboxes(config: Mapping[str, Any]) -> None:
    """End the sandboxes of a trial, of the agent and of its verifiers, which are found by their names."""
    harbor = load_harbor()
    trial = await harbor.trial.create(harbor.trial_config.model_validate(dict(config)))
    left = [trial.agent_environment]
    for step in ("trial", *(step.name for step in trial.task.config.steps or [])):
        verifier = harbor.environments.create_environment_from_config(
            config=trial.config.environment,
            environment_dir=trial.task.paths.environment_dir,
            environment_name=trial.task.short_name,
            session_id=trial._separate_verifier_session_id(step),  # Harbor has no public function for it
            trial_paths=trial.paths,
            task_env_config=trial.task.config.environment,
        )
        left.append(verifier)
    delete = trial.config.environment.delete
    ends = await asyncio.gather(*(each.stop(delete=delete) for each in left), return_exceptions=True)
    for error in ends:
        if isinstance(error, BaseException):
            raise error
