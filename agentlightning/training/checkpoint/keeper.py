"""Writes the checkpoints of a run: every so many steps, and at its end whatever ends it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.training.checkpoint.folder import Checkpoint, CheckpointFolder
from agentlightning.training.checkpoint.weights import digest_of
from agentlightning.training.policies.learners import Learners
from agentlightning.training.policies.loading import save_policies
from agentlightning.training.records import RunLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AfterStep:
    """Where a run stands after a step that is complete."""

    step: int
    weight_version: int
    digest: str
    state: Callable[[], dict[str, Any]]
    """Gives what the loop needs to go on after this step, as JSON data."""


@dataclass(kw_only=True)
class CheckpointKeeper:
    """Knows which step was saved last. Belongs to the loop; the files are written on a thread."""

    folder: CheckpointFolder
    learners: Learners
    log: RunLog
    run_facts: Mapping[str, Any]
    """What every checkpoint says of its run."""
    every: int
    """Steps between two checkpoints; 0: at the end only."""
    saved: int = 0
    """The step of the newest checkpoint."""
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _unrecorded: Checkpoint | None = None
    """Written, and not yet among the run's records."""

    async def step_done(self, after: AfterStep, alarm: Callable[[str], None]) -> None:
        """Write a checkpoint if it is due. One that cannot be written is told, and the run goes on."""
        if not self.every or after.step % self.every:
            return
        try:
            await asyncio.to_thread(self._write, after)
        except OSError as error:
            last = f"the last good one is of step {self.saved}" if self.saved else "there is none yet"
            alarm(f"step {after.step}: the checkpoint could not be written to {self.folder.path} ({error}); {last}")
            return
        await self._record()

    async def end(self, after: AfterStep | None) -> None:
        """Write the checkpoint of the last step that is complete, if the weights are still those after it. One whose
        writing was not waited for, because the run was interrupted, is recorded.

        Raises:
            OSError: it cannot be written; the last good one is what it was.
        """
        if after is not None:
            self._write(after)  # not on another thread: whoever ends the run may cancel what waits
        await self._record()

    async def _record(self) -> None:
        written, self._unrecorded = self._unrecorded, None
        if written is not None:
            await self.log.checkpoint(written.step, **record_of(written))

    def _write(self, after: AfterStep) -> None:
        with self._writing, self.learners.locked():
            if after.step <= self.saved:
                return
            if self.learners.weight_version != after.weight_version:
                logger.warning("step %d is not saved: a later update has begun; step %d is", after.step, self.saved)
                return
            facts = {**self.run_facts, "digest": after.digest, "weight_version": after.weight_version}
            if self.learners.names is not None:
                facts["digests"] = {str(each.name): digest_of(each.policy) for each in self.learners.all}
            self._unrecorded = self.folder.write(
                after.step, lambda folder: save_policies(self.learners, folder), {**facts, "state": after.state()}
            )
            self.saved = after.step


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the run's record of a checkpoint says."""
    facts = checkpoint.facts
    return {
        "path": str(checkpoint.path.resolve()),
        "digest": facts["digest"],
        "weight_version": facts["weight_version"],
    }
